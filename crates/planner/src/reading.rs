//! The rows that an evaluation reads, and the memory of reading them.

use dataloader::{BadRows, LoaderLimits, LoaderOptions, OrderOptions, Tokenizer};
use parquet_dataset::{Dataset, Residency};

use crate::reading_bytes::Reading;

/// Micro-batches read together and sorted by length, so that little is padded.
const BATCHES_SORTED_TOGETHER: usize = 4;

/// Nothing is read ahead: the evaluating thread reads for itself.
pub const NOTHING_AHEAD: LoaderLimits = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };

/// The options of an evaluation that computes `samples` rows at a time: each row once, in file order.
pub fn in_file_order(loader: &LoaderOptions, samples: usize) -> LoaderOptions {
    LoaderOptions {
        batch_size: samples.max(1) * BATCHES_SORTED_TOGETHER,
        order: OrderOptions { shuffle: false, ..loader.order },
        epochs: Some(1),
        bad_rows: if loader.bad_rows == BadRows::Skip { BadRows::Skip } else { BadRows::Usual },
        keep_texts: true,
        // Each task's rows are evaluated by themselves.
        mixture: None,
        ..loader.clone()
    }
}

/// The rows that an evaluation reads.
#[derive(Clone)]
pub struct EvaluatedRows<'a> {
    /// The training task.
    pub loader: LoaderOptions,
    /// The tokenizer that encodes them.
    pub tokenizer: &'a Tokenizer,
    /// The dataset that holds them.
    pub dataset: &'a Dataset,
}

impl EvaluatedRows<'_> {
    /// How many rows there are.
    pub fn count(&self) -> u64 {
        self.dataset.rows()
    }

    /// The memory of reading when `samples` rows are computed at a time. Tokenizer and footers belong to the process's own memory.
    pub(crate) fn bytes(&self, samples: usize) -> Reading {
        let options = in_file_order(&self.loader, samples);
        let loader = dataloader::costs(&options, NOTHING_AHEAD, self.tokenizer, self.dataset);
        let dataset = self.dataset.costs(Residency::UltraLowMem, 1);
        let of_loader = loader.iter().filter(|row| !row.is_held).map(|row| (row.bytes, row.is_until_made));
        let of_dataset = dataset.iter().filter(|row| !row.is_held).map(|row| (row.bytes, row.is_while_read));
        let all = || of_loader.clone().chain(of_dataset.clone());
        Reading {
            rows: all().map(|(bytes, _)| bytes).sum(),
            batch: all().filter(|(_, is_let_go)| !is_let_go).map(|(bytes, _)| bytes).sum(),
        }
    }
}
