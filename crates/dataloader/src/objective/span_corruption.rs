//! Span corruption, the T5 paper's pretraining objective (Raffel et al., JMLR 2020, section 3.1.4 and 3.3.4).
//!
//! 15 % of a text's tokens are cut out, in spans of 3 tokens on average. The source is the text with each span replaced
//! by a sentinel of its own. The target is each sentinel followed by its span. Both end with the end-of-sequence token:
//!
//! ```text
//! text    Thank you for inviting me to your party last week
//! source  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
//! target  <extra_id_0> for inviting <extra_id_1> last </s>
//! ```
//!
//! The mask and the lengths follow `random_spans_noise_mask` and `random_spans_helper` in
//! google-research/text-to-text-transfer-transformer, `t5/data/preprocessors.py`. The text length is chosen so that the
//! source of a full text has exactly `max_source_tokens`; nothing is padded and nothing is cut. Like that code and
//! unlike the paper's figure, the target has no closing sentinel.
//!
//! Two rules are ours. First, a row is one text: rows are not joined. From a longer text, each epoch takes one window
//! of the full length, drawn uniformly among all windows. So training eventually sees every part of a long text, and
//! every row still gives one sample an epoch. (From a text above 256 KiB, a random piece of that size is tokenized and
//! the window is drawn from the piece.) Second, where the target would exceed `max_target_tokens`, texts are shortened
//! until it fits. Spans and windows are functions of (seed, epoch, row).

use std::ops::Range;

use super::{Sample, SampleLimits};
use crate::Error;
use crate::random::{Key, Stream};

/// Parameters of the spans. The default is the T5 paper's.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SpanCorruption {
    /// The fraction of the tokens that is cut out, between 0 and 1.
    pub noise_density: f64,
    /// Average tokens of a span.
    pub mean_span_tokens: f64,
}

impl Default for SpanCorruption {
    fn default() -> Self {
        Self { noise_density: 0.15, mean_span_tokens: 3.0 }
    }
}

/// The number of tokens to cut out of `length` (at least two), and the number of spans that they form. Both are at
/// least one.
///
/// Halves round to even, as in Python and TensorFlow.
fn noise_tokens_and_spans(length: usize, spans: SpanCorruption) -> (usize, usize) {
    let noise = (length as f64 * spans.noise_density).round_ties_even() as usize;
    let noise = noise.clamp(1, length - 1);
    let count = (noise as f64 / spans.mean_span_tokens).round_ties_even() as usize;
    // The original permits more spans than kept tokens and then fails; high densities need the bound.
    (noise, count.clamp(1, noise.min(length - noise)))
}

/// The text length that fills a source of `max_source_tokens` exactly, and the length of its target. Both source and
/// target include their end-of-sequence token. (`random_spans_helper`, which differs below ten tokens: it forgets there
/// that a text always loses a span.)
pub fn tokens_and_targets_length(max_source_tokens: usize, spans: SpanCorruption) -> (usize, usize) {
    let lengths = |tokens: usize| {
        let (noise, count) = noise_tokens_and_spans(tokens, spans);
        (tokens - noise + count + 1, noise + count + 1)
    };
    let mut tokens = (max_source_tokens - 1).max(2);
    while lengths(tokens + 1).0 <= max_source_tokens {
        tokens += 1;
    }
    let mut target = lengths(tokens).1;
    if spans.noise_density == 0.5 && target > lengths(tokens).0 {
        // The original's correction, which makes both lengths equal.
        tokens -= 1;
        target -= 1;
    }
    (tokens, target)
}

/// Draws the tokens to cut out of `length` tokens. Kept and cut spans alternate, beginning with a kept span; every such
/// mask is equally likely. (`random_spans_noise_mask`)
///
/// A single token is never cut out.
pub fn noise_mask(length: usize, spans: SpanCorruption, stream: &mut Stream) -> Vec<bool> {
    let mended_length = length.max(2);
    let (noise, count) = noise_tokens_and_spans(mended_length, spans);
    let kept = mended_length - noise;
    let noise_spans = random_segmentation(noise, count, stream);
    let kept_spans = random_segmentation(kept, count, stream);
    let mut mask = Vec::with_capacity(mended_length);
    for (kept, noise) in kept_spans.into_iter().zip(noise_spans) {
        mask.resize(mask.len() + kept, false);
        mask.resize(mask.len() + noise, true);
    }
    mask.truncate(length);
    mask
}

