//! The update in plain candle operations.

use candle_core::{DType, Result, Tensor};
use tensor_storage::overwrite;

use super::AdamwHyper;

use crate::dispatch::{wide, wide_dtype};
use crate::needs::{Needs, copies};
use crate::ops::rounding::reference::rounded_from;

/// See [`crate::adamw`].
pub fn adamw(param: &Tensor, grad: &Tensor, first: &Tensor, second: &Tensor, h: &AdamwHyper) -> Result<()> {
    let g = (grad.to_dtype(wide_dtype(param))? * h.gradient_scale)?;
    let decay = |moment: &Tensor, beta: f64, new: &Tensor| -> Result<Tensor> {
        let moved = ((wide(moment)? * beta)? + (new * (1.0 - beta))?)?;
        overwrite(moment, &moved)?;
        Ok(moved)
    };
    let first = decay(first, h.beta1, &g)?;
    let second = decay(second, h.beta2, &g.sqr()?)?;
    let (correction1, correction2) = h.corrections();
    let denominator = ((second.sqrt()? / correction2.sqrt())? + h.eps)?;
    let update = ((first / denominator)? * (h.learning_rate * h.step_scale / correction1))?;
    let kept = (wide(param)? * (1.0 - h.learning_rate * h.weight_decay))?;
    overwrite(param, &rounded_from(&(kept - update)?, param.dtype(), h.rounding, h.first_row)?)
}

/// The scaled gradient, the first moment, the square of the gradient, and the two terms of a moment.
pub(super) fn needs(elements: u64, param: DType) -> Needs {
    Needs::bytes(copies(6, elements, param))
}
