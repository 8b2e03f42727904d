//! Whole-tensor operations of the optimizer: the sum of squares, and setting to zero.

pub(crate) mod cpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

use crate::dispatch::Path;

/// The sum of the squares of all elements, accumulated in f64 in a fixed order.
pub(crate) fn square_sum(x: &Tensor) -> Result<f64> {
    match Path::of(&[x]) {
        Path::Cpu => cpu::square_sum(x),
        Path::Reference => reference::square_sum(x),
    }
}

/// Sets every element to zero, in place.
pub fn zero(x: &Tensor) -> Result<()> {
    match Path::of(&[x]).provided(x.is_contiguous()) {
        Path::Cpu => cpu::zero(x),
        Path::Reference => x.zero_set(),
    }
}
