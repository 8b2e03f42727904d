//! The update on a card: one kernel a parameter.

use candle_core::{Result, Tensor};

use super::{AdamwHyper, Factors};
use crate::cuda::{Kernel, Module, suffix};
use crate::ops::adafactor::cuda::rows_of_block;
use crate::ops::rounding::cuda::Noise;

pub(super) fn adamw(param: &Tensor, grad: &Tensor, first: &Tensor, second: &Tensor, h: &AdamwHyper) -> Result<()> {
    let width = param.dims().last().copied().unwrap_or(1).max(1);
    let rows = param.elem_count() / width;
    let grad = grad.contiguous()?;
    let rows_each = rows_of_block(rows);
    let name = format!("adamw_{}_{}", suffix(param.dtype()), suffix(grad.dtype()));
    let kernel = Kernel::new(param.device(), Module::Optimizer, name)?;
    let kernel = kernel.value(Factors::of(h)).value(Noise::of(h.rounding, h.first_row)).tensor(param)?.tensor(&grad)?;
    let kernel = kernel.tensor(first)?.tensor(second)?.size(rows)?.size(rows_each)?.size(width)?;
    // SAFETY: four matrices of these rows.
    unsafe { kernel.launch([rows.div_ceil(rows_each), 1, 1], 256, 0) }
}
