//! Sums on a card.

use candle_core::{Result, Tensor};

use crate::cuda::{Kernel, Module, suffix};

pub(super) fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    let count = sum.elem_count();
    let kernel = Kernel::new(sum.device(), Module::Optimizer, format!("add_{}", suffix(sum.dtype())))?;
    let blocks = count.div_ceil(1024).min(4096);
    // SAFETY: two tensors of as many elements.
    unsafe { kernel.tensor(sum)?.tensor(x)?.value(count).launch([blocks, 1, 1], 256, 0) }
}
