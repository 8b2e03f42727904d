//! Files that stand in for memory: where they lie, how much is written to them, and how much of that the system keeps in
//! memory beside the run.

use std::path::Path;

use memory_policy::{Bytes, LayerMajor, MemorySnapshot, Plan};

use crate::prices;

/// Bytes that a step writes to files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Activations and gradients: written once and read once.
    pub once: u64,
    /// Weights: read in forward, in backward and to be changed, and written.
    pub weights: u64,
}

impl Written {
    /// Of all kinds.
    pub fn total(self) -> u64 {
        self.once + self.weights
    }
}

/// Where a run's files lie, and how much of them the system keeps in memory beside it.
pub fn files(directory: &Path, now: &MemorySnapshot, plan: &Plan) -> t5::Files {
    let unwritten_bytes = room_of_each(file_room(now, plan.budget), plan.layer_major.as_ref()).0;
    t5::Files { directory: directory.to_owned(), unwritten_bytes }
}

/// What of the room for files is for activations, and as much for gradients and for weights.
fn room_of_each(room: Bytes, layers: Option<&LayerMajor>) -> Bytes {
    let kinds = |layers: &LayerMajor| [layers.boundaries_on_disk, layers.gradients_on_disk, layers.weights_on_disk];
    let kinds = layers.map_or(0, |layers| kinds(layers).into_iter().map(u64::from).sum());
    Bytes(room.0 / kinds.max(1))
}

/// Whether a plan wants the weights in a file.
pub fn has_weights_on_disk(plan: &Plan) -> bool {
    plan.layer_major.is_some_and(|layers| layers.weights_on_disk)
}

/// Bytes of files that stay in memory beside a run of this budget.
pub fn file_room(now: &MemorySnapshot, budget: Bytes) -> Bytes {
    prices::file_room(now.ceiling().saturating_sub(budget))
}

/// The policy's word for the lever, in the model's own words.
pub fn layers_of(layers: LayerMajor) -> t5::LayerMajor {
    t5::LayerMajor {
        kept_gradient_blocks: layers.kept_gradient_blocks,
        heads_kept: layers.heads_kept,
        boundaries_on_disk: layers.boundaries_on_disk,
        blocks_in_memory: layers.blocks_in_memory,
        gradients_on_disk: layers.gradients_on_disk,
        weights_on_disk: layers.weights_on_disk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_gradients_and_weights_share_the_room_for_files() {
        let gradients = LayerMajor { gradients_on_disk: true, ..LayerMajor::default() };
        let two = LayerMajor { boundaries_on_disk: true, ..gradients };
        let three = LayerMajor { weights_on_disk: true, ..two };
        let of = |layers: Option<&LayerMajor>| room_of_each(Bytes::mib(12), layers);
        let rooms = [of(None), of(Some(&gradients)), of(Some(&two)), of(Some(&three))];
        assert_eq!(rooms, [Bytes::mib(12), Bytes::mib(12), Bytes::mib(6), Bytes::mib(4)]);
    }
}
