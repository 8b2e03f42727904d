//! The source of a step's batches, and the ways to feed a step from it.

use memory_policy::CostRow;

use crate::FeedingChoice;
use crate::feeding::Feeding;
use crate::lever::Pins;
use crate::levers::{DECODE_THREADS, PREFETCH_BATCHES};
use crate::names::LOADER;
#[cfg(feature = "datasets")]
use crate::rows::Rows;
#[cfg(not(feature = "datasets"))]
use crate::without_datasets::Rows;

/// The loader and dataset of a step.
#[derive(Clone, Copy)]
pub enum Feed<'a> {
    /// Rows of a dataset.
    Rows(Rows<'a>),
    /// Rows of a dataset that is not known yet: batches of samples with this many tokens are counted.
    Unknown {
        /// Samples of a batch.
        samples: usize,
        /// Source and target tokens together.
        tokens: usize,
    },
    /// Samples come from elsewhere, and the loader holds nothing.
    Given,
}

/// The bytes of a batch of token ids, as the loader will count them once there are rows.
const fn batch_bytes(samples: u64, tokens: u64) -> u64 {
    samples * (4 * tokens + 96)
}

#[cfg(feature = "datasets")]
const _: () = assert!(batch_bytes(128, 4096) == dataloader::batch_bytes(128, 4096));

/// The ways to feed a step that the pins allow.
pub(crate) fn choices(feed: &Feed<'_>, pins: &Pins) -> Vec<FeedingChoice> {
    match feed {
        Feed::Rows(rows) => rows.choices(pins),
        Feed::Unknown { samples, tokens } => {
            let prefetch_batches = pins.count(PREFETCH_BATCHES).unwrap_or(2);
            let decode_threads = pins.count(DECODE_THREADS).unwrap_or(1);
            let bytes = (prefetch_batches as u64 + 1) * batch_bytes(*samples as u64, *tokens as u64);
            let row = CostRow::new(LOADER, bytes, "without the dataset: `data.train` is not set");
            let feeding = Feeding { decode_threads, prefetch_batches, ..Feeding::default() };
            vec![FeedingChoice::new(feeding, vec![row], 1.0)]
        }
        Feed::Given => vec![FeedingChoice::new(Feeding::default(), Vec::new(), 1.0)],
    }
}