/// Lengths of `segments` non-empty segments that partition `items`, every partition equally likely.
fn random_segmentation(items: usize, segments: usize, stream: &mut Stream) -> Vec<usize> {
    // Choose which items, except the first, begin a segment: selection sampling (Knuth, TAOCP 2, 3.4.2, S).
    let mut lengths = Vec::with_capacity(segments);
    let mut length = 1;
    let mut to_choose = segments - 1;
    for left in (1..items).rev() {
        if stream.below(left as u64) < to_choose as u64 {
            to_choose -= 1;
            lengths.push(length);
            length = 0;
        }
        length += 1;
    }
    lengths.push(length);
    lengths
}

/// Span corruption with its lengths computed.
pub(crate) struct Prepared {
    spans: SpanCorruption,
    /// Most tokens of a text.
    tokens_length: usize,
    eos_id: u32,
    sentinels: Vec<u32>,
}

/// From a longer text, a piece of this size is drawn before reading and tokenizing, which bounds the cost of a row.
const MAX_TEXT_BYTES: u64 = 256 << 10;
/// The most bytes of a text that are read: a piece, which may begin up to three bytes later, at a character border.
pub(crate) const MAX_PIECE_BYTES: u64 = MAX_TEXT_BYTES + 3;

/// Separate the random choices of a row.
pub(super) const WINDOW: u64 = 0;
const SPANS: u64 = 1;
const PIECE: u64 = 2;

/// The byte range to read of a text of `bytes` bytes: the whole text, or a random piece if it exceeds
/// [`MAX_TEXT_BYTES`].
pub(crate) fn piece(bytes: u64, key: Key) -> Range<u64> {
    if bytes <= MAX_TEXT_BYTES {
        return 0..bytes;
    }
    let start = key.derive(PIECE).stream().below(bytes - MAX_TEXT_BYTES + 1);
    start..bytes.min(start + MAX_PIECE_BYTES)
}

/// The read part of a text of `bytes` bytes, without characters that are cut off at either end.
pub(crate) fn within_characters(read: &[u8], piece: Range<u64>, bytes: u64) -> &[u8] {
    if bytes <= MAX_TEXT_BYTES {
        return read;
    }
    let is_inside = |byte: &&u8| **byte & 0xc0 == 0x80;
    let start = if piece.start == 0 { 0 } else { read.iter().take(3).take_while(is_inside).count() };
    let mut end = read.len().min(start + MAX_TEXT_BYTES as usize);
    if piece.start + (end as u64) < bytes {
        // The byte after the end shows whether a character is cut; at most three of its bytes come before.
        let is_cut = |end: usize| read.get(end).is_some_and(|byte| is_inside(&byte));
        for _ in 0..3 {
            end -= usize::from(end > start && is_cut(end));
        }
    }
    &read[start..end]
}

impl Prepared {
    pub fn new(spans: SpanCorruption, limits: SampleLimits, sentinels: &[u32]) -> Result<Self, Error> {
        let SpanCorruption { noise_density, mean_span_tokens } = spans;
        if !(noise_density > 0.0 && noise_density < 1.0 && (1.0..=1e6).contains(&mean_span_tokens)) {
            return Err(Error::Options(format!(
                "span corruption with noise density {noise_density} and mean span {mean_span_tokens}: \
                 expected a density between 0 and 1 and a span of at least 1"
            )));
        }
        let (mut tokens_length, _) = tokens_and_targets_length(limits.max_source_tokens, spans);
        let target_tokens = |tokens: usize| {
            let (noise, count) = noise_tokens_and_spans(tokens, spans);
            noise + count + 1
        };
        while tokens_length > 2 && target_tokens(tokens_length) > limits.max_target_tokens {
            tokens_length -= 1;
        }
        let (_, spans_needed) = noise_tokens_and_spans(tokens_length, spans);
        for (key, tokens) in
            [("data.max_source_tokens", limits.max_source_tokens), ("data.max_target_tokens", limits.max_target_tokens)]
        {
            if tokens < 3 {
                return Err(Error::Options(format!("`{key}` is {tokens}: span corruption needs at least 3")));
            }
        }
        if sentinels.len() < spans_needed {
            return Err(Error::Options(format!(
                "span corruption of {tokens_length} tokens needs up to {spans_needed} sentinels, but the tokenizer has {} \
                 sentinels: expected <extra_id_0> to <extra_id_{}>",
                sentinels.len(),
                spans_needed - 1
            )));
        }
        Ok(Self { spans, tokens_length, eos_id: limits.eos_id, sentinels: sentinels.to_vec() })
    }

