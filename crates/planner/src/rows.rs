//! The rows of a dataset that is open, as training reads them.

use dataloader::{DataLoader, LoaderLimits};
use memory_policy::{Bytes, CostRow, plural};
use parquet_dataset::{Dataset, Residency};

use crate::FeedingChoice;
use crate::feeding::{DatasetResidency, Feeding};
use crate::lever::Pins;
use crate::levers::{DATASET_RESIDENCY, DECODE_THREADS, PREFETCH_BATCHES};
use crate::names::{DATASET, LOADER};

impl DatasetResidency {
    /// In the dataset's own words.
    pub fn of_dataset(self) -> Residency {
        match self {
            Self::InMemory => Residency::InMemory,
            Self::RowGroupCache { bytes } => Residency::RowGroupCache { bytes: bytes.0 },
            Self::UltraLowMem => Residency::UltraLowMem,
        }
    }
}

impl Feeding {
    /// In the loader's own words.
    pub fn limits(&self) -> LoaderLimits {
        LoaderLimits { prefetch_batches: self.prefetch_batches, decode_threads: self.decode_threads }
    }
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

impl Rows<'_> {
    pub(crate) fn choices(&self, pins: &Pins) -> Vec<FeedingChoice> {
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
