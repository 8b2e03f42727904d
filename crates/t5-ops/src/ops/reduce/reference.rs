//! Sums in plain candle operations.

use candle_core::{DType, Result, Tensor};

use tensor_storage::overwrite;

use crate::dispatch::{add_into, wide};

/// The sum of the squares of all elements, with candle's operations.
pub fn square_sum(x: &Tensor) -> Result<f64> {
    x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
}

/// See [`crate::add_in_place`].
pub fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    if sum.dtype() == DType::BF16 {
        let both = (wide(sum)? + wide(x)?)?;
        return overwrite(sum, &both);
    }
    add_into(sum, x)
}

/// See [`crate::scaled`].
pub fn scaled(x: &Tensor, scale: f64) -> Result<Tensor> {
    wide(x)?.affine(scale, 0.0)?.to_dtype(x.dtype())
}
