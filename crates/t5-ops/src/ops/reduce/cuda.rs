//! Sums and multiples on a card.

use candle_core::{Result, Tensor};

use cuda_device::launch::{Kernel, Module, suffix, unwritten};

/// Blocks of 256 threads for `count` elements.
fn grid(count: usize) -> [usize; 3] {
    [count.div_ceil(1024).min(4096), 1, 1]
}

pub(super) fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    let count = sum.elem_count();
    let kernel = Kernel::new(sum.device(), Module::Optimizer, format!("add_{}", suffix(sum.dtype())))?;
    // SAFETY: two tensors of the same number of elements.
    unsafe { kernel.tensor(sum)?.tensor(x)?.value(count).launch(grid(count), 256, 0) }
}

pub(super) fn scaled(x: &Tensor, scale: f64) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (y, count) = (unwritten(x.shape(), x.dtype(), x.device())?, x.elem_count());
    let kernel = Kernel::new(x.device(), Module::Optimizer, format!("scaled_{}", suffix(x.dtype())))?;
    // SAFETY: two tensors of the same number of elements.
    unsafe { kernel.tensor(&x)?.tensor(&y)?.value(scale as f32).value(count).launch(grid(count), 256, 0)? };
    Ok(y)
}
