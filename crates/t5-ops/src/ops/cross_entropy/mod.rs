//! The output projection and the cross-entropy in one operation, a part at a time, so that the logits
//! (R, V) never exist whole. Loss, dX and dW come out of one call.
//!
//! `logits = cap(logit_scale * x Wᵀ)`, `loss = sum over rows of (log-sum-exp(logits) - logits[label])`. The cap is `c tanh(l / c)`, or none.
//!
//! A frozen weight may be in f16, or come from its file by rows.
//!
//! Shapes: x, dx (R, D); w, dw (V, D); labels R.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::elements;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{self, Calls, Needs};
use crate::ops::linear;
use crate::ops::token_loss::{LossSums, TokenLoss};
use crate::quantised::Weight;

/// Rows with this label add nothing and cost nothing.
pub const IGNORED_LABEL: u32 = u32::MAX;

/// The scales and the chunk size of one call.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// Factor of the logits: `d_model^-0.5` where T5's head is tied to the embedding.
    pub logit_scale: f64,
    /// The cap of the logits, after their scale.
    pub soft_cap: Option<f64>,
    /// Factor of the gradients (not the loss): 1 / target tokens of the optimizer batch.
    pub gradient_scale: f64,
    /// The most rows of logits that are kept at a time. Fewer are kept if computing them again is faster.
    pub chunk_rows: usize,
    /// The terms that are minimised beside the cross-entropy.
    pub token_loss: TokenLoss,
}

impl Default for CrossEntropy {
    fn default() -> Self {
        let (logit_scale, gradient_scale) = (1.0, 1.0);
        Self { logit_scale, soft_cap: None, gradient_scale, chunk_rows: 256, token_loss: TokenLoss::default() }
    }
}

/// The sum of the cross-entropies, or of minus the labels' logits, without gradients and without other terms.
pub fn linear_cross_entropy<'a>(x: &Tensor, w: impl Into<Weight<'a>>, labels: &[u32], c: &CrossEntropy) -> Result<f64> {
    let (w, op) = (w.into(), "linear_cross_entropy");
    let _span = tracing::debug_span!("linear_cross_entropy", flops = product_flops(w, labels)?).entered();
    let rows = valid_rows(op, x, w, labels, c)?;
    match w.path_with(x) {
        Path::Cpu => Ok(cpu::losses(x, w, labels, &rows, c)?.into_iter().sum::<LossSums>().cross_entropy),
        #[cfg(feature = "cuda")]
        Path::Device if c.soft_cap.is_none() && cuda_device::launch::takes([x, w.tensor()]) => {
            Ok(cuda::chunks(x, w.tensor(), labels, &rows, c, None, None)?.cross_entropy)
        }
        Path::Reference | Path::Device => reference::loss(x, w, labels, &rows, c),
    }
}

/// Returns the sums of the token losses and the gradient of the objective with respect to `x` (in its dtype, zero in ignored rows). With `dw`, also adds the
/// gradient of `w` to the tensor, or overwrites the tensor if the flag is false. Both gradients are multiplied by `gradient_scale`.
pub fn linear_cross_entropy_backward<'a>(
    x: &Tensor,
    w: impl Into<Weight<'a>>,
    labels: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
) -> Result<(LossSums, Tensor)> {
    let w = w.into();
    let products = if dw.is_some() { 3 } else { 2 };
    let _span =
        tracing::debug_span!("linear_cross_entropy_backward", flops = products * product_flops(w, labels)?).entered();
    let rows = valid_rows("linear_cross_entropy_backward", x, w, labels, c)?;
    if let Some((dw, _)) = dw {
        check_accumulator("linear_cross_entropy_backward", "dw", dw, &<[usize; 2]>::from(w.dims2()?))?;
    }
    let path = w.path_with(x).provided(dw.is_none_or(|(dw, _)| Path::choose(&[dw]) == Path::Cpu));
    match path {
        Path::Cpu => cpu::gradients(x, w, labels, &rows, c, dw, (cpu::Logits::choose(x.dtype(), c.chunk_rows), None)),
        #[cfg(feature = "cuda")]
        Path::Device
            if c.soft_cap.is_none()
                && cuda_device::launch::takes([x, w.tensor()])
                && dw.is_none_or(|(dw, _)| cuda::takes_gradient(x, dw)) =>
        {
            cuda::gradients(x, w.tensor(), labels, &rows, c, dw)
        }
        Path::Reference | Path::Device => reference::gradients(x, w, labels, &rows, c, dw),
    }
}

