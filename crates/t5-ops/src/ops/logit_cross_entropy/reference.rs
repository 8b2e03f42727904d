//! The loss in plain candle operations.

use candle_core::{Result, Tensor};

use super::IGNORED_LABEL;
use crate::dispatch::{wide, wide_dtype};
use crate::ops::token_loss::{LossSums, TokenLoss};

/// See [`crate::logit_cross_entropy`].
pub fn logit_cross_entropy(logits: &Tensor, labels: &[u32]) -> Result<f64> {
    Ok(logit_cross_entropy_backward(logits, labels, 1.0, TokenLoss::default())?.0.cross_entropy)
}

/// See [`crate::logit_cross_entropy_backward`].
pub fn logit_cross_entropy_backward(
    logits: &Tensor,
    labels: &[u32],
    gradient_scale: f64,
    token_loss: TokenLoss,
) -> Result<(LossSums, Tensor)> {
    let width = logits.dims().last().copied().unwrap_or(1);
    let rows = wide(logits)?.reshape(((), width))?;
    let counts: Vec<f64> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0.0 } else { 1.0 }).collect();
    let chosen: Vec<u32> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0 } else { label }).collect();
    let counts = Tensor::from_vec(counts, (labels.len(), 1), logits.device())?.to_dtype(wide_dtype(logits))?;
    let chosen = Tensor::from_vec(chosen, (labels.len(), 1), logits.device())?;
    let largest = rows.max_keepdim(1)?;
    let exponentials = rows.broadcast_sub(&largest)?.exp()?;
    let total = exponentials.sum_keepdim(1)?;
    let sum = |x: Tensor| (x * &counts)?.sum_all()?.to_dtype(candle_core::DType::F64)?.to_scalar::<f64>();
    let (log_z, of_label) = ((total.log()? + &largest)?, rows.gather(&chosen, 1)?);
    let cross_entropy = sum((log_z.affine(token_loss.of_log_z(), 0.0)? - &of_label)?)?;
    let smoothed = sum((of_label - rows.mean_keepdim(1)?)?)? * token_loss.label_smoothing;
    let objective = cross_entropy + smoothed + token_loss.z_loss * sum(log_z.sqr()?)?;
    let gradient = exponentials.broadcast_div(&total)?;
    let gradient = gradient.broadcast_mul(&log_z.affine(2.0 * token_loss.z_loss, token_loss.of_log_z())?)?;
    let gradient = gradient.affine(1.0, -token_loss.of_each(width))?;
    let of_label = counts.affine(-token_loss.of_label(), 0.0)?;
    let gradient = gradient.scatter_add(&chosen, &of_label, 1)?.broadcast_mul(&counts)?;
    let loss = LossSums { cross_entropy, objective };
    Ok((loss, (gradient * gradient_scale)?.to_dtype(logits.dtype())?.reshape(logits.dims())?))
}
