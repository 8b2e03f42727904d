//! Memory of the loader, as rows of a bill. Pure functions of shapes.

use parquet_dataset::Dataset;

use crate::batch::{KEPT_TEXT_BYTES, MAX_READ_BYTES, read_bytes_of, target_column};
use crate::objective::MAX_PIECE_BYTES;
use crate::row_text::SEGMENT_BYTES;
use crate::tokenizer::{LOSSY_BYTES, WORD_CACHE_BYTES};
use crate::{LoaderLimits, LoaderOptions, Objective, Tokenizer};

/// One row of the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostRow {
    /// Purpose of the bytes.
    pub name: &'static str,
    /// An upper bound for ids, an estimate for the tokenizer.
    pub bytes: u64,
    /// Whether the bytes are held already when the costs are stated. The measured memory of the process then includes
    /// them.
    pub is_held: bool,
    /// Whether the bytes are freed once a batch is made. The computation on the batch reuses the memory of large blocks. For small
    /// blocks, the caller tells the allocator to give the memory back.
    pub is_until_made: bool,
}

/// Memory of a sample beside its ids: two vectors and the allocator's overhead for each.
const SAMPLE_OVERHEAD_BYTES: u64 = 96;
/// Memory of a token in the tokenizer's tables: its text twice, its id, its merge. Measured: 585 bytes a token,
/// comparing byte-level vocabularies of 4,096 and 29,298 tokens of Chinese and English.
const VOCABULARY_ENTRY_BYTES: u64 = 600;
/// Memory of a tokenizer beside its tokens: its compiled pattern. Measured: 3.7 MiB with the same two vocabularies.
const TOKENIZER_BYTES: u64 = 4 << 20;
/// While a window is cut into words, every byte has its alignment. In runs of digits, every byte is also a word of its
/// own with three blocks. Measured: 398 in a text of alternating letters and digits, 40 in words.
const BYTES_PER_WINDOW_BYTE: u64 = 400;
/// As [`BYTES_PER_WINDOW_BYTE`], for the part of a window that only a long word fills.
const BYTES_PER_WORD_BYTE: u64 = 100;
/// Memory that a window keeps for each of its bytes after it was cut: its normalized text, and the places of its words.
const BYTES_PER_FOUND_BYTE: u64 = 64;
/// As [`BYTES_PER_FOUND_BYTE`], for the part of a window that only a long word fills.
const BYTES_PER_FOUND_WORD_BYTE: u64 = 16;
/// Memory of a decoding thread beside the blocks it is given: the touched part of its stack, and memory that the allocator keeps for it.
/// Measured over hostile texts: 0.39 to 0.59 MiB, and 0.2 MiB more in whole runs.
const THREAD_BYTES: u64 = 832 << 10;
/// Batches that one thread makes and another thread frees leave holes in the heaps of both. Over hostile texts up to 0.1 MiB beyond the other
/// bounds were measured.
const HOLES_BYTES: u64 = 128 << 10;

/// Memory of a loader with these options under these limits, without the dataset's own memory.
///
/// The largest values of the dataset count, not the usual ones: a batch may consist of the largest values alone.
pub fn costs(options: &LoaderOptions, limits: LoaderLimits, tokenizer: &Tokenizer, dataset: &Dataset) -> Vec<CostRow> {
    let batch_size = options.share.max_samples(options.batch_size) as u64;
    let (rows, targets) = match options.objective {
        // A list has many sources, with a target of one token each.
        Objective::Lists { most, .. } => (batch_size * most as u64, 0),
        _ => (batch_size, options.objective.samples_of_a_row()),
    };
    let tokens = (options.max_source_tokens + targets * options.max_target_tokens) as u64;
    let read = read_bytes_of(options, tokenizer);
    let columns = options.objective.columns();
    let largest = |number: usize| {
        let column = dataset.columns().iter().position(|name| *name == columns[number]);
        column.map_or(0, |column| dataset.largest_value_bytes(column))
    };
    let largest: Vec<u64> = (0..columns.len()).map(largest).collect();
    let texts = if options.keep_texts { largest[target_column(largest.len())].min(KEPT_TEXT_BYTES as u64) } else { 0 };
    let prompts = if options.keep_prompts && largest.len() > 1 { largest[0].min(KEPT_TEXT_BYTES as u64) } else { 0 };
    // A step of pairs has each source twice.
    let of_step = if targets > 1 { batch_bytes(2 * batch_size, tokens) } else { 0 };
    let batch_bytes = batch_bytes(rows, tokens) + batch_size * (texts + prompts);
    let prefetched = if limits.decode_threads == 0 { 0 } else { limits.prefetch_batches as u64 };
    // Without decoding threads the caller's own thread decodes; its stack and heap exist already.
    let threads = if prefetched == 0 { 0 } else { limits.decode_threads as u64 };
    let reading_bytes = rows_bytes(options, dataset, &read)
        + largest.iter().zip(&read).map(|(&largest, &read)| later_bytes(options, largest, read)).max().unwrap_or(0);
    let tokenizing_bytes = (0..columns.len())
        .map(|number| tokenizing_bytes(options, tokenizer, number, largest[number] + prefix_bytes(options, number)))
        .max()
        .unwrap_or(0);
    let row = |name, bytes| CostRow { name, bytes, is_held: false, is_until_made: false };
    vec![
        CostRow {
            is_held: true,
            ..row("tokenizer", tokenizer.vocab_size() as u64 * VOCABULARY_ENTRY_BYTES + TOKENIZER_BYTES)
        },
        row("batches", (prefetched + 1) * batch_bytes + of_step + threads * HOLES_BYTES),
        CostRow { is_until_made: threads == 0, ..row("reading", threads.max(1) * reading_bytes) },
        CostRow {
            is_until_made: threads == 0,
            ..row("tokenizing", threads.max(1) * tokenizing_bytes + threads * THREAD_BYTES)
        },
        row("remembered words", WORD_CACHE_BYTES + LOSSY_BYTES),
    ]
}

