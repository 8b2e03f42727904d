//! The update on a card: one kernel a parameter.

use candle_core::{Result, Tensor};

use super::AdamwHyper;
use crate::cuda::{Kernel, Module, suffix};
use crate::ops::adafactor::cuda::rows_of_block;
use crate::ops::rounding::cuda::Noise;

/// What the kernel knows of an update.
#[repr(C)]
#[derive(Clone, Copy)]
struct Hyper {
    scale: f32,
    beta1: f32,
    beta2: f32,
    new1: f32,
    new2: f32,
    rate: f32,
    root: f32,
    eps: f32,
    keep: f32,
}

impl Hyper {
    fn of(h: &AdamwHyper) -> Self {
        let (correction1, correction2) = h.corrections();
        Self {
            scale: h.gradient_scale as f32,
            beta1: h.beta1 as f32,
            beta2: h.beta2 as f32,
            new1: (1.0 - h.beta1) as f32,
            new2: (1.0 - h.beta2) as f32,
            rate: (h.learning_rate / correction1) as f32,
            root: correction2.sqrt() as f32,
            eps: h.eps as f32,
            keep: (1.0 - h.learning_rate * h.weight_decay) as f32,
        }
    }
}

pub(super) fn adamw(param: &Tensor, grad: &Tensor, first: &Tensor, second: &Tensor, h: &AdamwHyper) -> Result<()> {
    let width = param.dims().last().copied().unwrap_or(1).max(1);
    let rows = param.elem_count() / width;
    let grad = grad.contiguous()?;
    let rows_each = rows_of_block(rows);
    let name = format!("adamw_{}_{}", suffix(param.dtype()), suffix(grad.dtype()));
    let kernel = Kernel::new(param.device(), Module::Optimizer, name)?;
    let kernel = kernel.value(Hyper::of(h)).value(Noise::of(h.rounding, h.first_row)).tensor(param)?.tensor(&grad)?;
    let kernel = kernel.tensor(first)?.tensor(second)?.size(rows)?.size(rows_each)?.size(width)?;
    // SAFETY: four matrices of these rows.
    unsafe { kernel.launch([rows.div_ceil(rows_each), 1, 1], 256, 0) }
}
