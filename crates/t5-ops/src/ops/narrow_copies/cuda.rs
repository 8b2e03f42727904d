//! The copies on a card: blocks find their tensor in a table.

use candle_core::{Result, Tensor};
use cuda_device::launch::{Kernel, Module, address, count, table};

use super::TABLE_BYTES;

/// Threads of a block, and the elements that the block copies.
const THREADS: u32 = 256;
const ELEMENTS: usize = 16 << 10;

/// `Narrowed` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
struct Narrowed {
    from: u64,
    to: u64,
    elements: u64,
    first_block: i32,
    unused: u32,
}

/// Copies tensors of one card. `pairs` is not empty.
pub(super) fn narrow_each(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    const { assert!(size_of::<Narrowed>() as u64 == TABLE_BYTES) };
    let mut blocks = 0;
    let entry = |(from, to): &(&Tensor, &Tensor)| {
        let (elements, first_block) = (from.elem_count(), count(blocks)?);
        blocks += elements.div_ceil(ELEMENTS).max(1);
        Ok(Narrowed { from: address(from)?, to: address(to)?, elements: elements as u64, first_block, unused: 0 })
    };
    let entries: Vec<Narrowed> = pairs.iter().map(entry).collect::<Result<_>>()?;
    let device = pairs[0].0.device();
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    let kernel = Kernel::new(device, Module::Optimizer, "narrow_each")?.tensor(&table)?.size(entries.len())?;
    // SAFETY: a table of this many entries, each with two tensors of the same number of elements; each element is in one block.
    unsafe { kernel.launch([blocks, 1, 1], THREADS, 0) }
}
