//! Sums in plain candle operations.

use candle_core::{DType, Result, Tensor};

/// The same, with candle's operations.
pub fn square_sum(x: &Tensor) -> Result<f64> {
    x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
}
