//! The norm in plain candle operations.

use candle_core::{D, DType, Result, Tensor};

use crate::dispatch::{add_into, rows_and_width, wide, wide_dtype};
use crate::needs::{Needs, copies, widened};

/// See [`crate::rms_norm`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let (rows, _) = rows_and_width("rms_norm", "x", x)?;
    let wide_x = wide(x)?;
    let inv_rms = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    let y = wide_x.broadcast_mul(&inv_rms)?.broadcast_mul(&weight.to_dtype(wide_dtype(x))?)?;
    Ok((y.to_dtype(x.dtype())?, inv_rms.reshape(rows)?))
}

/// The rows times their factors, before the weight.
pub(super) fn forward_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(1, elements, dtype) + widened(elements, dtype))
}

/// Normalised rows, the gradient times the weight, and an intermediate tensor of the result.
pub(super) fn backward_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(3, elements, dtype) + widened(elements, dtype))
}

/// See [`crate::rms_norm_backward`].
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    inv_rms: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&Tensor>,
) -> Result<Tensor> {
    let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
    let inv_rms = inv_rms.reshape((rows, 1))?;
    let normalised = wide(x)?.reshape((rows, width))?.broadcast_mul(&inv_rms)?;
    let wide_dy = wide(dy)?.reshape((rows, width))?;
    if let Some(dweight) = dweight {
        add_into(dweight, &(&wide_dy * &normalised)?.sum(0)?)?;
    }
    // With n = x * inv_rms and g = dy * weight: dx = inv_rms * (g - n * mean(g * n)).
    let g = wide_dy.broadcast_mul(&weight.to_dtype(wide_dtype(x))?)?;
    let mean = (&g * &normalised)?.mean_keepdim(1)?;
    let dx = (g - normalised.broadcast_mul(&mean)?)?.broadcast_mul(&inv_rms)?;
    let dx = dx.reshape(x.shape())?;
    match residual {
        None => dx,
        Some(residual) => (wide(residual)? + dx)?,
    }
    .to_dtype(x.dtype())
}
