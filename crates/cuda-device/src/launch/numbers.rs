//! Numbers that kernels write into a list on the card. Reading waits for the card, so the list is read as a whole.

use std::cell::RefCell;

use candle_core::{DType, Device, Result, Tensor};

use super::{address, unwritten};

/// A number in a list of f64 on the card.
#[derive(Clone, Debug)]
pub struct Number {
    list: Tensor,
    index: usize,
}

thread_local! {
    /// The next number of this thread's list.
    static NEXT: RefCell<Option<Number>> = const { RefCell::new(None) };
}

/// Drops the list of numbers that this thread keeps.
pub(crate) fn forget_numbers() {
    NEXT.take();
}

impl Number {
    /// Takes the next place in this thread's list, which has room for `room` numbers.
    pub fn next(room: usize, device: &Device) -> Result<Self> {
        NEXT.with_borrow_mut(|next| {
            let is_usable = |place: &Number| place.index < room && place.list.device().same_device(device);
            let place = match next.take().filter(is_usable) {
                Some(place) => place,
                None => Self { list: unwritten(room, DType::F64, device)?, index: 0 },
            };
            *next = Some(Self { list: place.list.clone(), index: place.index + 1 });
            Ok(place)
        })
    }

    /// The address of the number's place.
    pub fn address(&self) -> Result<u64> {
        Ok(address(&self.list)? + (self.index * size_of::<f64>()) as u64)
    }
}

/// Reads numbers. The next ones begin a new list.
pub fn read_numbers<'a>(numbers: impl IntoIterator<Item = &'a Number>) -> Result<Vec<f64>> {
    let mut read: Option<(&Tensor, Vec<f64>)> = None;
    let value = |number: &'a Number| {
        let Number { list, index } = number;
        if read.as_ref().is_none_or(|(of, _)| of.id() != list.id()) {
            NEXT.set(None);
            read = Some((list, list.to_vec1()?));
        }
        Ok(read.as_ref().map_or(f64::NAN, |(_, values)| values[*index]))
    };
    numbers.into_iter().map(value).collect()
}
