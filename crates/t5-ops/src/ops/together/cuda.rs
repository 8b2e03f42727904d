//! What kernels know of a parameter that is updated.

use candle_core::{DType, Result, Tensor};

use super::rows_of_block;
use crate::cuda::{address, count};
use crate::ops::rounding::Rounding;
use crate::ops::rounding::cuda::Noise;

/// Threads of a block.
pub(crate) const THREADS: u32 = 256;
/// Shared memory of a sum over a block.
pub(crate) const OF_SUM: usize = 32 * size_of::<f64>();
/// Of the keys of the rows that a block updates between two barriers.
pub(crate) const OF_KEYS: usize = 128 * size_of::<u64>();

/// A parameter, its gradient and its first moment: `Parameter` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameter {
    values: u64,
    gradient: u64,
    first_moment: u64,
    noise: Noise,
    rows: i32,
    rows_each: i32,
    width: i32,
    first_part: i32,
    is_bf16: u32,
    has_bf16_gradient: u32,
}

impl Parameter {
    /// An entry whose blocks begin at `blocks`, which then are behind them. A vector is one row.
    pub(crate) fn next(
        [values, gradient]: [&Tensor; 2],
        first_moment: Option<&Tensor>,
        (rows, width): (usize, usize),
        (rounding, first_row): (Rounding, usize),
        blocks: &mut usize,
    ) -> Result<Self> {
        let (rows_each, first_part) = (rows_of_block(rows, width), count(*blocks)?);
        *blocks += rows.div_ceil(rows_each);
        let is_bf16 = |t: &Tensor| u32::from(t.dtype() == DType::BF16);
        Ok(Self {
            values: address(values)?,
            gradient: address(gradient)?,
            first_moment: first_moment.map_or(Ok(0), address)?,
            noise: Noise::of(rounding, first_row),
            rows: count(rows)?,
            rows_each: count(rows_each)?,
            width: count(width)?,
            first_part,
            is_bf16: is_bf16(values),
            has_bf16_gradient: is_bf16(gradient),
        })
    }
}

/// Gradients as kernels read them: those that lie otherwise are copied.
pub(crate) fn contiguous<'a>(gradients: impl Iterator<Item = &'a Tensor>) -> Result<Vec<Tensor>> {
    gradients.map(Tensor::contiguous).collect()
}