/// [`linear_cross_entropy`] of each group of rows: the first `sizes[0]` rows, and so on. On the CPU the weight is read as often as for all rows
/// together.
///
/// # Errors
/// As [`linear_cross_entropy`].
pub fn linear_cross_entropies<'a>(
    x: &Tensor,
    w: impl Into<Weight<'a>>,
    labels: &[u32],
    sizes: &[usize],
    c: &CrossEntropy,
) -> Result<Vec<f64>> {
    let w = w.into();
    if w.path_with(x) == Path::Cpu {
        let rows = valid_rows("linear_cross_entropy", x, w, labels, c)?;
        let mut losses = rows.iter().zip(cpu::losses(x, w, labels, &rows, c)?).peekable();
        let of_group = |(_, end): (usize, usize)| {
            let in_group = std::iter::from_fn(|| losses.next_if(|(row, _)| (**row as usize) < end));
            in_group.map(|(_, loss)| loss).sum::<LossSums>().cross_entropy
        };
        return Ok(ranges(sizes).map(of_group).collect());
    }
    let of_group = |(first, end)| linear_cross_entropy(&x.narrow(0, first, end - first)?, w, &labels[first..end], c);
    ranges(sizes).map(of_group).collect()
}

/// [`linear_cross_entropy_backward`] without a gradient of the weight, where the gradients of each group of rows are multiplied by its factor,
/// too. Groups have `labels.len() / factors.len()` rows.
///
/// # Errors
/// As [`linear_cross_entropy_backward`].
pub fn weighted_linear_cross_entropy_backward<'a>(
    x: &Tensor,
    w: impl Into<Weight<'a>>,
    labels: &[u32],
    factors: &[f64],
    c: &CrossEntropy,
) -> Result<(LossSums, Tensor)> {
    let (w, size) = (w.into(), labels.len() / factors.len().max(1));
    if w.path_with(x) == Path::Cpu {
        let rows = valid_rows("linear_cross_entropy_backward", x, w, labels, c)?;
        let factors: Vec<f32> = (0..labels.len()).map(|row| factors[row / size] as f32).collect();
        let how = (cpu::Logits::choose(x.dtype(), c.chunk_rows), Some(factors.as_slice()));
        return cpu::gradients(x, w, labels, &rows, c, None, how);
    }
    let (mut loss, mut parts) = (LossSums::default(), Vec::new());
    for (group, factor) in factors.iter().enumerate() {
        let (first, c) = (group * size, CrossEntropy { gradient_scale: c.gradient_scale * factor, ..*c });
        let (x, labels) = (x.narrow(0, first, size)?, &labels[first..first + size]);
        let (of_group, dx) = linear_cross_entropy_backward(&x, w, labels, &c, None)?;
        loss += of_group;
        parts.push(dx);
    }
    Ok((loss, Tensor::cat(&parts, 0)?))
}

/// The first row of each group, and the row behind its last.
fn ranges(sizes: &[usize]) -> impl Iterator<Item = (usize, usize)> + '_ {
    sizes.iter().scan(0, |first, size| {
        let range = (*first, *first + size);
        *first = range.1;
        Some(range)
    })
}

/// Returns the needs of [`linear_cross_entropy`] for `rows` rows that count, a weight (V, D), and the dtypes of x and w. The blocks of
/// logits that threads keep depend on the number of threads.
pub fn linear_cross_entropy_needs(
    path: Path,
    rows: usize,
    weight: (usize, usize),
    dtypes: [DType; 2],
    c: &CrossEntropy,
) -> Needs {
    match path {
        Path::Cpu => cpu::loss_needs(rows, weight, dtypes[0], c.chunk_rows),
        Path::Reference => reference::loss_needs(rows, weight, dtypes, c),
        Path::Device if c.soft_cap.is_some() => reference::loss_needs(rows, weight, dtypes, c),
        Path::Device => needs_on_device(rows, weight, dtypes, c.chunk_rows, 1),
    }
}

