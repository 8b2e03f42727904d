//! The loss on a card.

use candle_core::{DType, Result, Tensor};
use cuda_device::launch::{unwritten, uploaded};

use crate::ops::cross_entropy::cuda::{add_totals, read_totals, rows_of_logits, zero_totals};
use crate::ops::token_loss::{LossSums, TokenLoss};

/// Returns the sums of the losses; with a scale, overwrites the logits with their gradient.
pub(super) fn loss(logits: &Tensor, labels: &[u32], gradient_scale: Option<f64>, loss: TokenLoss) -> Result<LossSums> {
    let device = logits.device();
    let (losses, totals) = (unwritten((2, labels.len()), DType::F64, device)?, zero_totals(device)?);
    let scale = gradient_scale.unwrap_or(0.0) as f32;
    let gradients = gradient_scale.map(|_| logits);
    rows_of_logits(logits, &uploaded(labels, device)?, &losses, gradients, scale, loss, labels.len())?;
    add_totals(&losses, &totals)?;
    read_totals(&totals)
}
