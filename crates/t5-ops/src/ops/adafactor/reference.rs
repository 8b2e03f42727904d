//! The update in plain candle operations.

use candle_core::{D, DType, Result, Tensor};
use tensor_storage::overwrite;

use super::{AdafactorHyper, SecondMoment};

use crate::dispatch::{wide, wide_dtype};
use crate::needs::{Needs, copies, wide_size};
use crate::ops::rounding::reference::rounded;

/// See [`crate::adafactor`].
pub fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let p = wide(param)?;
    let g = (grad.to_dtype(wide_dtype(param))? * h.gradient_scale)?;
    let lr = if h.scale_parameter { h.learning_rate * rms(&p)?.max(h.eps2) } else { h.learning_rate };
    let squares = (g.sqr()? + h.eps1)?;
    let decay = |moment: &Tensor, new: Tensor| -> Result<Tensor> {
        let moved = ((wide(moment)? * h.beta2)? + (new * (1.0 - h.beta2))?)?;
        overwrite(moment, &moved)?;
        Ok(moved)
    };
    let u = match second {
        SecondMoment::Full(v) => (g / decay(v, squares)?.sqrt()?)?,
        SecondMoment::Factored { row, col } => {
            let row = decay(row, squares.mean(D::Minus1)?)?;
            let col = decay(col, squares.mean(D::Minus2)?)?;
            let row = row.broadcast_div(&row.mean_keepdim(D::Minus1)?)?.sqrt()?.unsqueeze(D::Minus1)?;
            g.broadcast_div(&row)?.broadcast_div(&col.sqrt()?.unsqueeze(D::Minus2)?)?
        }
    };
    let clip = (rms(&u)? / h.clip_threshold).max(1.0);
    let mut u = (u * (lr / clip))?;
    if let (Some(first), Some(beta1)) = (first, h.beta1) {
        u = ((wide(first)? * beta1)? + (u * (1.0 - beta1))?)?;
        overwrite(first, &u)?;
    }
    overwrite(param, &rounded(&((p * (1.0 - h.weight_decay * lr))? - u)?, param.dtype(), h.rounding)?)
}

/// The gradient in f64, and its squares.
pub(super) fn square_sums_needs(elements: u64) -> Needs {
    Needs::bytes(2 * elements * size_of::<f64>() as u64)
}

/// The scaled gradient, its squares and the update; the update in f64 and its squares; and the parameter if it is converted.
pub(super) fn needs(elements: u64, param: DType) -> Needs {
    let converted = if param.size_in_bytes() < wide_size(param) { 1 } else { 0 };
    Needs::bytes(copies(3 + converted, elements, param) + square_sums_needs(elements).transient)
}

fn rms(x: &Tensor) -> Result<f64> {
    let squares: f64 = x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()?;
    Ok((squares / x.elem_count() as f64).sqrt())
}
