//! The cap in plain candle operations.

use candle_core::{Result, Tensor};

use crate::dispatch::wide;

/// See [`crate::soft_cap`].
pub fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    ((wide(x)? / cap)?.tanh()? * cap)?.to_dtype(x.dtype())
}

/// See [`crate::soft_cap_backward`].
pub fn soft_cap_backward(x: &Tensor, dy: &Tensor, cap: f64) -> Result<Tensor> {
    (wide(dy)? * (wide(x)? / cap)?.tanh()?.sqr()?.affine(-1.0, 1.0)?)?.to_dtype(dy.dtype())
}
