//! Bytes that a step moves: to files and from them, and between the host and a device.

use memory_policy::MemorySpace;
use t5::Levers;
use t5::costs::{Trained, WeightsOnDisk};
use t5::step::count::WeightsRead;

use super::StepCounter;
use crate::files::StepIo;

impl StepCounter<'_> {
    /// Bytes that a step with these levers writes to files.
    pub fn written(&self, levers: &Levers) -> StepIo {
        let Some(layers) = &levers.layer_major else { return StepIo::default() };
        // The bytes written do not depend on the size of a micro-batch.
        let levers = Levers { micro_batch_samples: self.batch_samples, ..*levers };
        let passes = &self.of_model.passes;
        let of_weights = |of: fn(&WeightsOnDisk, &Trained) -> u64| {
            if layers.weights_on_disk { of(&passes.weights_on_disk(&levers), passes.trained()) } else { 0 }
        };
        let (weights, frozen) = (of_weights(WeightsOnDisk::written), of_weights(WeightsOnDisk::frozen));
        let WeightsRead { trained, frozen: read, by_micro_batch, .. } = passes.weights_read(self.batch(), &levers);
        let moments = self.state_on_disk.filter(|_| layers.optimizer_on_disk).map_or(0, |state| state.written);
        let once = passes.written(self.batch(), &levers) + moments;
        // Bytes that are written are copied from the device, and later back to it.
        let bus_bytes =
            if self.of_model.place == MemorySpace::Device { 2 * once + weights + trained + read } else { 0 };
        let (overlapped, bidirectional) = match layers.copies_overlap {
            true => self.overlapped_copies(&levers, weights),
            false => (0, [0; 2]),
        };
        match layers.in_host_memory {
            // Frozen weights may stay in the model's own files.
            true => {
                StepIo { bus_bytes, overlapped, bidirectional, pinned_bytes: bus_bytes - read, ..StepIo::default() }
            }
            // The host fills and empties pieces of pinned memory one at a time.
            false => StepIo {
                once,
                weights,
                frozen,
                read,
                read_by_micro_batch: by_micro_batch,
                bus_bytes,
                overlapped,
                bidirectional: [0; 2],
                pinned_bytes: 0,
            },
        }
    }

    /// Bytes copied between the host and a device while a block is computed: weights for passes, activations in both directions, and
    /// gradients to the host. The second value is [`StepIo::bidirectional`] of page-locked memory. Nothing is computed during an update, which changes
    /// `changed` bytes of weights.
    fn overlapped_copies(&self, levers: &Levers, changed: u64) -> (u64, [u64; 2]) {
        let passes = &self.of_model.passes;
        let gradients = passes.gradients_written(self.batch(), levers);
        let activations = passes.written(self.batch(), levers) - gradients;
        let weights = passes.weights_copied_behind(levers);
        // Forward and backward each take half of the weights.
        let of_a_pass = weights / 2;
        let (forward, backward) = (of_a_pass.min(activations), gradients.min(of_a_pass + activations));
        // Updated weights are copied to the host while gradients and the next weights are copied to the device.
        (weights + 2 * activations + gradients, [forward + backward, changed.min(gradients)])
    }
}
