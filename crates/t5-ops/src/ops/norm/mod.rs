//! RMS layer normalisation (Zhang and Sennrich 2019) as T5 uses it: no mean, no bias, statistics in f32.
//!
//! `y = (weight + offset) * x / sqrt(mean(x²) + eps)`, over the last dimension. The offset is 0 in T5 and 1 in Gemma.
//!
//! Shapes: x, dy (.., D), weight (D), inv_rms (..) without the last dimension.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::dispatch::{Path, check_accumulator, check_shape, rows_and_width, wide};
use crate::needs::Needs;

/// The most parts in which a card adds the gradient of the weight: enough blocks for the largest card.
const PARTS_ON_DEVICE: u64 = 512;

/// The weight of a norm (D), and the number that is added to it.
#[derive(Clone, Copy, Debug)]
pub struct NormWeight<'a> {
    /// The weight.
    pub tensor: &'a Tensor,
    /// Rows are multiplied by `weight + offset`, a sum in f32 or wider: 0 in T5, 1 in Gemma.
    pub offset: f64,
}

impl<'a> From<&'a Tensor> for NormWeight<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, offset: 0.0 }
    }
}

impl NormWeight<'_> {
    /// The factors of the channels, in the dtype of the weight where nothing is added to it.
    fn factors(&self) -> Result<Tensor> {
        match self.offset {
            0.0 => Ok(self.tensor.clone()),
            offset => wide(self.tensor)?.affine(1.0, offset),
        }
    }
}

/// Normalises the rows of `x`. Returns `y` in the dtype of `x` and `1 / rms` of each row (flat, one per
/// row, `F32` or `F64`), which the backward needs.
pub fn rms_norm<'a>(x: &Tensor, weight: impl Into<NormWeight<'a>>, eps: f64) -> Result<(Tensor, Tensor)> {
    let _span = tracing::debug_span!("rms_norm").entered();
    let (_, width) = rows_and_width("rms_norm", "x", x)?;
    let weight = weight.into();
    check_shape("rms_norm", "weight", weight.tensor, &[width])?;
    let weight = &weight.factors()?;
    match Path::choose(&[x, weight]) {
        Path::Cpu => cpu::rms_norm(x, weight, eps),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([x, weight]) => cuda::rms_norm(x, weight, eps),
        Path::Reference | Path::Device => reference::rms_norm(x, weight, eps),
    }
}

/// Returns the needs of [`rms_norm`] for this many elements of `x`.
pub fn rms_norm_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Device => Needs::launches(1),
        Path::Reference => reference::forward_needs(elements, dtype),
    }
}

/// Returns the gradient with respect to `x`, in its dtype, plus `residual` if given: the gradient that bypasses the norm.
/// Adds the weight's gradient to `dweight` if given.
///
/// The caller gives up `dy`: its memory may be overwritten with the result, so no other handle to it may be
/// read afterwards.
pub fn rms_norm_backward<'a>(
    x: &Tensor,
    weight: impl Into<NormWeight<'a>>,
    inv_rms: &Tensor,
    dy: Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("rms_norm_backward").entered();
    let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
    let weight = weight.into();
    check_shape("rms_norm_backward", "weight", weight.tensor, &[width])?;
    let weight = &weight.factors()?;
    check_shape("rms_norm_backward", "inv_rms", inv_rms, &[rows])?;
    check_shape("rms_norm_backward", "dy", &dy, x.dims())?;
    if let Some(residual) = residual {
        check_shape("rms_norm_backward", "residual", residual, x.dims())?;
    }
    if let Some(dweight) = dweight {
        check_accumulator("rms_norm_backward", "dweight", dweight, &[width])?;
    }
    // The accumulator of the kernel is f32.
    let accumulates = dweight.is_none_or(|dweight| dweight.dtype() == DType::F32);
    let same = residual.is_none_or(|residual| residual.dtype() == x.dtype() && residual.device().is_cpu());
    match Path::choose(&[x, weight, inv_rms, &dy]).provided(x.dtype() == dy.dtype() && same && accumulates) {
        Path::Cpu => cpu::rms_norm_backward(x, weight, inv_rms, dy, residual, dweight),
        #[cfg(feature = "cuda")]
        Path::Device
            if cuda_device::launch::takes_alike([x, &dy].into_iter().chain(residual))
                && cuda_device::launch::takes([weight, inv_rms].into_iter().chain(dweight))
                && accumulates =>
        {
            cuda::rms_norm_backward(x, weight, inv_rms, dy, residual, dweight)
        }
        Path::Reference | Path::Device => reference::rms_norm_backward(x, weight, inv_rms, &dy, residual, dweight),
    }
}

/// The needs of [`rms_norm_backward`] for this number of rows, and their width.
pub fn rms_norm_backward_needs(path: Path, (rows, width): (u64, u64), dtype: DType, trains: bool) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference => reference::backward_needs(rows * width, dtype),
        Path::Device => {
            let partial = rows.min(PARTS_ON_DEVICE) * width * size_of::<f32>() as u64;
            Needs::bytes(partial).with_launches(1 + u64::from(trains))
        }
    }
}
