//! The update on a card: one kernel for many parameters.

use candle_core::Result;
use cuda_device::launch::{address, check_each_apart, table};

use super::{AdamwUpdate, Factors, TABLE_BYTES};
use crate::ops::multi_tensor::cuda::{Group, Launch, OF_KEYS, Parameter, Ready, contiguous};

/// `Decayed` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
struct Decayed {
    parameter: Parameter,
    factors: Factors,
    second_moment: u64,
}

/// Prepares updates of parameters of one card, except the scale of their gradients. `updates` is not empty.
pub(super) fn ready(updates: &[AdamwUpdate]) -> Result<Ready> {
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
        Ok(Decayed { parameter, factors: Factors::new(&h), second_moment: address(second)? })
    };
    let entries: Vec<Decayed> = updates.iter().zip(&gradients).map(entry).collect::<Result<_>>()?;
    // SAFETY: an entry has no padding.
    let table = unsafe { table(&entries, updates[0].param.device())? };
    let mut held = gradients;
    held.extend(updates.iter().flat_map(|update| [update.param, update.first, update.second].map(Clone::clone)));
    let launches = vec![Launch { kernel: "adamw", blocks, shared_bytes: OF_KEYS, takes_scale: true }];
    let groups = vec![Group { entries: entries.len(), launches }];
    Ok(Ready::new(|| tracing::debug_span!("adamw"), table, groups, held))
}
