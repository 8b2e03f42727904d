//! The ways to feed a step: how far ahead batches are made, by how many threads, and what the dataset keeps in memory.

use std::fmt;

use dataloader::{DataLoader, LoaderLimits};
use memory_policy::{Bytes, CostRow, Setting, plural};
use parquet_dataset::{Dataset, Residency};
use serde::{Deserialize, Serialize};

use crate::FeedingChoice;
use crate::lever::Pins;
use crate::levers::{DATASET_RESIDENCY, DECODE_THREADS, PREFETCH_BATCHES};
use crate::names::{DATASET, LOADER};

/// The data kept between reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetResidency {
    /// Every row, decoded.
    InMemory,
    /// The blocks read last, up to this many bytes.
    RowGroupCache {
        /// The most that the cache may hold.
        bytes: Bytes,
    },
    /// Nothing but the files' metadata.
    #[default]
    UltraLowMem,
}

impl DatasetResidency {
    /// The word that pins it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::InMemory => "in_memory",
            Self::RowGroupCache { .. } => "row_group_cache",
            Self::UltraLowMem => "ultra_low_mem",
        }
    }

    /// In the dataset's own words.
    pub fn of_dataset(self) -> Residency {
        match self {
            Self::InMemory => Residency::InMemory,
            Self::RowGroupCache { bytes } => Residency::RowGroupCache { bytes: bytes.0 },
            Self::UltraLowMem => Residency::UltraLowMem,
        }
    }
}

impl fmt::Display for DatasetResidency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RowGroupCache { bytes } => write!(f, "{} of {bytes}", self.name()),
            Self::InMemory | Self::UltraLowMem => f.write_str(self.name()),
        }
    }
}

/// How a step is fed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feeding {
    /// The data kept between reads.
    pub residency: DatasetResidency,
    /// Threads that decode and tokenize.
    pub decode_threads: usize,
    /// Optimizer batches that may be ready and not yet taken.
    pub prefetch_batches: usize,
}

impl Feeding {
    /// In the loader's own words.
    pub fn limits(&self) -> LoaderLimits {
        LoaderLimits { prefetch_batches: self.prefetch_batches, decode_threads: self.decode_threads }
    }
}

impl Setting for Feeding {
    fn in_words(&self) -> String {
        format!("{}, {} ahead, {} threads", self.residency, self.prefetch_batches, self.decode_threads)
    }

    fn levers(&self) -> Vec<(&'static str, String)> {
        // They are offered together.
        vec![("loader", self.in_words())]
    }

    fn differs_only_in(&self, _lever: &str, _other: &Self) -> bool {
        true
    }
}

/// The loader and dataset of a step.
#[derive(Clone, Copy)]
pub enum Feed<'a> {
    /// Rows of a dataset.
    Rows(Rows<'a>),
    /// Rows of a dataset that is not known yet: batches of samples of these tokens are counted.
    Unknown {
        /// Samples of a batch.
        samples: usize,
        /// Source and target tokens together.
        tokens: usize,
    },
    /// Nothing that is held: samples come from elsewhere.
    Given,
}

/// Rows of a dataset, as they are read in training.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Where they are.
    pub dataset: &'a Dataset,
    /// Who makes batches of them.
    pub loader: &'a DataLoader,
    /// Whether they are shuffled, in windows of so many blocks.
    pub window_blocks: Option<u64>,
    /// Whether they are read more than once.
    pub is_read_again: bool,
}

/// The ways to feed a step, those that the pins leave.
pub(crate) fn choices(feed: &Feed<'_>, pins: &Pins) -> Vec<FeedingChoice> {
    match feed {
        Feed::Rows(rows) => rows.choices(pins),
        Feed::Unknown { samples, tokens } => {
            let prefetch_batches = pins.count(PREFETCH_BATCHES).unwrap_or(2);
            let decode_threads = pins.count(DECODE_THREADS).unwrap_or(1);
            let bytes = (prefetch_batches as u64 + 1) * dataloader::batch_bytes(*samples as u64, *tokens as u64);
            let row = CostRow::new(LOADER, bytes, "without the dataset: `data.train` is not set");
            let feeding = Feeding { decode_threads, prefetch_batches, ..Feeding::default() };
            vec![FeedingChoice::new(feeding, vec![row], 1.0)]
        }
        Feed::Given => vec![FeedingChoice::new(Feeding::default(), Vec::new(), 1.0)],
    }
}

