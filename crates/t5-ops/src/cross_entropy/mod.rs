//! The output projection and the cross-entropy in one operation, a part at a time, so that the logits
//! (R, V) never exist whole. Loss, dX and dW come out of one call.
//!
//! `logits = logit_scale * x Wᵀ`, `loss = sum over rows of (log-sum-exp(logits) - logits[label])`.
//!
//! Shapes: x, dx (R, D); w, dw (V, D); labels R.

mod cpu;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape, has_kernel};
use crate::storage::elements;

/// Rows with this label count for nothing and cost nothing.
pub const IGNORED_LABEL: u32 = u32::MAX;

/// The scales and the chunk size of one call.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// What the logits are multiplied by: `d_model^-0.5` where T5's head is tied to the embedding.
    pub logit_scale: f64,
    /// What the gradients (not the loss) are multiplied by: 1 / target tokens of the optimizer batch.
    pub gradient_scale: f64,
    /// The most rows of logits that are kept at a time. Where computing them again is faster, fewer are.
    pub chunk_rows: usize,
}

/// The sum of the token losses, without gradients.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<f64> {
    let _span = tracing::debug_span!("linear_cross_entropy", flops = product_flops(w, labels)).entered();
    let rows = valid_rows("linear_cross_entropy", x, w, labels, c)?;
    if has_kernel(&[x, w]) { cpu::loss(x, w, labels, &rows, c) } else { reference::loss(x, w, labels, &rows, c) }
}

/// The sum of the token losses and the gradient with respect to `x` (in its dtype, zero in ignored rows);
/// with `dw` adds that of `w` to the tensor, or, where the flag is false, writes it there whatever was there. Both
/// gradients are multiplied by `gradient_scale`.
pub fn linear_cross_entropy_backward(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
) -> Result<(f64, Tensor)> {
    let products = if dw.is_some() { 3 } else { 2 };
    let _span =
        tracing::debug_span!("linear_cross_entropy_backward", flops = products * product_flops(w, labels)).entered();
    let rows = valid_rows("linear_cross_entropy_backward", x, w, labels, c)?;
    if let Some((dw, _)) = dw {
        check_accumulator("linear_cross_entropy_backward", "dw", dw, w.dims())?;
    }
    if has_kernel(&[x, w]) && dw.is_none_or(|(dw, _)| has_kernel(&[dw])) {
        cpu::gradients(x, w, labels, &rows, c, dw, cpu::Logits::of(x.dtype(), c.chunk_rows))
    } else {
        reference::gradients(x, w, labels, &rows, c, dw)
    }
}

/// Bytes that a call holds on the CPU beside its operands and results, for `rows` rows that count and a weight of
/// (`vocabulary`, `width`): the buffers of the products are not in it. `gradients`: of
/// [`linear_cross_entropy_backward`], or else of [`linear_cross_entropy`].
///
/// It depends on the machine's instruction set, as the kernels do, and not on the number of threads: what each thread has
/// for itself is in [`linear_cross_entropy_kept_bytes`].
pub fn linear_cross_entropy_bytes(
    rows: usize,
    (vocabulary, width): (usize, usize),
    activations: DType,
    chunk_rows: usize,
    gradients: bool,
) -> usize {
    match activations {
        DType::F32 | DType::BF16 => cpu::bytes(rows, vocabulary, width, activations, chunk_rows, gradients),
        // The reference: logits, their exponentials and their gradient.
        _ => 3 * chunk_rows.min(rows) * vocabulary * 8,
    }
}

/// Bytes that the threads hold for such a call and keep for the next one.
pub fn linear_cross_entropy_kept_bytes(
    rows: usize,
    vocabulary: usize,
    activations: DType,
    chunk_rows: usize,
    gradients: bool,
) -> usize {
    match activations {
        DType::F32 | DType::BF16 => cpu::kept_by_threads(rows, vocabulary, activations, chunk_rows, gradients),
        _ => 0,
    }
}

