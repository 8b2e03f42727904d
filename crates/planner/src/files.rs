//! Files that replace memory: their place, the bytes written to them, and the part that the system keeps in the page cache beside the run.

use std::path::Path;

use memory_policy::{Bytes, MemorySnapshot, headroom};
use t5::LayerMajor;

use crate::Plan;

/// Bytes that a step writes to files, reads from them, or copies to and from a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepIo {
    /// Activations, gradients and moments: written once and read once.
    pub once: u64,
    /// Weights: read in forward, in backward and for the update, and then written.
    pub weights: u64,
    /// Frozen weights, which are only read.
    pub frozen: u64,
    /// Frozen weights, counted each time that a step reads them.
    pub read: u64,
    /// Frozen weights that come one by one: the bytes that each micro-batch reads. They do not depend on the micro-batch's samples.
    pub read_by_micro_batch: u64,
    /// All bytes that are copied between the host and a device.
    pub bus_bytes: u64,
    /// The part of `bus_bytes` that is copied while a block is computed.
    pub overlapped: u64,
    /// Bytes of copies that overlap with as many bytes or more in the other direction: those behind a block, and all others.
    pub bidirectional: [u64; 2],
    /// The part of `bus_bytes` that is copied from or to page-locked memory of the host.
    pub pinned_bytes: u64,
}

impl StepIo {
    /// The bytes of `count` micro-batches. Each micro-batch also reads `of_table` bytes of a table that comes by rows.
    #[must_use]
    pub fn in_micro_batches(self, count: usize, of_table: u64) -> Self {
        let by_micro_batch = self.read_by_micro_batch + of_table;
        Self { read: self.read + by_micro_batch * count as u64, read_by_micro_batch: 0, ..self }
    }

    /// All bytes that are written.
    pub fn total(self) -> u64 {
        self.once + self.weights
    }
}

/// The percentage of free memory that written files may fill before Linux makes the writing process wait: the default of `vm.dirty_ratio`.
pub(crate) const UNWRITTEN_PERCENT: u64 = 20;

/// The directory of a run's files, and how much of them the system keeps in memory beside the run.
pub fn files(directory: &Path, now: &MemorySnapshot, plan: &Plan) -> t5::Files {
    let memory = memory_for_each(memory_beside(now, plan), plan.step.levers.layer_major.as_ref());
    let weight_blocks_in_memory = plan.step.levers.weight_blocks_in_memory();
    let read_ahead_bytes = now.ceiling().saturating_sub(plan.predicted_peak).0;
    let (unwritten_bytes, in_host_memory) = (memory.0, plan.step.levers.has_host_memory());
    let (directory, weights_by_matrix) = (directory.to_owned(), plan.step.levers.has_weights_by_matrix());
    t5::Files {
        directory,
        unwritten_bytes,
        weight_blocks_in_memory,
        weights_by_matrix,
        read_ahead_bytes,
        in_host_memory,
    }
}

/// The share of the memory for files that each kind gets: activations, gradients, weights and moments share equally.
fn memory_for_each(memory: Bytes, layers: Option<&LayerMajor>) -> Bytes {
    let kinds = |layers: &LayerMajor| {
        let LayerMajor { boundaries_on_disk, gradients_on_disk, weights_on_disk, optimizer_on_disk, .. } = *layers;
        [boundaries_on_disk, gradients_on_disk, weights_on_disk, optimizer_on_disk]
    };
    let kinds = layers.map_or(0, |layers| kinds(layers).into_iter().map(u64::from).sum());
    Bytes(memory.0 / kinds.max(1))
}

/// Bytes of files that stay in the page cache beside a process that holds `held` bytes.
pub fn memory_for_files(now: &MemorySnapshot, held: Bytes) -> Bytes {
    now.ceiling().saturating_sub(held).percent(UNWRITTEN_PERCENT)
}

/// Bytes of files that stay in the page cache beside a plan, which may need far less than its budget.
pub fn memory_beside(now: &MemorySnapshot, plan: &Plan) -> Bytes {
    memory_for_files(now, plan.predicted_peak + headroom(plan.predicted_peak))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_gradients_and_weights_share_the_memory_for_files() {
        let gradients = LayerMajor { gradients_on_disk: true, ..LayerMajor::default() };
        let two = LayerMajor { boundaries_on_disk: true, ..gradients };
        let three = LayerMajor { weights_on_disk: true, ..two };
        let of = |layers: Option<&LayerMajor>| memory_for_each(Bytes::mib(12), layers);
        let shares = [of(None), of(Some(&gradients)), of(Some(&two)), of(Some(&three))];
        assert_eq!(shares, [Bytes::mib(12), Bytes::mib(12), Bytes::mib(6), Bytes::mib(4)]);
    }

    #[test]
    fn a_fifth_of_what_is_free_beside_a_run_keeps_files() {
        let now = MemorySnapshot { available: Bytes::gib(12), ..MemorySnapshot::default() };
        assert_eq!(memory_for_files(&now, Bytes::gib(2)), Bytes::gib(2));
    }
}