/// Returns the needs of [`linear_cross_entropy_backward`], as [`linear_cross_entropy_needs`]. `trains`: with the gradient of the weight.
/// The arithmetic on the CPU includes that gradient in either case.
pub fn linear_cross_entropy_backward_needs(
    path: Path,
    rows: usize,
    weight: (usize, usize),
    dtypes: [DType; 2],
    c: &CrossEntropy,
    trains: bool,
) -> Needs {
    match path {
        Path::Cpu => cpu::gradients_needs(rows, weight, dtypes[0], c),
        Path::Reference => reference::gradients_needs(rows, weight, dtypes, c),
        Path::Device if c.soft_cap.is_some() => reference::gradients_needs(rows, weight, dtypes, c),
        Path::Device => needs_on_device(rows, weight, dtypes, c.chunk_rows, 2 + usize::from(trains)),
    }
}

/// Returns how often [`linear_cross_entropy`], or with gradients [`linear_cross_entropy_backward`], reads a weight that comes by rows.
/// `rows` is the number of rows that count, of an x of this dtype.
pub fn linear_cross_entropy_passes(x: DType, rows: usize, chunk_rows: usize, with_gradients: bool) -> u64 {
    let of_chunk = 1 + u64::from(with_gradients);
    match Path::on_cpu(x) {
        Path::Cpu => of_chunk * cpu::chunks(x, rows, chunk_rows, with_gradients) as u64,
        Path::Reference | Path::Device => 1,
    }
}

/// On a card: the weight in the dtype of x. For a chunk: its rows, and logits in f32. With gradients also the gradients of the rows, and
/// the gradients of the logits unless they overwrite the logits.
fn needs_on_device(
    rows: usize,
    (vocabulary, width): (usize, usize),
    [x, w]: [DType; 2],
    chunk_rows: usize,
    products: usize,
) -> Needs {
    let with_gradients = products > 1;
    let chunk = chunk_rows.min(rows);
    let cells = needs::elements([chunk, vocabulary]);
    let of_rows = needs::elements([chunk, width, x.size_in_bytes()]);
    let gradients = if with_gradients { needs::cast(cells, DType::F32, x) + of_rows } else { 0 };
    let logits = cells * size_of::<f32>() as u64;
    // For a chunk: its rows, losses and their sum; and the rows of its gradient. Two lists hold the numbers of these rows, and their
    // labels.
    let of_chunk =
        Calls { launches: 3 + u64::from(with_gradients), products: products as u64, uploads: 2, ..Calls::default() };
    let once = Calls { downloads: 1, ..linear::casts(w, x) };
    let calls = of_chunk * rows.div_ceil(chunk_rows.max(1)) as u64 + once;
    Needs::bytes(needs::cast(needs::elements([vocabulary, width]), w, x) + of_rows + logits + gradients)
        .with_products(products, (rows, width, vocabulary))
        .with_calls(calls)
}

/// Whether [`linear_cross_entropy_backward`] keeps logits of `chunk_rows` rows between its two passes on the CPU. Otherwise it computes
/// them again, and at most a block of the vocabulary's logits exists at a time.
pub fn keeps_logits(activations: DType, chunk_rows: usize) -> bool {
    match Path::on_cpu(activations) {
        Path::Cpu => cpu::Logits::choose(activations, chunk_rows) == cpu::Logits::Kept,
        Path::Reference | Path::Device => true,
    }
}

/// The floating-point operations of one product of the rows that count with `w`.
fn product_flops(w: Weight, labels: &[u32]) -> Result<usize> {
    let (v, d) = w.dims2()?;
    Ok(2 * labels.iter().filter(|&&label| label != IGNORED_LABEL).count() * v * d)
}

/// The rows that count, in order.
fn valid_rows(op: &str, x: &Tensor, w: Weight, labels: &[u32], c: &CrossEntropy) -> Result<Vec<u32>> {
    let (v, d) = w.dims2()?;
    check_shape(op, "x", x, &[labels.len(), d])?;
    elements(x.shape()).and_then(|_| elements(&(v, d).into()))?;
    if c.soft_cap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
        bail!("{op}: soft_cap: expected a number above 0, got {:?}", c.soft_cap)
    }
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