/// Whether [`linear_cross_entropy_backward`] keeps logits of `chunk_rows` rows between its two passes on the CPU; otherwise it
/// computes them again, and no more than a block of the vocabulary's ever exists.
pub fn keeps_logits(activations: DType, chunk_rows: usize) -> bool {
    !matches!(activations, DType::F32 | DType::BF16) || cpu::Logits::of(activations, chunk_rows) == cpu::Logits::Kept
}

/// The floating-point operations of one product of the rows that count with `w`.
fn product_flops(w: &Tensor, labels: &[u32]) -> usize {
    2 * labels.iter().filter(|&&label| label != IGNORED_LABEL).count() * w.elem_count()
}

/// The rows that count, in order.
fn valid_rows(op: &str, x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<Vec<u32>> {
    let (v, d) = w.dims2()?;
    check_shape(op, "x", x, &[labels.len(), d])?;
    elements(x.shape()).and_then(|_| elements(w.shape()))?;
    if c.chunk_rows == 0 {
        bail!("{op}: chunk_rows: expected at least 1, got 0")
    }
    // Rows are numbered in 32 bits below, and each number stands for one row.
    if u32::try_from(labels.len()).is_err() {
        bail!("{op}: expected at most {} rows, got {}", u32::MAX, labels.len())
    }
    let mut rows = Vec::with_capacity(labels.len());
    for (row, &label) in labels.iter().enumerate() {
        if label == IGNORED_LABEL {
            continue;
        }
        if label as usize >= v {
            bail!("{op}: row {row}: expected a label below {v}, got {label}")
        }
        rows.push(row as u32);
    }
    Ok(rows)
}

pub(crate) mod reference {
    use candle_core::{D, DType, Result, Tensor};

    use super::{CrossEntropy, valid_rows};
    use crate::dispatch::{add_into, matmul_dtype, wide_dtype};

    /// See [`crate::linear_cross_entropy`].
    pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<f64> {
        let rows = valid_rows("linear_cross_entropy", x, w, labels, c)?;
        loss(x, w, labels, &rows, c)
    }

    /// See [`crate::linear_cross_entropy_backward`].
    pub fn linear_cross_entropy_backward(
        x: &Tensor,
        w: &Tensor,
        labels: &[u32],
        c: &CrossEntropy,
        dw: Option<(&Tensor, bool)>,
    ) -> Result<(f64, Tensor)> {
        let rows = valid_rows("linear_cross_entropy_backward", x, w, labels, c)?;
        gradients(x, w, labels, &rows, c, dw)
    }

    pub(super) fn loss(x: &Tensor, w: &Tensor, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<f64> {
        let w = w.to_dtype(matmul_dtype(x))?;
        let mut loss = 0.0;
        for rows in rows.chunks(c.chunk_rows) {
            loss += Chunk::new(x, &w, labels, rows, c)?.loss()?;
        }
        Ok(loss)
    }

    pub(super) fn gradients(
        x: &Tensor,
        w: &Tensor,
        labels: &[u32],
        rows: &[u32],
        c: &CrossEntropy,
        dw: Option<(&Tensor, bool)>,
    ) -> Result<(f64, Tensor)> {
        let dtype = matmul_dtype(x);
        let w = w.to_dtype(dtype)?;
        if let Some((dw, false)) = dw {
            crate::zero(dw)?;
        }
        let mut dx = Tensor::zeros(x.shape(), wide_dtype(x), x.device())?;
        let mut loss = 0.0;
        for rows in rows.chunks(c.chunk_rows) {
            let chunk = Chunk::new(x, &w, labels, rows, c)?;
            loss += chunk.loss()?;
            // d loss / d logits = softmax - one-hot of the label.
            let softmax = chunk.logits.broadcast_sub(&chunk.lse)?.exp()?;
            let minus_one = Tensor::ones((rows.len(), 1), softmax.dtype(), x.device())?.neg()?;
            let dlogits = softmax.scatter_add(&chunk.labels, &minus_one, 1)?;
            let dlogits = (dlogits * (c.gradient_scale * c.logit_scale))?.to_dtype(dtype)?;
            let dx_rows = dlogits.matmul(&w)?.to_dtype(dx.dtype())?;
            dx = dx.index_add(&chunk.rows, &dx_rows, 0)?;
            if let Some((dw, _)) = dw {
                add_into(dw, &dlogits.t()?.matmul(&chunk.x)?)?;
            }
        }
        Ok((loss, dx.to_dtype(x.dtype())?))
    }

    /// A chunk of rows with their logits.
    struct Chunk {
        rows: Tensor,   // (C)
        labels: Tensor, // (C, 1)
        x: Tensor,      // (C, D)
        logits: Tensor, // (C, V), wide
        lse: Tensor,    // (C, 1), wide
    }

    impl Chunk {
        fn new(x: &Tensor, w: &Tensor, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<Self> {
            let labels: Vec<u32> = rows.iter().map(|&row| labels[row as usize]).collect();
            let labels = Tensor::from_vec(labels, (rows.len(), 1), x.device())?;
            let rows = Tensor::new(rows, x.device())?;
            let wide = wide_dtype(x);
            let x = x.contiguous()?.index_select(&rows, 0)?.to_dtype(w.dtype())?;
            let logits = (x.matmul(&w.t()?)?.to_dtype(wide)? * c.logit_scale)?;
            let lse = logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?;
            Ok(Self { rows, labels, x, logits, lse })
        }

        fn loss(&self) -> Result<f64> {
            let losses = (&self.lse - self.logits.gather(&self.labels, 1)?)?;
            losses.to_dtype(DType::F64)?.sum_all()?.to_scalar()
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::testing::{Numbers, assert_close, check_gradient, tolerance, values};

    fn scales(chunk_rows: usize) -> CrossEntropy {
        CrossEntropy { logit_scale: 0.7, gradient_scale: 0.25, chunk_rows }
    }

    fn some_labels(rows: usize, vocabulary: usize) -> Vec<u32> {
        let mut numbers = Numbers::new(31);
        (0..rows).map(|row| if row % 3 == 1 { IGNORED_LABEL } else { numbers.below(vocabulary) as u32 }).collect()
    }

    #[test]
    fn the_reference_agrees_with_finite_differences() {
        let mut numbers = Numbers::new(30);
        let (x, w) = (numbers.tensor(&[5, 3], DType::F64), numbers.tensor(&[7, 3], DType::F64));
        let labels = some_labels(5, 7);
        for chunk_rows in [1, 2, 100] {
            let c = scales(chunk_rows);
            let dw = w.zeros_like().unwrap();
            let (loss, dx) = linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&dw, true))).unwrap();
            assert!((loss - linear_cross_entropy(&x, &w, &labels, &c).unwrap()).abs() < 1e-12);
            check_gradient("dx", &x, &dx, |x| Ok(0.25 * linear_cross_entropy(x, &w, &labels, &c)?));
            check_gradient("dw", &w, &dw, |w| Ok(0.25 * linear_cross_entropy(&x, w, &labels, &c)?));
        }
    }

    #[test]
    fn the_reference_agrees_with_the_cross_entropy_of_candle() {
        let mut numbers = Numbers::new(33);
        let (x, w) = (numbers.tensor(&[6, 4], DType::F64), numbers.tensor(&[9, 4], DType::F64));
        let labels = [0u32, 8, 3, 3, 1, 5];
        let logits = (reference_logits(&x, &w) * 0.7).unwrap();
        let mean = candle_nn::loss::cross_entropy(&logits, &Tensor::new(&labels, x.device()).unwrap()).unwrap();
        let expected = mean.to_scalar::<f64>().unwrap() * 6.0;
        let got = linear_cross_entropy(&x, &w, &labels, &scales(4)).unwrap();
        assert!((got - expected).abs() < 1e-12, "expected {expected}, got {got}");
    }

    fn reference_logits(x: &Tensor, w: &Tensor) -> Tensor {
        crate::reference::linear(x, w).unwrap()
    }

    #[test]
    fn kernels_agree_with_the_reference_for_every_chunk_size() {
        // The last: more than one tile of the vocabulary in each stretch, and a last block of one entry.
        for (rows, v, d) in [(1, 1, 1), (7, 65, 33), (65, 7, 16), (40, 700, 64), (9, 4353, 5)] {
            for (dtype, weight_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32)] {
                for (chunk_rows, logits) in [1, 7, 64, 1000]
                    .into_iter()
                    .flat_map(|chunk_rows| [(chunk_rows, cpu::Logits::Kept), (chunk_rows, cpu::Logits::ComputedAgain)])
                {
                    let mut numbers = Numbers::new(32);
                    let (x, w) = (numbers.tensor(&[rows, d], dtype), numbers.tensor(&[v, d], weight_dtype));
                    let (labels, c) = (some_labels(rows, v), scales(chunk_rows));
                    let dw = numbers.tensor(&[v, d], DType::F32);
                    let expected_dw = dw.copy().unwrap();
                    let valid = valid_rows("test", &x, &w, &labels, &c).unwrap();
                    let (loss, dx) = cpu::gradients(&x, &w, &labels, &valid, &c, Some((&dw, true)), logits).unwrap();
                    let (expected, expected_dx) =
                        reference::linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&expected_dw, true)))
                            .unwrap();
                    let what = format!("({rows}, {v}, {d}) {dtype:?} by {chunk_rows} {logits:?}");
                    let close = |a: f64, b: f64| (a - b).abs() <= tolerance(dtype) * (1.0 + b.abs());
                    assert!(close(loss, expected), "{what}: expected {expected}, got {loss}");
                    assert!(close(linear_cross_entropy(&x, &w, &labels, &c).unwrap(), expected), "{what}");
                    assert_eq!(dx.dtype(), dtype);
                    if v > 1 {
                        assert_close(&format!("{what} dx"), &dx, &expected_dx, tolerance(dtype));
                    }
                    assert_close(&format!("{what} dw"), &dw, &expected_dw, tolerance(dtype));
                    let expected_dw = dw.copy().unwrap();
                    cpu::gradients(&x, &w, &labels, &valid, &c, Some((&dw, false)), logits).unwrap();
                    reference::linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&expected_dw, false))).unwrap();
                    assert_close(&format!("{what} dw ="), &dw, &expected_dw, tolerance(dtype));
                }
            }
        }
    }

    #[test]
    fn ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold() {
        let mut numbers = Numbers::new(34);
        let w = numbers.tensor(&[6, 3], DType::F32);
        let x = numbers.tensor(&[2, 3], DType::F32);
        let bad = Tensor::cat(&[&x, &(&x * f64::NAN).unwrap()], 0).unwrap();
        let c = scales(8);
        let expected = linear_cross_entropy(&x, &w, &[1, 2], &c).unwrap();
        let labels = [1, 2, IGNORED_LABEL, IGNORED_LABEL];
        let (loss, dx) = linear_cross_entropy_backward(&bad, &w, &labels, &c, None).unwrap();
        assert_eq!(loss, expected);
        assert!(values(&dx.narrow(0, 2, 2).unwrap()).iter().all(|&x| x == 0.0));
        let (loss, dx) = linear_cross_entropy_backward(&x, &w, &[IGNORED_LABEL; 2], &c, None).unwrap();
        assert_eq!(loss, 0.0);
        assert!(values(&dx).iter().all(|&x| x == 0.0));
        let dw = w.ones_like().unwrap();
        linear_cross_entropy_backward(&x, &w, &[IGNORED_LABEL; 2], &c, Some((&dw, false))).unwrap();
        assert!(values(&dw).iter().all(|&x| x == 0.0));
        assert!(linear_cross_entropy(&bad, &w, &[1, 2, 3, 4], &c).unwrap().is_nan());
    }

    #[test]
    fn a_label_outside_the_vocabulary_is_an_error() {
        let mut numbers = Numbers::new(35);
        let (x, w) = (numbers.tensor(&[2, 3], DType::F32), numbers.tensor(&[6, 3], DType::F32));
        let message = linear_cross_entropy(&x, &w, &[1, 6], &scales(8)).unwrap_err().to_string();
        assert!(message.contains("row 1: expected a label below 6, got 6"), "{message}");
        assert!(linear_cross_entropy(&x, &w, &[1], &scales(8)).is_err());
        assert!(linear_cross_entropy(&x, &w, &[1, 2], &scales(0)).is_err());
    }
}
