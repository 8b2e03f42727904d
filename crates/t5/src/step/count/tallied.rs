//! The result of a tally of a step, and the peak that follows from the tally and the cost of the head. All sizes are in bytes.

use candle_core::DType;
use t5_ops::Calls;

use super::StepCount;
use super::live::Live;
use super::rehearsal::Cost;
use crate::ops::Kept;

/// The result of a tally. It does not depend on the chunk of logits: the cost of the head adds that.
#[derive(Clone, Debug, Default)]
pub(super) struct Tallied {
    /// The moment of the peak, without the loss.
    pub(super) peak: Live,
    /// The moment of the peak of forward and backward alone. Set for micro-batch-major steps only, as is `handed_over`.
    pub(super) passes: Live,
    /// The most that is held beside gradients while they are handed over.
    pub(super) handed_over: u64,
    /// The moment of the loss.
    pub(super) head: Live,
    /// Whether the head's weight is paged by rows.
    pub head_paged_by_matrix: bool,
    /// Bytes alive between forward and backward.
    pub saved: u64,
    pub written: u64,
    /// The bytes of gradients in `written`.
    pub gradients_written: u64,
    /// The most bytes of activations and gradients that wait in files at a time.
    pub waiting: u64,
    pub packed: Kept,
    pub on_host: u64,
    /// Bytes of weights that each micro-batch reads from files, where weights are read matrix by matrix.
    pub paged_in: u64,
    /// The requests to a card of forward and backward, without the head: of all micro-batches layer by layer, of one otherwise.
    pub calls: Calls,
}

impl Tallied {
    /// The bytes by which recorded passes raise the peak of a micro-batch-major step above [`Tallied::peak_with`]. The passes' arena is
    /// held during the head and the update, too.
    pub fn recorded_beside(&self, head: &Cost, activations: DType) -> u64 {
        // Tensors that live at one time have small gaps between them. Beside bf16, f32 has its own part of the arena, which is full at
        // another time. The shares were measured on small models: at most 2 % and 12 %, with a recording's inputs outside the arena.
        let share = if activations == DType::BF16 { 8 } else { 32 };
        let passes = self.passes.total() + self.passes.total() / share;
        let recorded = passes + head.extra.max(self.handed_over);
        recorded.saturating_sub(self.peak_with(head).total())
    }

    /// The moment of the peak, with this cost of the head.
    pub fn peak_with(&self, head: &Cost) -> Peak {
        let head = at_head(self.head, self.head_paged_by_matrix, head);
        let live = if head.total() > self.peak.total() { head } else { self.peak };
        Peak { live, saved: self.saved, loss: head.loss, weights: live.weights }
    }
}

/// The moment of the loss, with this cost of the head. The head's weight is in memory, or some rows of it.
pub(super) fn at_head(head: Live, is_paged_by_matrix: bool, cost: &Cost) -> Live {
    let weights = if is_paged_by_matrix { cost.weights } else { head.weights };
    Live { loss: cost.loss, workspace: head.workspace + cost.extra - cost.loss, weights, ..head }
}

/// A step at its peak.
pub(super) struct Peak {
    live: Live,
    saved: u64,
    loss: u64,
    pub weights: u64,
}

impl Peak {
    pub fn total(&self) -> u64 {
        self.live.total()
    }

    /// The rows of the bill. For a micro-batch-major step, activations are the bytes alive between forward and backward; then come the loss
    /// and the rest of the peak.
    pub fn rows(&self, is_micro_batch_major: bool) -> StepCount {
        let Live { activations, gradients, loss, workspace, .. } = self.live;
        let row = StepCount { activations, gradients, loss, workspace, ..StepCount::default() };
        if !is_micro_batch_major {
            return row;
        }
        let workspace = (activations + loss + workspace).saturating_sub(self.saved + self.loss);
        StepCount { activations: self.saved, loss: self.loss, workspace, ..row }
    }
}