/// Bytes of a batch of the longest samples, as token ids.
pub const fn batch_bytes(samples: u64, tokens: u64) -> u64 {
    samples * (4 * tokens + SAMPLE_OVERHEAD_BYTES)
}

/// Memory of the rows that are read at a time, at most a batch, while they are put in order.
fn rows_bytes(options: &LoaderOptions, dataset: &Dataset, read: &[u64]) -> u64 {
    let most_of_a_value = read.iter().copied().max().unwrap_or(0);
    let samples = options.share.max_samples(options.batch_size);
    let of_batch = dataset.most_read_bytes(samples, most_of_a_value);
    let of_a_row = read.iter().sum();
    of_batch.min(MAX_READ_BYTES.max(of_a_row)) * 9 / 4 + 8 * (samples * read.len()) as u64
}

/// Memory of a further segment of a value of `largest` bytes, if only `read` bytes are read with its batch. A piece for span corruption
/// is read whole.
fn later_bytes(options: &LoaderOptions, largest: u64, read: u64) -> u64 {
    let is_read_on = options.objective.has_targets() && largest > read;
    if is_read_on { largest.min(SEGMENT_BYTES as u64) * 3 / 2 } else { 0 }
}

/// Bytes of the prefix of a column's texts.
fn prefix_bytes(options: &LoaderOptions, column: usize) -> u64 {
    if column == 0 { options.source_prefix.len() as u64 } else { 0 }
}

/// Memory for tokenizing a text of `largest` bytes.
fn tokenizing_bytes(options: &LoaderOptions, tokenizer: &Tokenizer, column: usize, largest: u64) -> u64 {
    let (max_tokens, text) = match column {
        _ if !options.objective.has_targets() => (usize::MAX, largest.min(MAX_PIECE_BYTES)),
        0 => (options.max_source_tokens, largest),
        _ => (options.max_target_tokens, largest),
    };
    // Each byte may be a token, and the vector of ids doubles as it grows.
    let ids = 3 * 4 * text.min((max_tokens as u64).saturating_add(1));
    // A byte tokenizer needs another vector, for blanks that may be at the end.
    let Some(word_byte) = tokenizer.word_byte_bytes() else { return 2 * ids };
    let windows = tokenizer.windows(max_tokens);
    let window = largest.min(windows.max_bytes() as u64);
    let cut = window.min(windows.usual_window_bytes() as u64);
    let word = largest.min(windows.word_bytes as u64);
    // A window is freed before its words are tokenized.
    let cutting = cut * BYTES_PER_WINDOW_BYTE + (window - cut) * BYTES_PER_WORD_BYTE;
    let found = cut * BYTES_PER_FOUND_BYTE + (window - cut) * BYTES_PER_FOUND_WORD_BYTE;
    cutting.max(found + word * word_byte) + ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Files, sample_tokenizer};

    fn bytes(prefetch_batches: usize, decode_threads: usize) -> u64 {
        let options = LoaderOptions { batch_size: 128, ..LoaderOptions::default() };
        let limits = LoaderLimits { prefetch_batches, decode_threads };
        let files = Files::new().with_squares(300, 100);
        costs(&options, limits, sample_tokenizer(), &files.open()).iter().map(|row| row.bytes).sum()
    }

    #[test]
    fn more_threads_and_a_longer_queue_cost_more_and_none_costs_least() {
        assert!(bytes(0, 0) < bytes(1, 1) && bytes(1, 1) < bytes(4, 1) && bytes(4, 1) < bytes(4, 2));
        assert_eq!(bytes(0, 0), bytes(0, 4), "nothing is prefetched, so no thread starts");
        assert_eq!(bytes(0, 0), bytes(4, 0), "no thread prefetches");
    }

    #[test]
    fn a_queued_batch_is_priced_at_full_length() {
        assert_eq!(bytes(3, 1) - bytes(2, 1), 128 * (4 * 1024 + 96));
    }

    #[test]
    fn rows_are_let_go_once_a_batch_is_made_where_nobody_runs_ahead() {
        let until_made = |decode_threads| {
            let limits = LoaderLimits { prefetch_batches: 1, decode_threads };
            let files = Files::new().with_squares(300, 100);
            let rows = costs(&LoaderOptions::default(), limits, sample_tokenizer(), &files.open());
            rows.iter().filter(|row| row.is_until_made).map(|row| row.name).collect::<Vec<_>>()
        };
        assert_eq!([until_made(0), until_made(1)], [vec!["reading", "tokenizing"], vec![]]);
    }

    #[test]
    fn one_enormous_value_costs_a_bounded_amount_however_enormous_it_is() {
        let decoding = |value_bytes: usize| {
            let value = |bytes: usize| (Some(vec![b'x'; bytes]), Some(b"short".to_vec()));
            let mut rows: Vec<_> = (0..300).map(|_| value(20)).collect();
            rows[7] = value(value_bytes);
            let dataset = Files::new().with(&rows, 100).open();
            dataset.find_pages().unwrap();
            let options = LoaderOptions { batch_size: 32, ..LoaderOptions::default() };
            let limits = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
            costs(&options, limits, sample_tokenizer(), &dataset)[2..].iter().map(|row| row.bytes).sum::<u64>()
        };
        let (short, long, longer) = (decoding(20), decoding(3 << 20), decoding(30 << 20));
        assert!(short < long, "{short} {long}");
        assert_eq!(long, longer);
        assert!(longer < 10 << 20, "{longer}");
    }
}
