//! Dropout in plain candle operations, with the same mask.

use candle_core::{DType, Device, Result, Tensor};

use super::{Dropout, active, batch_rows_width, kept};
use crate::dispatch::wide_dtype;
use crate::needs::{Needs, copies, widened};

/// See [`crate::dropout`].
pub fn dropout(x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    match d {
        None => Ok(x.clone()),
        Some(d) => x * mask(x, d)?,
    }
}

/// See [`crate::dropout_add`].
pub fn dropout_add(residual: &Tensor, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    residual + dropout(x, d)?
}

/// The mask, before and after scaling.
pub(super) fn mask_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(1, elements, dtype) + widened(elements, dtype) / 2)
}

/// The mask of an activation (B, T, D) times the scale, in the dtype and on the device of `x`.
pub(crate) fn mask(x: &Tensor, d: &Dropout) -> Result<Tensor> {
    let (b, t, width) = batch_rows_width("dropout", x)?;
    if active("dropout", Some(d), b)?.is_none() {
        return x.ones_like();
    }
    let mut factors = Vec::with_capacity(b * t * width);
    for index in 0..b {
        for position in 0..t {
            let key = d.row_key(index, position);
            factors.extend((0..width as u32).map(|channel| kept(d, key, channel)));
        }
    }
    // The scale is applied in the wide dtype, so that an f64 reference is exact.
    let mask = Tensor::from_vec(factors, (b, t, width), &Device::Cpu)?.to_dtype(wide_dtype(x))?;
    (mask * d.scale())?.to_dtype(x.dtype())?.to_device(x.device())
}