impl Rows<'_> {
    fn choices(&self, pins: &Pins) -> Vec<FeedingChoice> {
        let (prefetch, threads) = (pins.count(PREFETCH_BATCHES), pins.count(DECODE_THREADS));
        let mut ahead =
            [(2, 1), (1, 1), (0, 0)].map(|(batches, by)| (prefetch.unwrap_or(batches), threads.unwrap_or(by))).to_vec();
        ahead.dedup();
        let mut choices = Vec::new();
        for (residency, residency_time) in self.residencies(pins) {
            for &(prefetch_batches, decode_threads) in &ahead {
                // Making a batch costs a few percent of a step, hidden behind it where a thread does it.
                let waiting = match prefetch_batches.min(decode_threads) {
                    0 => 1.05,
                    _ if prefetch_batches == 1 => 1.005,
                    _ => 1.0,
                };
                let feeding = Feeding { residency, decode_threads, prefetch_batches };
                choices.push(FeedingChoice::new(feeding, self.rows(&feeding), residency_time * waiting));
            }
        }
        choices
    }

    /// Rows of the loader and the dataset. What they hold already, tokenizer and footers, is measured with the process.
    fn rows(&self, feeding: &Feeding) -> Vec<CostRow> {
        let loader = self.loader.costs(feeding.limits());
        let readers = feeding.decode_threads.max(1);
        let dataset = self.dataset.costs(feeding.residency.of_dataset(), readers);
        let loader = loader.iter().filter(|row| !row.is_held).map(|row| row.bytes).sum();
        let dataset = dataset.iter().filter(|row| !row.is_held).map(|row| row.bytes).sum();
        let note = match (feeding.prefetch_batches, feeding.decode_threads) {
            (0, _) => "nothing ahead".to_string(),
            (batches, threads) => {
                let batches = if batches == 1 { "1 batch".to_string() } else { format!("{batches} batches") };
                format!("{batches} ahead, {}", plural(threads as u64, "thread"))
            }
        };
        vec![CostRow::new(LOADER, loader, note), CostRow::new(DATASET, dataset, feeding.residency.to_string())]
    }

    /// Residencies of the dataset, each with its step time relative to the fastest.
    fn residencies(&self, pins: &Pins) -> Vec<(DatasetResidency, f64)> {
        let dataset = self.dataset;
        let block_bytes = dataset.mean_row_bytes().saturating_mul(u64::from(dataset.block_rows()));
        // The whole-file shuffle works in one window of blocks and begins the next; file order needs two blocks.
        let blocks = self.window_blocks.map_or(2, |blocks| blocks + 1);
        let most = dataset.decoded_bytes().max(1 << 20);
        let cache = |share: u64| DatasetResidency::RowGroupCache {
            bytes: Bytes((block_bytes.saturating_mul(blocks) / share).clamp(1 << 20, most)),
        };
        // A block that stays saves its decoding in later epochs only. A cache smaller than the window decodes
        // blocks again within an epoch; without any, every batch decodes its pages.
        let again = if self.is_read_again { 1.002 } else { 1.0 };
        let offers = [
            (DatasetResidency::InMemory, 1.0),
            (cache(1), again),
            (cache(4), 1.02),
            (DatasetResidency::UltraLowMem, if self.window_blocks.is_some() { 1.05 } else { 1.01 }),
        ];
        let pin = pins.of(DATASET_RESIDENCY);
        let is_left = |residency: &DatasetResidency| pin.is_none_or(|pin| pin.is(residency.name()));
        offers.into_iter().filter(|(residency, _)| is_left(residency)).collect()
    }
}