    /// Corrupts `text`. `key` is the row's in this epoch.
    pub fn sample(&self, text: &[u32], key: Key) -> Sample {
        let length = text.len().min(self.tokens_length);
        let start = key.derive(WINDOW).stream().below((text.len() - length) as u64 + 1) as usize;
        let text = &text[start..start + length];
        let mask = noise_mask(length, self.spans, &mut key.derive(SPANS).stream());
        Sample {
            source: self.replace(text, &mask, true),
            target: self.replace(text, &mask, false),
            ..Sample::default()
        }
    }

    /// Returns the text with each run of tokens whose mask is `replaced` turned into the next sentinel.
    fn replace(&self, text: &[u32], mask: &[bool], replaced: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() + 2);
        let mut sentinels = self.sentinels.iter();
        let mut is_within = false;
        for (&id, &is_noise) in text.iter().zip(mask) {
            if is_noise != replaced {
                ids.push(id);
            } else if !is_within {
                ids.push(*sentinels.next().expect("the number of spans was checked"));
            }
            is_within = is_noise == replaced;
        }
        ids.push(self.eos_id);
        ids.shrink_to_fit();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAPER: SpanCorruption = SpanCorruption { noise_density: 0.15, mean_span_tokens: 3.0 };

    fn limits(max_source_tokens: usize, max_target_tokens: usize) -> SampleLimits {
        SampleLimits { max_source_tokens, max_target_tokens, eos_id: 1, decoder_start_id: None }
    }

    fn prepared(max_source_tokens: usize, max_target_tokens: usize) -> Prepared {
        let sentinels: Vec<u32> = (0..100).map(|number| 32_099 - number).collect();
        Prepared::new(PAPER, limits(max_source_tokens, max_target_tokens), &sentinels).unwrap()
    }

    fn key(row: u64) -> Key {
        Key::new(3).derive(row)
    }

    #[test]
    fn lengths_are_those_of_the_original_code() {
        // From `random_spans_helper(inputs_length, 0.15, 3.0, 1, 1)`.
        for (source, expected) in [(512, (568, 114)), (256, (284, 58)), (128, (141, 29)), (64, (70, 14)), (32, (34, 8))]
        {
            assert_eq!(tokens_and_targets_length(source, PAPER), expected, "source of {source}");
        }
    }

    #[test]
    fn a_full_text_fills_the_source_exactly_and_the_target_as_computed() {
        for max_source_tokens in 4..=512 {
            let (tokens, target) = tokens_and_targets_length(max_source_tokens, PAPER);
            let text: Vec<u32> = (100..100 + tokens as u32).collect();
            let sample = prepared(max_source_tokens, 512).sample(&text, key(max_source_tokens as u64));
            assert_eq!((sample.source.len(), sample.target.len()), (max_source_tokens, target));
        }
    }

    #[test]
    fn source_and_target_together_are_the_text() {
        let text: Vec<u32> = (100..180).collect();
        let sample = prepared(128, 64).sample(&text, key(9));
        let spans = |ids: &[u32]| -> Vec<Vec<u32>> {
            let body = &ids[..ids.len() - 1];
            body.split(|&id| id > 32_000 - 100).map(<[u32]>::to_vec).collect()
        };
        let (kept, noise) = (spans(&sample.source), spans(&sample.target));
        let mut rebuilt: Vec<u32> = Vec::new();
        for (number, kept) in kept.iter().enumerate() {
            rebuilt.extend(kept);
            rebuilt.extend(noise.get(number + 1).into_iter().flatten());
        }
        assert_eq!(rebuilt, text);
        assert_eq!(sample.target[0], 32_099, "the first sentinel is <extra_id_0>");
        assert_eq!((sample.source.last(), sample.target.last()), (Some(&1), Some(&1)));
    }

    #[test]
    fn a_short_target_limit_shortens_the_text_instead_of_cutting_the_target() {
        let text: Vec<u32> = (100..668).collect();
        for max_target_tokens in 3..=114 {
            let sample = prepared(512, max_target_tokens).sample(&text, key(1));
            assert!(sample.target.len() <= max_target_tokens);
            assert!(
                max_target_tokens < 6 || sample.target.len() + 2 >= max_target_tokens,
                "target {max_target_tokens}"
            );
        }
    }

