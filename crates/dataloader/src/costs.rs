//! What the loader costs in bytes, as rows of a bill. Pure functions of shapes.

use crate::objective::tokenized_bytes;
use crate::{CACHED_WORDS, LoaderLimits, LoaderOptions, Tokenizer};

/// One row of the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostRow {
    /// What the bytes are for.
    pub name: &'static str,
    /// An upper bound for ids, an estimate for the tokenizer.
    pub bytes: u64,
}

/// Two vectors and the allocator's share of each, beside the ids.
const SAMPLE_OVERHEAD_BYTES: u64 = 96;
/// A token in the tokenizer's tables: its text twice, its id, its merge. Measured: 585 bytes a token between
/// byte-level vocabularies of 4,096 and 29,298 tokens of Chinese and English.
const VOCABULARY_ENTRY_BYTES: u64 = 600;
/// What a tokenizer takes beside its tokens: its compiled pattern. Measured, 3.7 MiB with the same two.
const TOKENIZER_BYTES: u64 = 4 << 20;
/// A remembered word: its text and the symbols that it was merged from. 0.3 KiB in English, 4 KiB for a Chinese clause,
/// 8 KiB for the longest that is remembered.
const CACHED_WORD_BYTES: u64 = 2 << 10;
/// While a text is tokenized every byte has its alignment, and every token its text and offsets.
const BYTES_PER_TEXT_BYTE: u64 = 100;
/// Stack that a decoding thread touches, what the allocator keeps for it, and the tables that the pattern
/// builds up in each thread, which the regex crate bounds.
const THREAD_BYTES: u64 = 1 << 20;

/// What a loader with these options costs under these limits, without what the dataset itself holds.
///
/// `mean_row_bytes` is the size of a row's texts on average.
pub fn costs(
    options: &LoaderOptions,
    limits: LoaderLimits,
    tokenizer: &Tokenizer,
    mean_row_bytes: u64,
) -> Vec<CostRow> {
    let batch_size = options.batch_size as u64;
    let tokens = (options.max_source_tokens + options.max_target_tokens) as u64;
    let texts = if options.keep_texts { mean_row_bytes } else { 0 };
    let batch_bytes = batch_size * (4 * tokens + SAMPLE_OVERHEAD_BYTES + texts);
    let prefetched = if limits.decode_threads == 0 { 0 } else { limits.prefetch_batches as u64 };
    // The caller's own thread decodes when no other does; its stack and heap are there already.
    let threads = if prefetched == 0 { 0 } else { limits.decode_threads as u64 };
    // The rows as read and once more in batch order, and the text in work, which may be far longer than the mean.
    let longest = options.max_source_tokens.max(options.max_target_tokens);
    let text_bytes = tokenized_bytes(&options.objective, longest).min(16 * mean_row_bytes);
    let decoder_bytes =
        2 * batch_size * mean_row_bytes + text_bytes * BYTES_PER_TEXT_BYTE + CACHED_WORDS as u64 * CACHED_WORD_BYTES;
    vec![
        CostRow { name: "tokenizer", bytes: tokenizer.vocab_size() as u64 * VOCABULARY_ENTRY_BYTES + TOKENIZER_BYTES },
        CostRow { name: "batches", bytes: (prefetched + 1) * batch_bytes },
        CostRow { name: "decoding", bytes: threads.max(1) * decoder_bytes + threads * THREAD_BYTES },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_tokenizer;

    fn bytes(prefetch_batches: usize, decode_threads: usize) -> u64 {
        let options = LoaderOptions { batch_size: 128, ..LoaderOptions::default() };
        let limits = LoaderLimits { prefetch_batches, decode_threads };
        costs(&options, limits, sample_tokenizer(), 400).iter().map(|row| row.bytes).sum()
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
}
