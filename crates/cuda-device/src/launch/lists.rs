//! Lists of the host on a card: the lengths and samples of a micro-batch, which every layer uses.

use std::cell::RefCell;

use candle_core::{Device, Result, Tensor};

use super::{card_number, recording};

/// The number of lists that are kept: the latest uploads. Every layer uses the lists of a micro-batch. Layer by layer, a step goes through
/// the lists of all micro-batches again and again, so a smaller number would never find any.
const KEPT_LISTS: usize = 256;
/// Longer lists are not kept.
const KEPT_LIST: usize = 8192;

/// Returns a list of the host on the card: its values or, while launches are recorded, the place of a list that changes.
pub fn changing(list: &[u32], device: &Device) -> Result<Tensor> {
    match recording::place_of(list) {
        Some(place) => Ok(place),
        None => uploaded(list, device),
    }
}

/// Returns numbers on the card. Short lists are kept, and uploaded once. Recorded work finds the lists that it was measured with.
pub fn uploaded(list: &[u32], device: &Device) -> Result<Tensor> {
    if let Some(there) = recording::held(list) {
        return Ok(there);
    }
    let there = kept_or_uploaded(list, device)?;
    recording::hold(list, &there);
    Ok(there)
}

/// The number of a card, a list, and its copy there.
type KeptList = (usize, Vec<u32>, Tensor);

thread_local! {
    static KEPT: RefCell<Vec<KeptList>> = const { RefCell::new(Vec::new()) };
}

/// Drops the lists that this thread keeps on cards.
pub(crate) fn forget_lists() {
    KEPT.with_borrow_mut(Vec::clear);
}

fn kept_or_uploaded(list: &[u32], device: &Device) -> Result<Tensor> {
    let card = card_number(device).unwrap_or(usize::MAX);
    if list.len() > KEPT_LIST {
        return Tensor::new(list, device);
    }
    KEPT.with_borrow_mut(|kept| {
        if let Some(at) = kept.iter().position(|(of, values, _)| *of == card && values == list) {
            let found = kept.remove(at);
            let tensor = found.2.clone();
            kept.push(found);
            return Ok(tensor);
        }
        let tensor = Tensor::new(list, device)?;
        if recording::is_capturing() {
            // This is memory of a graph that will be refused, so later calls must not find it here.
            return Ok(tensor);
        }
        if kept.len() == KEPT_LISTS {
            kept.remove(0);
        }
        kept.push((card, list.to_vec(), tensor.clone()));
        Ok(tensor)
    })
}
