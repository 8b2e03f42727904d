//! The loss on a card.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{unwritten, uploaded};
use crate::ops::cross_entropy::cuda::{add_total, rows_of_logits};

/// Returns the sum of the losses; with a scale, overwrites the logits with their gradient.
pub(super) fn loss(logits: &Tensor, labels: &[u32], gradient_scale: Option<f64>) -> Result<f64> {
    let device = logits.device();
    let (losses, total) = (unwritten(labels.len(), DType::F64, device)?, Tensor::zeros(1, DType::F64, device)?);
    let scale = gradient_scale.unwrap_or(0.0) as f32;
    let gradients = gradient_scale.map(|_| logits);
    rows_of_logits(logits, &uploaded(labels, device)?, &losses, gradients, scale, labels.len())?;
    add_total(&losses, &total)?;
    let total: Vec<f64> = total.to_vec1()?;
    Ok(total[0])
}