    #[test]
    fn windows_of_a_long_text_are_drawn_uniformly() {
        let prepared = prepared(32, 32);
        let text: Vec<u32> = (100..100 + 34 + 9).collect();
        let mut counts = [0_u32; 10];
        for row in 0..10_000 {
            // The first token of a window is always kept.
            counts[prepared.sample(&text, key(row)).source[0] as usize - 100] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(1000) < 150), "{counts:?}");
    }

    #[test]
    fn a_piece_of_an_enormous_text_is_drawn_before_tokenizing() {
        let text = "天地人".repeat(100_000);
        let of = |text: &'static str, row| {
            let range = piece(text.len() as u64, key(row));
            let read = &text.as_bytes()[range.start as usize..range.end as usize];
            std::str::from_utf8(within_characters(read, range, text.len() as u64)).unwrap()
        };
        let text: &'static str = text.leak();
        let pieces: Vec<&str> = (0..40).map(|row| of(text, row)).collect();
        let most = MAX_TEXT_BYTES as usize;
        assert!(pieces.iter().all(|piece| (most - 4..=most).contains(&piece.len())));
        assert!(pieces.iter().any(|piece| !piece.starts_with('天')), "pieces start anywhere");
        assert_eq!(of("short", 0), "short");
    }

    #[test]
    fn texts_of_one_or_two_tokens_are_samples_too() {
        assert_eq!(prepared(64, 64).sample(&[7], key(0)).source, [7, 1]);
        assert_eq!(prepared(64, 64).sample(&[7], key(0)).target, [32_099, 1]);
        assert_eq!(prepared(64, 64).sample(&[7, 8], key(0)).source, [7, 32_099, 1]);
        assert_eq!(prepared(64, 64).sample(&[7, 8], key(0)).target, [32_099, 8, 1]);
    }

    #[test]
    fn too_few_sentinels_and_impossible_spans_are_refused() {
        assert!(Prepared::new(PAPER, limits(512, 512), &[9, 8, 7]).is_err());
        assert!(Prepared::new(PAPER, limits(64, 2), &[9; 100]).is_err());
        for (noise_density, mean_span_tokens) in [(0.0, 3.0), (1.0, 3.0), (0.15, 0.5), (f64::NAN, 3.0), (0.1, f64::NAN)]
        {
            let spans = SpanCorruption { noise_density, mean_span_tokens };
            assert!(Prepared::new(spans, limits(64, 64), &[9; 100]).is_err(), "{spans:?}");
        }
    }

    #[test]
    fn every_partition_is_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        let mut stream = Key::new(1).stream();
        for _ in 0..20_000 {
            *counts.entry(random_segmentation(6, 3, &mut stream)).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 10);
        assert!(counts.values().all(|count| count.abs_diff(2000) < 250), "{counts:?}");
    }

    proptest! {
        #[test]
        fn masks_have_the_promised_number_of_tokens_and_spans(length in 2_usize..600, row: u64) {
            let mask = noise_mask(length, PAPER, &mut key(row).stream());
            let noise = ((length as f64 * 0.15).round_ties_even() as usize).clamp(1, length - 1);
            let spans = ((noise as f64 / 3.0).round_ties_even() as usize).max(1);
            prop_assert_eq!(mask.len(), length);
            prop_assert_eq!(mask.iter().filter(|&&is_noise| is_noise).count(), noise);
            prop_assert_eq!(mask.windows(2).filter(|pair| !pair[0] && pair[1]).count(), spans);
            prop_assert!(!mask[0] && mask[length - 1], "begins kept, ends cut");
        }

        #[test]
        fn any_density_gives_a_valid_mask(length in 1_usize..200, density in 0.01..0.99, mean in 1.0..20.0, row: u64) {
            let spans = SpanCorruption { noise_density: density, mean_span_tokens: mean };
            prop_assert_eq!(noise_mask(length, spans, &mut key(row).stream()).len(), length);
        }

        #[test]
        fn nothing_exceeds_its_limit(tokens in 1_usize..700, source in 3_usize..200, target in 3_usize..200, row: u64) {
            let text: Vec<u32> = (100..100 + tokens as u32).collect();
            let sample = prepared(source, target).sample(&text, key(row));
            prop_assert!(sample.source.len() <= source && sample.target.len() <= target);
        }
    }
}
