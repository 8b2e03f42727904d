//! What a tally of a step found, and the peak that follows from it and the head.

use super::StepCount;
use super::live::Live;
use super::rehearsal::Cost;
use crate::ops::Kept;

/// What a tally found, but for the chunk of logits.
#[derive(Clone, Debug)]
pub(super) struct Tallied {
    /// The moment of the peak, the loss apart.
    pub(super) peak: Live,
    /// The same of passes alone, and what is held at the most beside gradients while those are handed over.
    pub(super) passes: Live,
    pub(super) handed_over: u64,
    /// The moment of the loss.
    pub(super) head: Live,
    /// Whether the head's weight comes by rows.
    pub head_comes_apart: bool,
    /// Alive between forward and backward.
    pub saved: u64,
    pub written: u64,
    /// Gradients among what is written.
    pub gradients_written: u64,
    /// The most of activations and gradients that wait in files at a time.
    pub waiting: u64,
    pub packed: Kept,
    pub on_host: u64,
    /// Of weights in a file, what each micro-batch reads where they come one by one.
    pub paged_in: u64,
}

impl Tallied {
    /// Bytes that a step, micro-batch-major, holds at its peak above [`Tallied::peak_with`] where recorded passes have memory of their own
    /// all along: beside them lie the gradient of the output and the loss, or what is handed over.
    pub fn recorded_beside(&self, head: &Cost) -> u64 {
        // Tensors of f32 and of bf16 lie in arenas of their own, and between those that live at one time there are gaps: measured on
        // small models.
        let passes = self.passes.total() + self.passes.total() / 4;
        let recorded = passes + head.extra.max(self.handed_over);
        recorded.saturating_sub(self.peak_with(head).total())
    }

    /// The moment of the peak, where the head costs so much.
    pub fn peak_with(&self, head: &Cost) -> Peak {
        let head = at_head(self.head, self.head_comes_apart, head);
        let live = if head.total() > self.peak.total() { head } else { self.peak };
        Peak { live, saved: self.saved, loss: head.loss, weights: live.weights }
    }
}

/// The moment of the loss, where the head costs so much, with its weight in memory or some rows of it.
pub(super) fn at_head(head: Live, comes_apart: bool, cost: &Cost) -> Live {
    let weights = if comes_apart { cost.weights } else { head.weights };
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

    /// As rows. Micro-batch-major they say what is alive between forward and backward, what the loss takes, and what the peak
    /// has beyond these.
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
