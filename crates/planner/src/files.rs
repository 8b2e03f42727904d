//! Files that stand in for memory: where they lie, how much is written to them, and how much of that the system keeps in
//! memory beside the run.

use std::path::Path;

use memory_policy::{Bytes, MemorySnapshot, headroom};
use t5::LayerMajor;

use crate::Plan;

/// Bytes that a step writes to files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Activations, gradients and moments: written once and read once.
    pub once: u64,
    /// Weights: read in forward, in backward and to be changed, and written.
    pub weights: u64,
    /// Frozen weights, which are only read.
    pub frozen: u64,
    /// The same as often as a step reads them.
    pub read: u64,
    /// Of frozen weights that come one by one, what each micro-batch reads. It does not depend on the micro-batch's samples.
    pub read_by_micro_batch: u64,
    /// All that is copied between the host and a device.
    pub over_the_bus: u64,
    /// Of these, what is copied while a block is computed.
    pub behind: u64,
    /// Of those behind a block, and of all others, the bytes that go one way while as many or more go the other way.
    pub both_ways: [u64; 2],
    /// Of what is copied, the bytes whose place on the host is page-locked memory.
    pub locked: u64,
}

impl Written {
    /// The bytes of `count` micro-batches. Each also reads `of_table` bytes of a table that comes by rows.
    #[must_use]
    pub fn in_micro_batches(self, count: usize, of_table: u64) -> Self {
        let by_micro_batch = self.read_by_micro_batch + of_table;
        Self { read: self.read + by_micro_batch * count as u64, read_by_micro_batch: 0, ..self }
    }

    /// Of all kinds that are written.
    pub fn total(self) -> u64 {
        self.once + self.weights
    }
}

/// The percentage of free memory that files may fill before Linux makes those who write them wait: `vm.dirty_ratio` as it comes.
pub(crate) const UNWRITTEN_PERCENT: u64 = 20;

/// Where a run's files lie, and how much of them the system keeps in memory beside it.
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

/// The share of the memory for files that activations take; gradients, weights and moments take as much each.
fn memory_for_each(memory: Bytes, layers: Option<&LayerMajor>) -> Bytes {
    let kinds = |layers: &LayerMajor| {
        let LayerMajor { boundaries_on_disk, gradients_on_disk, weights_on_disk, optimizer_on_disk, .. } = *layers;
        [boundaries_on_disk, gradients_on_disk, weights_on_disk, optimizer_on_disk]
    };
    let kinds = layers.map_or(0, |layers| kinds(layers).into_iter().map(u64::from).sum());
    Bytes(memory.0 / kinds.max(1))
}

/// Bytes of files that stay in memory beside a process that holds `held` bytes.
pub fn memory_for_files(now: &MemorySnapshot, held: Bytes) -> Bytes {
    now.ceiling().saturating_sub(held).percent(UNWRITTEN_PERCENT)
}

/// Bytes of files that stay in memory beside a plan, which may need far less than its budget.
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
