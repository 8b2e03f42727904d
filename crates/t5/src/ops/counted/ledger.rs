//! The sums over counted tensors.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;

use candle_core::DType;
use t5_ops::{Calls, Kept};

use super::Counted;

/// Multiply-adds of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Of all products.
    pub all: f64,
    /// Of the products in attention: scores and weighted values.
    pub attention: f64,
}

impl std::ops::Sub for Work {
    type Output = Work;

    fn sub(self, other: Work) -> Work {
        Work { all: self.all - other.all, attention: self.attention - other.attention }
    }
}

/// The sums.
#[derive(Debug, Default)]
pub(super) struct Sums {
    pub(super) live: Cell<u64>,
    pub(super) peak: Cell<u64>,
    /// Bytes of weights in files that are in memory and not in `live`: their memory is counted elsewhere.
    pub(super) weights: Cell<u64>,
    /// The largest sum of `live` and `weights`.
    pub(super) peak_with_weights: Cell<u64>,
    /// The part of `live` that belongs to freed tensors whose memory is held.
    pub(super) held: Cell<Option<u64>>,
    /// The most bytes that a loss held beside its operands and results. They are part of `peak`.
    pub(super) loss: Cell<u64>,
    pub(super) work: Cell<Work>,
    pub(super) kept: Cell<Kept>,
    /// The most bytes that a call held in the host's memory for a device.
    pub(super) on_host: Cell<u64>,
    /// The requests to a card, and the lists of numbers that were uploaded.
    pub(super) calls: Cell<Calls>,
    pub(super) lists: RefCell<HashSet<Vec<u32>>>,
    /// Whether tensors lie on a device.
    pub(super) is_on_device: Cell<bool>,
    /// Bytes of weights that were asked for where they lie in a file.
    pub(super) paged_in: Cell<u64>,
}

impl Sums {
    pub(super) fn add(&self, bytes: u64) {
        self.live.set(self.live.get() + bytes);
        self.note_transient(0);
    }

    pub(super) fn take(&self, bytes: u64) {
        match self.held.get() {
            Some(held) => self.held.set(Some(held + bytes)),
            None => self.live.set(self.live.get() - bytes),
        }
    }

    /// Notes bytes that are held during a call.
    pub(super) fn note_transient(&self, bytes: u64) {
        let now = self.live.get() + bytes;
        self.peak.set(self.peak.get().max(now));
        self.peak_with_weights.set(self.peak_with_weights.get().max(now + self.weights.get()));
    }

    /// Notes that `bytes` of weights that are counted elsewhere are in memory.
    pub(super) fn come(&self, bytes: u64) {
        self.weights.set(self.weights.get() + bytes);
        self.note_transient(0);
    }

    /// Notes that `bytes` of such weights have left memory.
    pub(super) fn leave(&self, bytes: u64) {
        self.weights.set(self.weights.get() - bytes);
    }
}

/// Adds up counted tensors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    pub(super) sums: Rc<Sums>,
}

impl Ledger {
    /// A tensor whose memory is counted here.
    pub fn tensor(&self, dims: &[usize], dtype: DType) -> Counted {
        let bytes = dims.iter().map(|&size| size as u64).product::<u64>() * dtype.size_in_bytes() as u64;
        self.sums.add(bytes);
        self.allocate(bytes, Placement::Memory, dims, dtype)
    }

    /// A tensor whose memory is counted elsewhere: a parameter, token ids.
    pub fn beside(&self, dims: &[usize], dtype: DType) -> Counted {
        self.allocate(0, Placement::Memory, dims, dtype)
    }

    /// A weight in a file whose memory is counted elsewhere.
    pub fn in_file_beside(&self, dims: &[usize], dtype: DType) -> Counted {
        self.allocate(0, Placement::FileCountedElsewhere { is_here: Cell::new(false) }, dims, dtype)
    }

