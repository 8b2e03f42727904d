//! The rows of an open dataset, as training reads them.

use dataloader::{DataLoader, LoaderLimits};
use memory_policy::{Bytes, CostRow, FEEDING, Phase, plural};
use parquet_dataset::{Dataset, Residency};

use crate::FeedingChoice;
use crate::feeding::{DatasetResidency, Feeding};
use crate::lever::Pins;
use crate::levers::{DATASET_RESIDENCY, DECODE_THREADS, PREFETCH_BATCHES};
use crate::names::{DATASET, LOADER};

impl DatasetResidency {
    /// Converts to the dataset's type.
    pub fn of_dataset(self) -> Residency {
        match self {
            Self::InMemory => Residency::InMemory,
            Self::RowGroupCache { bytes } => Residency::RowGroupCache { bytes: bytes.0 },
            Self::UltraLowMem => Residency::UltraLowMem,
        }
    }
}

impl Feeding {
    /// Converts to the loader's type.
    pub fn limits(&self) -> LoaderLimits {
        LoaderLimits { prefetch_batches: self.prefetch_batches, decode_threads: self.decode_threads }
    }
}

/// Rows of a dataset, as they are read in training.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The dataset that holds them.
    pub dataset: &'a Dataset,
    /// The loader that makes batches of them.
    pub loader: &'a DataLoader,
    /// The blocks of a window, if rows are shuffled.
    pub window_blocks: Option<u64>,
    /// The number of rows that the run reads.
    pub read: RowsRead,
}

/// The number of rows that a run reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsRead {
    /// Rows of all steps. A row counts each time that it is read. `u64::MAX`: the run has no end.
    pub samples: u64,
    /// Rows of a step.
    pub batch_samples: u64,
}

/// The blocks of rows of a dataset, and the window of blocks that a shuffled run reads together.
#[derive(Clone, Copy)]
struct Blocks {
    all: u64,
    rows_of_each: u64,
    /// Blocks of a window. The whole-file shuffle reads one window and begins the next; file order needs two blocks.
    window: u64,
}

impl RowsRead {
    /// The most blocks that are worth keeping: later reads touch no other block that has been read before.
    fn kept_blocks(&self, blocks: Blocks) -> u64 {
        (blocks.window + 1).min(blocks.all).min(self.samples).max(1)
    }

