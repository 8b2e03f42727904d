//! The output projection and the cross-entropy in one operation, over chunks of rows, so that the logits
//! (R, V) never exist whole. Loss, dX and dW come out of one pass over the chunks.
//!
//! `logits = logit_scale * x Wᵀ`, `loss = sum over rows of (log-sum-exp(logits) - logits[label])`.
//!
//! Shapes: x, dx (R, D); w, dw (V, D); labels R.

use candle_core::{Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape};

/// Rows with this label count for nothing and cost nothing.
pub const IGNORED_LABEL: u32 = u32::MAX;

/// The scales and the chunk size of one call.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// What the logits are multiplied by: `d_model^-0.5` where T5's head is tied to the embedding.
    pub logit_scale: f64,
    /// What the gradients (not the loss) are multiplied by: 1 / target tokens of the optimizer batch.
    pub gradient_scale: f64,
    /// How many rows of logits exist at a time.
    pub chunk_rows: usize,
}

/// The sum of the token losses, without gradients.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<f64> {
    let _span = tracing::debug_span!("linear_cross_entropy").entered();
    let rows = valid_rows("linear_cross_entropy", x, w, labels, c)?;
    reference::loss(x, w, labels, &rows, c)
}

/// The sum of the token losses and the gradient with respect to `x` (in its dtype, zero in ignored rows);
/// adds that of `w` to `dw` if given. Both gradients are multiplied by `gradient_scale`.
pub fn linear_cross_entropy_backward(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    c: &CrossEntropy,
    dw: Option<&Tensor>,
) -> Result<(f64, Tensor)> {
    let _span = tracing::debug_span!("linear_cross_entropy_backward").entered();
    let rows = valid_rows("linear_cross_entropy_backward", x, w, labels, c)?;
    if let Some(dw) = dw {
        check_accumulator("linear_cross_entropy_backward", "dw", dw, w.dims())?;
    }
    reference::gradients(x, w, labels, &rows, c, dw)
}

/// The rows that count, in order.
fn valid_rows(op: &str, x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<Vec<u32>> {
    let (v, d) = w.dims2()?;
    check_shape(op, "x", x, &[labels.len(), d])?;
    if c.chunk_rows == 0 {
        bail!("{op}: chunk_rows: expected at least 1, got 0")
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
        dw: Option<&Tensor>,
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
        dw: Option<&Tensor>,
    ) -> Result<(f64, Tensor)> {
        let dtype = matmul_dtype(x);
        let w = w.to_dtype(dtype)?;
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
            if let Some(dw) = dw {
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
