//! The loss in plain candle operations, some rows of logits at a time.

use candle_core::{D, DType, Result, Tensor};

use super::{CrossEntropy, valid_rows};
use crate::dispatch::{add_into, matmul_dtype, wide_dtype};
use crate::needs::{Needs, converted, copies, elements, wide_size};
use crate::ops::token_loss::{LossSums, TokenLoss};
use crate::quantised::Weight;

/// See [`crate::linear_cross_entropy`].
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, labels: &[u32], c: &CrossEntropy) -> Result<f64> {
    let rows = valid_rows("linear_cross_entropy", x, w.into(), labels, c)?;
    loss(x, w.into(), labels, &rows, c)
}

/// See [`crate::linear_cross_entropy_backward`].
pub fn linear_cross_entropy_backward(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
) -> Result<(LossSums, Tensor)> {
    let rows = valid_rows("linear_cross_entropy_backward", x, w.into(), labels, c)?;
    gradients(x, w.into(), labels, &rows, c, dw)
}

pub(super) fn loss(x: &Tensor, w: Weight, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<f64> {
    let w = w.dense(matmul_dtype(x))?;
    let mut loss = 0.0;
    for rows in rows.chunks(c.chunk_rows) {
        loss += Chunk::new(x, &w, labels, rows, c)?.loss()?.cross_entropy;
    }
    Ok(loss)
}

/// The weight if it is converted; for a chunk its rows and, three times while they are scaled, its logits. With a cap, its derivatives.
pub(super) fn loss_needs(
    rows: usize,
    (vocabulary, width): (usize, usize),
    [x, w]: [DType; 2],
    c: &CrossEntropy,
) -> Needs {
    let (chunk, of_weight) = (c.chunk_rows.min(rows), converted(elements([vocabulary, width]), w, wide_size(x)));
    let of_logits = if c.soft_cap.is_some() { 4 } else { 3 };
    let of_chunk = copies(of_logits, elements([chunk, vocabulary]), x) + copies(1, elements([chunk, width]), x);
    Needs::bytes(of_weight + of_chunk).with_products(1, (rows, width, vocabulary))
}

/// The bytes of [`loss_needs`]; besides, the gradient of the weight that is added, and the gradient of `x` before and after a chunk's part
/// is added.
pub(super) fn gradients_needs(rows: usize, weight: (usize, usize), dtypes: [DType; 2], c: &CrossEntropy) -> Needs {
    let ((vocabulary, width), [x, _]) = (weight, dtypes);
    let sums = copies(2, elements([vocabulary, width]), x) + copies(2, elements([rows, width]), x);
    let loss = loss_needs(rows, weight, dtypes, c);
    Needs::bytes(loss.transient + sums).with_products(3, (rows, width, vocabulary))
}

pub(super) fn gradients(
    x: &Tensor,
    w: Weight,
    labels: &[u32],
    rows: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
) -> Result<(LossSums, Tensor)> {
    let dtype = matmul_dtype(x);
    let w = w.dense(dtype)?;
    if let Some((dw, false)) = dw {
        crate::zero(dw)?;
    }
    let mut dx = Tensor::zeros(x.shape(), wide_dtype(x), x.device())?;
    let (mut loss, token) = (LossSums::default(), c.token_loss);
    for rows in rows.chunks(c.chunk_rows) {
        let chunk = Chunk::new(x, &w, labels, rows, c)?;
        loss += chunk.loss()?;
        let mut softmax = chunk.logits.broadcast_sub(&chunk.lse)?.exp()?;
        if !token.has_plain_softmax() {
            softmax = softmax.broadcast_mul(&chunk.lse.affine(2.0 * token.z_loss, token.of_log_z())?)?;
        }
        if token.label_smoothing != 0.0 {
            softmax = softmax.affine(1.0, -token.of_each(softmax.dim(1)?))?;
        }
        let of_label = Tensor::ones((rows.len(), 1), softmax.dtype(), x.device())?.affine(-token.of_label(), 0.0)?;
        let mut dlogits = softmax.scatter_add(&chunk.labels, &of_label, 1)?;
        if let Some(slope) = &chunk.slope {
            dlogits = (dlogits * slope)?;
        }
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
    rows: Tensor,          // (C)
    labels: Tensor,        // (C, 1)
    x: Tensor,             // (C, D)
    logits: Tensor,        // (C, V), wide
    slope: Option<Tensor>, // (C, V), wide: the derivative of the cap
    lse: Tensor,           // (C, 1), wide
    token_loss: TokenLoss,
}

impl Chunk {
    fn new(x: &Tensor, w: &Tensor, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<Self> {
        let labels: Vec<u32> = rows.iter().map(|&row| labels[row as usize]).collect();
        let labels = Tensor::from_vec(labels, (rows.len(), 1), x.device())?;
        let rows = Tensor::new(rows, x.device())?;
        let wide = wide_dtype(x);
        let x = x.contiguous()?.index_select(&rows, 0)?.to_dtype(w.dtype())?;
        let logits = (x.matmul(&w.t()?)?.to_dtype(wide)? * c.logit_scale)?;
        let (logits, slope) = match c.soft_cap {
            None => (logits, None),
            Some(cap) => {
                let tanh = (logits / cap)?.tanh()?;
                ((&tanh * cap)?, Some(tanh.sqr()?.affine(-1.0, 1.0)?))
            }
        };
        let lse = logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?;
        Ok(Self { rows, labels, x, logits, slope, lse, token_loss: c.token_loss })
    }

    fn loss(&self) -> Result<LossSums> {
        let total = |x: &Tensor| x.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>();
        let TokenLoss { z_loss, label_smoothing, is_logit } = self.token_loss;
        let of_label = self.logits.gather(&self.labels, 1)?;
        let cross_entropy = if is_logit { -total(&of_label)? } else { total(&(&self.lse - &of_label)?)? };
        let mut objective = cross_entropy;
        if label_smoothing != 0.0 {
            objective += label_smoothing * total(&(of_label - self.logits.mean_keepdim(1)?)?)?;
        }
        if z_loss != 0.0 {
            objective += z_loss * total(&self.lse.sqr()?)?;
        }
        Ok(LossSums { cross_entropy, objective })
    }
}