    /// The share of a run's reads that are the first from their block. They decode the block even if blocks are kept.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn share_of_first_reads(&self, blocks: Blocks) -> f64 {
        if self.samples == u64::MAX {
            return 0.0;
        }
        let windows = self.samples.div_ceil(blocks.rows_of_each.saturating_mul(blocks.window)).saturating_add(1);
        let are_all_kept = blocks.all <= blocks.window + 1;
        let first_reads = windows.saturating_mul(blocks.window).min(self.samples);
        let first_reads = if are_all_kept { first_reads.min(blocks.all) } else { first_reads };
        let places = self.batch_samples.min(blocks.window).min(blocks.all).max(1);
        let reads = self.samples.div_ceil(self.batch_samples.max(1)).saturating_mul(places);
        (first_reads as f64 / reads.max(1) as f64).min(1.0)
    }
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
                // Making a batch costs a few percent of a step. With a thread of its own, it overlaps with the step.
                let waiting = match prefetch_batches.min(decode_threads) {
                    0 => 1.05,
                    _ if prefetch_batches == 1 => 1.005,
                    _ => 1.0,
                };
                let feeding = Feeding { residency, decode_threads, prefetch_batches };
                let [rows, while_read] = self.held(&feeding);
                let other_phases = vec![Phase { name: FEEDING, rows: while_read }];
                let choice = FeedingChoice::new(feeding, rows, residency_time * waiting);
                choices.push(FeedingChoice { other_phases, ..choice });
            }
        }
        choices
    }

    /// Rows of the loader and of the dataset: memory that is always held, and memory held before a step if nothing is made ahead. Memory
    /// that they hold already, such as tokenizer and footers, is measured with the process.
    fn held(&self, feeding: &Feeding) -> [Vec<CostRow>; 2] {
        let runs_ahead = feeding.prefetch_batches.min(feeding.decode_threads) > 0;
        let note = match feeding.prefetch_batches {
            _ if !runs_ahead => "nothing ahead".to_string(),
            batches => {
                let batches = if batches == 1 { "1 batch".to_string() } else { format!("{batches} batches") };
                format!("{batches} ahead, {}", plural(feeding.decode_threads as u64, "thread"))
            }
        };
        let loader = self.loader.costs(feeding.limits());
        let dataset = self.dataset.costs(feeding.residency.of_dataset(), feeding.decode_threads.max(1));
        [false, true].map(|is_let_go| {
            let is_here = |until_read: bool| (until_read && !runs_ahead) == is_let_go;
            let of_loader = loader.iter().filter(|row| !row.is_held && is_here(row.is_until_made));
            let of_dataset = dataset.iter().filter(|row| !row.is_held && is_here(row.is_while_read));
            let bytes = [of_loader.map(|row| row.bytes).sum(), of_dataset.map(|row| row.bytes).sum()];
            let rows = [(LOADER, note.clone()), (DATASET, feeding.residency.to_string())];
            rows.into_iter().zip(bytes).map(|((name, note), bytes)| CostRow::new(name, bytes, note)).collect()
        })
    }

    /// Residencies of the dataset, each with its step time relative to the fastest.
    fn residencies(&self, pins: &Pins) -> Vec<(DatasetResidency, f64)> {
        let dataset = self.dataset;
        let rows_of_each = u64::from(dataset.block_rows());
        let window = self.window_blocks.unwrap_or(1);
        let blocks = Blocks { all: dataset.rows().div_ceil(rows_of_each), rows_of_each, window };
        let block_bytes = dataset.mean_row_bytes().saturating_mul(rows_of_each.min(dataset.rows()));
        let kept_bytes = block_bytes.saturating_mul(self.read.kept_blocks(blocks)).min(dataset.bytes_of_all_blocks());
        let cache = |bytes: u64| DatasetResidency::RowGroupCache { bytes: Bytes(bytes) };
        // Without any block in memory, every batch decodes its pages. With blocks, only the first read of a block decodes.
        let direct = if self.window_blocks.is_some() { 0.05 } else { 0.01 };
        let first = direct * self.read.share_of_first_reads(blocks);
        // A block that stays in memory saves its decoding in later epochs only. A cache smaller than the window decodes blocks again within
        // an epoch. A cache smaller than a block never holds one.
        let again = if self.read.samples > dataset.rows() { 1.002 } else { 1.0 };
        let mut offers = vec![(DatasetResidency::InMemory, 1.0 + first), (cache(kept_bytes), again + first)];
        if kept_bytes / 4 >= block_bytes {
            offers.push((cache(kept_bytes / 4), (1.02 + first).min(1.0 + direct)));
        }
        offers.push((DatasetResidency::UltraLowMem, 1.0 + direct));
        let pin = pins.value(DATASET_RESIDENCY);
        let is_left = |residency: &DatasetResidency| pin.is_none_or(|pin| pin.is(residency.name()));
        offers.into_iter().filter(|(residency, _)| is_left(residency)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(samples: u64, batch_samples: u64) -> RowsRead {
        RowsRead { samples, batch_samples }
    }

    #[test]
    fn a_cache_keeps_no_more_blocks_than_a_run_reads() {
        let blocks = Blocks { all: 100, rows_of_each: 4096, window: 16 };
        let kept = |samples| read(samples, 4).kept_blocks(blocks);
        assert_eq!([kept(0), kept(3), kept(16), kept(17), kept(1 << 40)], [1, 3, 16, 17, 17]);
        assert_eq!(read(1 << 40, 4).kept_blocks(Blocks { all: 2, ..blocks }), 2);
    }

    #[test]
    fn a_short_run_comes_first_to_most_blocks_and_a_long_one_to_few() {
        let blocks = Blocks { all: 100, rows_of_each: 4096, window: 16 };
        let share = |samples, batch_samples| read(samples, batch_samples).share_of_first_reads(blocks);
        assert_eq!(share(8, 8), 1.0, "one step");
        assert_eq!(share(u64::MAX, 8), 0.0, "no end");
        // Two windows, of 16 blocks each.
        assert_eq!(share(80, 8), 32.0 / 80.0);
        assert!(share(1 << 20, 64) < 0.01);
        let one_block = Blocks { all: 1, ..blocks };
        assert_eq!(read(8, 4).share_of_first_reads(one_block), 0.5);
        // All blocks stay, so no read of later epochs is the first from its block.
        assert_eq!(read(4096 * 50, 4096).share_of_first_reads(one_block), 0.02);
    }
}
