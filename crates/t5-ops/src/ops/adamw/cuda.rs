//! The update on a card: one kernel for many parameters.

use candle_core::Result;

use super::{AdamwUpdate, Factors, TABLE_BYTES};
use crate::cuda::{Kernel, Module, address, check_each_apart, table};
use crate::ops::together::cuda::{OF_KEYS, Parameter, THREADS, contiguous};

/// `Decayed` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
struct Decayed {
    parameter: Parameter,
    factors: Factors,
    unused: u32,
    second_moment: u64,
}

/// Updates parameters of one card. There is one at least.
pub(super) fn adamw(updates: &[AdamwUpdate]) -> Result<()> {
    const { assert!(size_of::<Decayed>() as u64 == TABLE_BYTES) };
    for update in updates {
        check_each_apart("adamw", &[update.param, update.grad, update.first, update.second])?;
    }
    let gradients = contiguous(updates.iter().map(|update| update.grad))?;
    let mut blocks = 0;
    let entry = |(update, gradient)| {
        let &AdamwUpdate { param, first, second, hyper: h, .. } = update;
        let width = param.dims().last().copied().unwrap_or(1).max(1);
        let size = (param.elem_count() / width, width);
        let noise = (h.rounding, h.first_row);
        let parameter = Parameter::next([param, gradient], Some(first), size, noise, &mut blocks)?;
        Ok(Decayed { parameter, factors: Factors::of(&h), unused: 0, second_moment: address(second)? })
    };
    let entries: Vec<Decayed> = updates.iter().zip(&gradients).map(entry).collect::<Result<_>>()?;
    let device = updates[0].param.device();
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, device)? };
    let kernel = Kernel::new(device, Module::Optimizer, "adamw")?.tensor(&table)?.size(entries.len())?;
    // SAFETY: a table of so many entries, each of four matrices of its size, in whose blocks every row is once.
    unsafe { kernel.launch([blocks, 1, 1], THREADS, OF_KEYS) }
}
