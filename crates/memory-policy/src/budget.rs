//! A budget: the memory limit of a run, and the headroom that a plan leaves below it.

use crate::{Bytes, MemorySnapshot};

/// The share of [`MemorySnapshot::ceiling`] that the process takes if no budget was given, in percent.
///
/// The rest is for other programs on the machine: it was measured as free at one instant only.
pub const DEFAULT_SHARE_PERCENT: u64 = 80;

/// Headroom, in percent of the predicted peak: the operating system's count may exceed the prediction by this much before it exceeds the
/// budget.
pub(crate) const HEADROOM_PERCENT: u64 = 5;

/// The least headroom: thread stacks and the allocator's own pages do not shrink with the model.
pub(crate) const MIN_HEADROOM: Bytes = Bytes::mib(8);

/// Bytes by which another start of the same command may measure a larger process, because the resident pages differ from start to start. A
/// budget that is recommended for a later start includes these bytes.
pub const RESTART_MARGIN: Bytes = Bytes::mib(1);

/// The share of the peak so far by which another start may differ: starts of a process of 27 MiB differed by 1.4 MiB, of one of 360 MiB by 1.8,
/// and of one of 90 MiB that had read a long template by about 4.
const RESTART_SHARE: u64 = 24;

/// [`RESTART_MARGIN`], and a share of the memory that was measured instead of counted.
pub fn restart_margin(now: &MemorySnapshot) -> Bytes {
    RESTART_MARGIN + Bytes(now.peak_rss.max(now.rss).0 / RESTART_SHARE)
}

/// The memory limit of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// This many bytes: `--memory-budget`. The whole process promises to stay below them.
    Explicit(Bytes),
    /// [80 % of the ceiling](DEFAULT_SHARE_PERCENT): of the memory that this process holds and may still take.
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

    /// The source of the budget, for the bill.
    pub(crate) fn source(self) -> String {
        match self {
            Self::Explicit(_) => "--memory-budget".to_string(),
            Self::ShareOfAvailable => format!("{DEFAULT_SHARE_PERCENT} % of the available memory"),
        }
    }
}

/// The headroom beside a predicted peak: 5 % of it, and at least 8 MiB.
///
/// The headroom depends on the prediction only, so the smallest budget follows without a fixed point.
pub fn headroom(predicted_peak: Bytes) -> Bytes {
    predicted_peak.percent(HEADROOM_PERCENT).max(MIN_HEADROOM)
}
