//! The loss in plain candle operations.

use candle_core::{Result, Tensor};

use super::IGNORED_LABEL;
use crate::dispatch::{wide, wide_dtype};

/// See [`crate::logit_cross_entropy`].
pub fn logit_cross_entropy(logits: &Tensor, labels: &[u32]) -> Result<f64> {
    Ok(logit_cross_entropy_backward(logits, labels, 1.0)?.0)
}

/// See [`crate::logit_cross_entropy_backward`].
pub fn logit_cross_entropy_backward(logits: &Tensor, labels: &[u32], gradient_scale: f64) -> Result<(f64, Tensor)> {
    let width = logits.dims().last().copied().unwrap_or(1);
    let rows = wide(logits)?.reshape(((), width))?;
    let counts: Vec<f64> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0.0 } else { 1.0 }).collect();
    let chosen: Vec<u32> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0 } else { label }).collect();
    let counts = Tensor::from_vec(counts, (labels.len(), 1), logits.device())?.to_dtype(wide_dtype(logits))?;
    let chosen = Tensor::from_vec(chosen, (labels.len(), 1), logits.device())?;
    let largest = rows.max_keepdim(1)?;
    let exponentials = rows.broadcast_sub(&largest)?.exp()?;
    let total = exponentials.sum_keepdim(1)?;
    let losses = ((total.log()? + &largest)? - rows.gather(&chosen, 1)?)?;
    let loss = (losses * &counts)?.sum_all()?.to_dtype(candle_core::DType::F64)?.to_scalar::<f64>()?;
    let gradient = exponentials.broadcast_div(&total)?;
    let gradient = gradient.scatter_add(&chosen, &counts.neg()?, 1)?.broadcast_mul(&counts)?;
    Ok((loss, (gradient * gradient_scale)?.to_dtype(logits.dtype())?.reshape(logits.dims())?))
}
