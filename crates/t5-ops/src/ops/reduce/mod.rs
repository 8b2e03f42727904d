//! Whole-tensor operations: the sum of squares, the sum of two, a multiple, and setting to zero.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::dispatch::Path;
use crate::needs::Needs;

/// The sum of the squares of all elements, accumulated in f64 in a fixed order.
pub(crate) fn square_sum(x: &Tensor) -> Result<f64> {
    match Path::choose(&[x]) {
        Path::Cpu => cpu::square_sum(x),
        Path::Reference | Path::Device => reference::square_sum(x),
    }
}

/// Sets every element to zero, in place.
pub fn zero(x: &Tensor) -> Result<()> {
    if x.elem_count() == 0 {
        // candle treats rows without columns as rows that overlap. On a card it launches a kernel even for no elements.
        return Ok(());
    }
    match Path::choose(&[x]).provided(x.is_contiguous()) {
        Path::Cpu => cpu::zero(x),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([x]) && x.is_contiguous() => cuda_device::launch::set_to_zero(x),
        Path::Reference | Path::Device => x.zero_set(),
    }
}

/// A tensor of zeros. Its memory and its launch on a card can be recorded ([`cuda_device::GraphRounds`]).
///
/// # Errors
/// No memory.
pub fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return cuda_device::launch::zeros(shape, dtype, device);
    }
    Tensor::zeros(shape, dtype, device)
}

/// Adds `x` to `sum`, element by element, in place. Values of bf16 are added in f32 and rounded to nearest.
///
/// # Errors
/// Tensors of different shapes or dtypes, or, for f32 and bf16, the same memory twice.
pub fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    if sum.dims() != x.dims() || sum.dtype() != x.dtype() {
        let (dims, dtype) = (sum.dims(), sum.dtype());
        bail!("add_in_place: expected {dims:?} of {dtype:?}, got {:?} of {:?}", x.dims(), x.dtype());
    }
    match Path::choose(&[sum, x]).provided(sum.is_contiguous() && x.is_contiguous()) {
        Path::Cpu => cpu::add_in_place(sum, x),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([sum, x]) && sum.is_contiguous() && x.is_contiguous() => {
            cuda::add_in_place(sum, x)
        }
        Path::Reference | Path::Device => reference::add_in_place(sum, x),
    }
}

/// `scale · x`, in new memory. Values of bf16 are multiplied in f32 and rounded to nearest.
pub fn scaled(x: &Tensor, scale: f64) -> Result<Tensor> {
    match Path::choose(&[x]) {
        Path::Cpu => cpu::scaled(x, scale),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([x]) => cuda::scaled(x, scale),
        Path::Reference | Path::Device => reference::scaled(x, scale),
    }
}

/// Returns the needs of [`zero`] and [`add_in_place`].
pub fn in_place_needs(path: Path) -> Needs {
    if path == Path::Device { Needs::launches(1) } else { Needs::default() }
}

/// Returns the needs of [`scaled`], besides the copies of a composition.
pub fn scaled_needs(path: Path) -> Needs {
    if path == Path::Device { Needs::launches(1) } else { Needs::default() }
}
