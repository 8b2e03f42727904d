//! RMS layer normalisation (Zhang and Sennrich 2019) as T5 uses it: no mean, no bias, statistics in f32.
//!
//! `y = weight * x / sqrt(mean(x²) + eps)`, over the last dimension.
//!
//! Shapes: x, dy (.., D), weight (D), inv_rms (..) without the last dimension.

use candle_core::{Result, Tensor};

use crate::dispatch::{check_accumulator, check_shape, rows_and_width};

/// Normalises the rows of `x`. Returns `y` in the dtype of `x` and `1 / rms` of each row (flat, one per
/// row, `F32` or `F64`), which the backward needs.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let _span = tracing::debug_span!("rms_norm").entered();
    let (_, width) = rows_and_width("rms_norm", "x", x)?;
    check_shape("rms_norm", "weight", weight, &[width])?;
    reference::rms_norm(x, weight, eps)
}

/// The gradient with respect to `x`, in its dtype; adds the weight's to `dweight` if given.
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    inv_rms: &Tensor,
    dy: &Tensor,
    dweight: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("rms_norm_backward").entered();
    let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
    check_shape("rms_norm_backward", "weight", weight, &[width])?;
    check_shape("rms_norm_backward", "inv_rms", inv_rms, &[rows])?;
    check_shape("rms_norm_backward", "dy", dy, x.dims())?;
    if let Some(dweight) = dweight {
        check_accumulator("rms_norm_backward", "dweight", dweight, &[width])?;
    }
    reference::rms_norm_backward(x, weight, inv_rms, dy, dweight)
}

pub(crate) mod reference {
    use candle_core::{D, Result, Tensor};

    use crate::dispatch::{add_into, rows_and_width, wide, wide_dtype};

    /// See [`crate::rms_norm`].
    pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
        let (rows, _) = rows_and_width("rms_norm", "x", x)?;
        let wide_x = wide(x)?;
        let inv_rms = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
        let y = wide_x.broadcast_mul(&inv_rms)?.broadcast_mul(&weight.to_dtype(wide_dtype(x))?)?;
        Ok((y.to_dtype(x.dtype())?, inv_rms.reshape(rows)?))
    }

    /// See [`crate::rms_norm_backward`].
    pub fn rms_norm_backward(
        x: &Tensor,
        weight: &Tensor,
        inv_rms: &Tensor,
        dy: &Tensor,
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
        dx.to_dtype(x.dtype())?.reshape(x.shape())
    }
}
