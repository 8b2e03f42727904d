//! Rounding, one element after the other.

use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

use super::Rounding;
use crate::random_mask::hash;

/// `x`, in f32 or f64, as a tensor of `dtype`; rows are along the last dimension.
pub fn rounded(x: &Tensor, dtype: DType, rounding: Rounding) -> Result<Tensor> {
    rounded_from(x, dtype, rounding, 0)
}

/// [`rounded`] for some rows of a tensor, from row `first_row` on.
pub(crate) fn rounded_from(x: &Tensor, dtype: DType, rounding: Rounding, first_row: usize) -> Result<Tensor> {
    if dtype != DType::BF16 || rounding == Rounding::Nearest {
        return x.to_dtype(dtype);
    }
    let width = x.dims().last().copied().unwrap_or(1).max(1);
    let values = x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let round = |(i, x): (usize, f32)| {
        let Some(key) = rounding.row(first_row + i / width).filter(|_| x.is_finite()) else { return bf16::from_f32(x) };
        // The bits that bf16 drops are a fraction of its spacing; the noise is a uniform fraction.
        let (below, fraction) = (x.to_bits() >> 16, x.to_bits() & 0xFFFF);
        let noise = hash(key, (i % width) as u32) >> 16;
        bf16::from_bits((below + u32::from(fraction + noise >= 1 << 16)) as u16)
    };
    let rounded: Vec<bf16> = values.into_iter().enumerate().map(round).collect();
    Tensor::from_vec(rounded, x.shape(), &Device::Cpu)?.to_device(x.device())
}
