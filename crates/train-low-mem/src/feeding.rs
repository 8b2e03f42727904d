//! The ways to feed a step: how far ahead batches are made, by how many threads, and what the dataset keeps in memory.

use dataloader::{DataLoader, LoaderLimits};
use memory_policy::{Bytes, CostRow, DatasetResidency, LoaderChoice};
use parquet_dataset::{Dataset, Residency};

use crate::config::Config;
use crate::levers::pinned;

/// The ways to feed a step, those that the pins leave.
pub fn choices(config: &Config, dataset: &Dataset, loader: &DataLoader) -> Vec<LoaderChoice> {
    let pins = &config.memory;
    let ahead = [(2, 1), (1, 1), (0, 0)]
        .map(|(prefetch, threads)| (pins.prefetch_batches.unwrap_or(prefetch), pins.decode_threads.unwrap_or(threads)));
    let mut choices = Vec::new();
    for (residency, residency_time) in residencies(config, dataset) {
        for (prefetch_batches, decode_threads) in pinned(None, ahead.to_vec()) {
            // Making a batch costs a few percent of a step, hidden behind it where a thread does it.
            let waiting = match prefetch_batches.min(decode_threads) {
                0 => 1.05,
                _ if prefetch_batches == 1 => 1.005,
                _ => 1.0,
            };
            let limits = LoaderLimits { prefetch_batches, decode_threads };
            choices.push(LoaderChoice {
                residency,
                decode_threads,
                prefetch_batches,
                rows: rows(dataset, loader, residency, limits),
                relative_time: residency_time * waiting,
            });
        }
    }
    choices
}

/// Rows of the loader and the dataset. What they hold already, tokenizer and footers, is in `process`.
fn rows(dataset: &Dataset, loader: &DataLoader, residency: DatasetResidency, limits: LoaderLimits) -> Vec<CostRow> {
    let of_loader = loader.costs(limits).into_iter().filter(|row| row.name != "tokenizer");
    let readers = limits.decode_threads.max(1);
    let of_dataset = dataset.costs(dataset_residency(residency), readers).into_iter();
    let of_dataset = of_dataset.filter(|row| row.name != "dataset metadata");
    let mut loader_bytes = 0;
    let mut rows = Vec::new();
    of_loader.for_each(|row| loader_bytes += row.bytes);
    rows.push(CostRow::new(
        "loader",
        loader_bytes,
        format!("{} batches ahead, {} threads", limits.prefetch_batches, limits.decode_threads),
    ));
    rows.push(CostRow::new("dataset", of_dataset.map(|row| row.bytes).sum(), residency.to_string()));
    rows
}

/// Residencies of the dataset, each with its step time relative to the fastest.
fn residencies(config: &Config, dataset: &Dataset) -> Vec<(DatasetResidency, f64)> {
    let block_bytes = dataset.mean_row_bytes().saturating_mul(u64::from(dataset.block_rows()));
    // The whole-file shuffle works in one window of blocks and begins the next; file order needs two blocks.
    let blocks = if config.data.shuffle { config.data.window_blocks + 1 } else { 2 };
    let cache = |share: u64| DatasetResidency::RowGroupCache {
        bytes: Bytes((block_bytes.saturating_mul(blocks) / share).clamp(1 << 20, dataset.decoded_bytes().max(1 << 20))),
    };
    // A block that stays saves its decoding in later epochs only. A cache smaller than the window decodes
    // blocks again within an epoch; without any, every batch decodes its pages.
    let again = if config.train.epochs > 1 { 1.002 } else { 1.0 };
    let offers = [
        (DatasetResidency::InMemory, 1.0),
        (cache(1), again),
        (cache(4), 1.02),
        (DatasetResidency::UltraLowMem, if config.data.shuffle { 1.05 } else { 1.01 }),
    ];
    let pin = config.memory.dataset_residency.as_deref();
    offers.into_iter().filter(|(residency, _)| pin.is_none_or(|pin| pin == residency.name())).collect()
}

/// The policy's word for what the dataset may hold, in the dataset's own words.
pub fn dataset_residency(residency: DatasetResidency) -> Residency {
    match residency {
        DatasetResidency::InMemory => Residency::InMemory,
        DatasetResidency::RowGroupCache { bytes } => Residency::RowGroupCache { bytes: bytes.0 },
        DatasetResidency::UltraLowMem => Residency::UltraLowMem,
    }
}
