//! A budget: the memory limit of a run, and the headroom that a plan leaves below it.

use crate::{Bytes, MemorySnapshot};

/// How much of what this process could hold it takes when no budget was given, in percent.
///
/// The rest is for everything else on the machine: it was measured as free at one instant only.
pub const DEFAULT_SHARE_PERCENT: u64 = 80;

/// Headroom, in percent of the predicted peak: how far the operating system's count may lie above
/// the prediction before the budget is broken.
pub(crate) const HEADROOM_PERCENT: u64 = 5;

/// The least headroom: thread stacks and the allocator's own pages do not shrink with the model.
pub(crate) const LEAST_HEADROOM: Bytes = Bytes::mib(8);

/// How much more another start of the same command may measure for the process itself: its pages are counted, and which
/// of them are there differs from start to start. What is named as enough for later is named with it.
pub const ANOTHER_START: Bytes = Bytes::mib(1);

/// The memory limit of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// This much: `--memory-budget`. The promise that the whole process stays below it.
    Explicit(Bytes),
    /// [80 % of the ceiling](DEFAULT_SHARE_PERCENT): of what this process holds and may still take.
    ShareOfAvailable,
}

impl Budget {
    /// The budget in bytes, at this instant.
    pub fn resolve(self, now: &MemorySnapshot) -> Bytes {
        match self {
            Self::Explicit(bytes) => bytes,
            Self::ShareOfAvailable => now.ceiling().percent(DEFAULT_SHARE_PERCENT),
        }
    }

    /// Who set it, for the bill.
    pub(crate) fn source(self) -> String {
        match self {
            Self::Explicit(_) => "--memory-budget".to_string(),
            Self::ShareOfAvailable => format!("{DEFAULT_SHARE_PERCENT} % of the available memory"),
        }
    }
}

/// The headroom beside a predicted peak: 5 % of it, and at least 8 MiB.
///
/// A function of the prediction alone, so that the smallest budget is one and not a fixed point.
pub fn headroom(predicted_peak: Bytes) -> Bytes {
    predicted_peak.percent(HEADROOM_PERCENT).max(LEAST_HEADROOM)
}
