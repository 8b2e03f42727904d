//! Jobs for tests.

use memory_policy::{Budget, Bytes, MemorySnapshot, Place};
use trainer::TrainerOptions;

use crate::feed::Feed;
use crate::job::{Job, Training, Wanted, Work};
use crate::lever::Pins;
use crate::prices::Prices;
use crate::processes::Processes;

/// Training that writes no files unless asked, without evaluation, by one process alone.
pub(crate) fn training(options: &TrainerOptions) -> Training<'_> {
    Training {
        options,
        disk_writes: 0,
        evaluation: None,
        wanted: Wanted::Undominated(None),
        base: None,
        processes: Processes::default(),
    }
}

/// A job on the host over 8 samples of 64 + 64 tokens, which come from elsewhere.
pub(crate) fn job<'a>(model: &'a t5::Config, training: Training<'a>, pins: &'a Pins) -> Job<'a> {
    Job {
        model,
        work: Work::Training(training),
        samples: 8,
        longest: (64, 64),
        place: Place::Host,
        budgets: Budget::ShareOfAvailable.into(),
        pins,
        feed: Feed::Given,
        process_note: "",
        prices: Prices::vectors(),
    }
}

/// A machine with 64 GiB, all of them free.
pub(crate) fn machine() -> MemorySnapshot {
    MemorySnapshot { available: Bytes::gib(64), total: Bytes::gib(64), ..MemorySnapshot::default() }
}