    /// A weight that lies in a file, and in memory from its first use until it is paged out.
    #[cfg(test)]
    pub fn in_file(&self, dims: &[usize], dtype: DType) -> Counted {
        self.allocate(0, Placement::File { is_resident: Cell::new(false) }, dims, dtype)
    }

    fn allocate(&self, bytes: u64, home: Placement, dims: &[usize], dtype: DType) -> Counted {
        let mut all = [1; 3];
        all[..dims.len()].copy_from_slice(dims);
        let memory = Rc::new(Memory { sums: Rc::clone(&self.sums), bytes, home });
        Counted { memory, dims: all, rank: dims.len(), dtype }
    }

    /// Bytes that are alive.
    pub fn live(&self) -> u64 {
        self.sums.live.get()
    }

    /// The most bytes alive at a time since the last [`Ledger::begin`].
    pub fn peak(&self) -> u64 {
        self.sums.peak.get()
    }

    /// The peak, with weights in files that were in memory.
    pub fn peak_with_weights(&self) -> u64 {
        self.sums.peak_with_weights.get()
    }

    /// The most bytes that a loss held beside its operands and results.
    pub fn loss(&self) -> u64 {
        self.sums.loss.get()
    }

    /// The arithmetic so far.
    pub fn work(&self) -> Work {
        self.sums.work.get()
    }

    /// The operands that threads keep packed from one product to the next.
    pub fn kept(&self) -> Kept {
        self.sums.kept.get()
    }

    /// The most bytes that a call held in the host's memory for a device.
    pub fn on_host(&self) -> u64 {
        self.sums.on_host.get()
    }

    /// The requests to a card so far.
    pub fn calls(&self) -> Calls {
        self.sums.calls.get()
    }

    /// Whether tensors lie on a device.
    pub fn is_on_device(&self) -> bool {
        self.sums.is_on_device.get()
    }

    /// Bytes of weights that were asked for since the last [`Ledger::begin`], each time that they were not in memory.
    pub fn paged_in(&self) -> u64 {
        self.sums.paged_in.get()
    }

    /// From now on tensors lie on a device.
    pub fn move_to_device(&self) {
        self.sums.is_on_device.set(true);
    }

    /// On a device: until the result is dropped, the memory of dropped tensors stays taken.
    pub fn hold(&self) -> Held {
        self.sums.held.set(self.is_on_device().then_some(0));
        Held(Rc::clone(&self.sums))
    }

    /// Begins a new count. Tensors that are alive stay counted.
    pub fn begin(&self) {
        let Sums { live, peak, peak_with_weights, loss, work, kept, on_host, calls, lists, paged_in, .. } = &*self.sums;
        peak.set(live.get());
        peak_with_weights.set(live.get());
        loss.set(0);
        work.set(Work::default());
        kept.set(Kept::default());
        on_host.set(0);
        calls.set(Calls::default());
        lists.borrow_mut().clear();
        paged_in.set(0);
    }
}

/// The memory of counted tensors that share it.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) sums: Rc<Sums>,
    /// Bytes, as long as the memory exists.
    pub(super) bytes: u64,
    pub(super) home: Placement,
}

/// Where a tensor lies while it is not in use.
#[derive(Debug)]
pub(super) enum Placement {
    Memory,
    /// In a file. It is in memory from its first use until it is paged out.
    #[cfg_attr(not(test), expect(dead_code, reason = "whole steps are rehearsed by tests"))]
    File {
        is_resident: Cell<bool>,
    },
    /// In a file. It is read each time that it is asked for, and its memory is counted elsewhere.
    FileCountedElsewhere {
        is_here: Cell<bool>,
    },
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.sums.take(self.bytes);
    }
}

/// Memory of dropped tensors, which is freed when this is dropped.
#[derive(Debug)]
pub(crate) struct Held(Rc<Sums>);

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(held) = self.0.held.take() {
            self.0.take(held);
        }
    }
}
