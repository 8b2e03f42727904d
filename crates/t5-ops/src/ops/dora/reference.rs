//! The same in plain candle operations.

use candle_core::{Result, Tensor};

use crate::dispatch::{add_into, wide, wide_dtype};
use crate::quantised::Weight;

/// See [`crate::adapted_row_norms`].
pub fn adapted_row_norms<'a>(weight: impl Into<Weight<'a>>, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let weight = weight.into();
    let dtype = wide_dtype(weight.tensor());
    let adapted = (weight.dense(dtype)? + (wide(b)?.matmul(&wide(a)?)? * scale)?.to_dtype(dtype)?)?;
    adapted.sqr()?.sum(1)?.sqrt()
}

/// See [`crate::scale_columns`].
pub fn scale_columns(y: &Tensor, factors: &Tensor) -> Result<Tensor> {
    wide(y)?.broadcast_mul(&factors.to_dtype(wide_dtype(y))?)?.to_dtype(y.dtype())
}

/// See [`crate::magnitude_backward`].
pub fn magnitude_backward(dy: &Tensor, z: &Tensor, lengths: &Tensor, dmagnitude: &Tensor) -> Result<()> {
    let width = lengths.elem_count();
    let sums = (wide(dy)? * wide(z)?)?.reshape(((), width))?.sum(0)?;
    add_into(dmagnitude, &(sums / lengths.to_dtype(wide_dtype(dy))?)?)
}
