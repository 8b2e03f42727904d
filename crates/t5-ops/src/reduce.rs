//! Whole-tensor operations of the optimizer: the sum of squares, and setting to zero.

use candle_core::{Result, Tensor};

/// The sum of the squares of all elements, accumulated in f64 in a fixed order.
pub fn square_sum(x: &Tensor) -> Result<f64> {
    let _span = tracing::debug_span!("square_sum").entered();
    reference::square_sum(x)
}

/// Sets every element to zero, in place.
pub fn zero(x: &Tensor) -> Result<()> {
    x.zero_set()
}

pub(crate) mod reference {
    use candle_core::{DType, Result, Tensor};

    /// See [`crate::square_sum`].
    pub fn square_sum(x: &Tensor) -> Result<f64> {
        x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
    }
}
