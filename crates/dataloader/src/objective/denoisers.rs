//! Denoisers: ways to make a source and a target of one text. A mixture of them is UL2's pretraining (Tay et al., 2022, arXiv 2205.05131).
//!
//! A row draws one denoiser by their weights, in each epoch anew. The denoiser's prefix begins the source. Then the text is corrupted
//! ([`SpanCorruption`](super::SpanCorruption)), or cut in two ([`Noise::PrefixLm`]):
//!
//! ```text
//! text    Thank you for inviting me to your party
//! source  [S] Thank you for </s>
//! target  inviting me to your party </s>
//! ```
//!
//! Of a prefix language model, every place for the cut is equally likely, as in `prefix_lm` of google-research/text-to-text-transfer-transformer,
//! or the target has a fixed share of the text, as UL2's S-denoiser. From a text that is longer than source and target together, each epoch
//! takes one window. Nothing is cut off. Denoiser, window and place are functions of (seed, epoch, row).

use super::span_corruption::{self, SpanCorruption, WINDOW};
use super::{Sample, SampleLimits};
use crate::random::Key;
use crate::{Error, Tokenizer};

/// One denoiser.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Denoiser {
    /// What it does with a text.
    #[serde(flatten)]
    pub noise: Noise,
    /// The text before each source; may be empty.
    pub prefix: String,
    /// How often it is drawn, beside the others' weights.
    pub weight: f64,
}

/// How a source and a target are made of a text.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "noise", rename_all = "kebab-case")]
pub enum Noise {
    /// Spans are cut out.
    SpanCorruption(SpanCorruption),
    /// The target continues the source.
    PrefixLm {
        /// The share of the text that is the target; `None`: any.
        noise_density: Option<f64>,
    },
}

impl Denoiser {
    /// T5's own task alone.
    pub fn spans(spans: SpanCorruption) -> Self {
        Self { noise: Noise::SpanCorruption(spans), prefix: String::new(), weight: 1.0 }
    }
}

/// Denoisers with everything computed that does not depend on a row.
pub(crate) struct Prepared(Vec<One>);

struct One {
    /// The weights of this denoiser and of those before it.
    up_to: f64,
    /// Tokens of the prefix.
    start: Vec<u32>,
    noise: PreparedNoise,
}

enum PreparedNoise {
    Spans(span_corruption::Prepared),
    Prefix(PrefixLm),
}

/// A prefix language model with its lengths computed.
struct PrefixLm {
    limits: SampleLimits,
    /// The share of a text that is the target; `None`: any.
    density: Option<f64>,
    /// The most tokens of a text of which neither part is too long.
    most: usize,
}

impl PrefixLm {
    fn new(limits: SampleLimits, density: Option<f64>) -> Self {
        let (source, target) = (limits.max_source_tokens - 1, limits.max_target_tokens - 1);
        let fits = |length: &usize| {
            density.is_none_or(|density| {
                let of_target = target_tokens(*length, density);
                of_target <= target && length - of_target <= source
            })
        };
        let most = (2..=source + target).rev().find(fits).unwrap_or(2);
        Self { limits, density, most }
    }

    /// The first part of a text as source, and the rest as target.
    fn sample(&self, text: &[u32], key: Key) -> Sample {
        let (source, target) = (self.limits.max_source_tokens - 1, self.limits.max_target_tokens - 1);
        let length = text.len().min(self.most);
        let start = key.derive(WINDOW).stream().below((text.len() - length) as u64 + 1) as usize;
        let text = &text[start..start + length];
        let place = match self.density {
            _ if length < 2 => length,
            Some(density) => length - target_tokens(length, density),
            None => {
                let (least, most) = (length.saturating_sub(target).max(1), source.min(length - 1));
                least + key.derive(PLACE).stream().below((most - least) as u64 + 1) as usize
            }
        };
        let with_end = |ids: &[u32]| {
            let mut with_end = Vec::with_capacity(ids.len() + 1);
            with_end.extend_from_slice(ids);
            with_end.push(self.limits.eos_id);
            with_end
        };
        Sample { source: with_end(&text[..place]), target: with_end(&text[place..]), ..Sample::default() }
    }
}

/// Separate the random choices of a row from those of [`span_corruption`].
const DENOISER: u64 = 3;
const PLACE: u64 = 4;

impl Prepared {
    pub fn new(denoisers: &[Denoiser], limits: SampleLimits, tokenizer: &Tokenizer) -> Result<Self, Error> {
        let mut up_to = 0.0;
        let prepare = |denoiser: &Denoiser| {
            let problem = |problem: String| Error::Options(format!("`data.denoisers`: {problem}"));
            up_to += denoiser.weight;
            let start = match denoiser.prefix.as_str() {
                "" => Vec::new(),
                prefix => tokenizer
                    .encode(prefix)
                    .map_err(|error| problem(format!("prefix `{}`: {error}", prefix.escape_debug())))?,
            };
            // Without a prefix the task itself refuses a length that is too small.
            let has_room = |left: &usize| *left >= 3 || start.is_empty();
            let Some(source) = limits.max_source_tokens.checked_sub(start.len()).filter(has_room) else {
                let (prefix, tokens) = (denoiser.prefix.escape_debug(), start.len());
                return Err(problem(format!(
                    "the prefix `{prefix}` has {tokens} tokens and `data.max_source_tokens` is {}: expected at least 3 more",
                    limits.max_source_tokens
                )));
            };
            let limits = SampleLimits { max_source_tokens: source, ..limits };
            let noise = match denoiser.noise {
                Noise::SpanCorruption(spans) => {
                    PreparedNoise::Spans(span_corruption::Prepared::new(spans, limits, &tokenizer.sentinels())?)
                }
                Noise::PrefixLm { noise_density } => PreparedNoise::Prefix(PrefixLm::new(limits, noise_density)),
            };
            Ok(One { up_to, start, noise })
        };
        let all = denoisers.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        assert!(up_to > 0.0, "no denoiser is ever drawn");
        Ok(Self(all))
    }

    /// Makes the sample of a text. `key` is the row's in this epoch.
    pub fn sample(&self, text: &[u32], key: Key) -> Sample {
        let one = self.drawn(key);
        let mut sample = match &one.noise {
            PreparedNoise::Spans(spans) => spans.sample(text, key),
            PreparedNoise::Prefix(prefix_lm) => prefix_lm.sample(text, key),
        };
        sample.source.reserve_exact(one.start.len()); // The bill counts the bytes of ids that wait in the queue.
        sample.source.splice(0..0, one.start.iter().copied());
        sample
    }

    fn drawn(&self, key: Key) -> &One {
        let total = self.0.last().map_or(0.0, |one| one.up_to);
        // 53 bits are all that a number has.
        let place = (key.derive(DENOISER).stream().bits() >> 11) as f64 / (1u64 << 53) as f64 * total;
        let drawn = self.0.iter().find(|one| place < one.up_to);
        drawn.or(self.0.iter().rfind(|one| one.up_to == total)).unwrap_or(&self.0[0])
    }
}

/// The tokens of the target of `length` tokens, at least two.
fn target_tokens(length: usize, density: f64) -> usize {
    ((length as f64 * density).round_ties_even() as usize).clamp(1, length - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_tokenizer;

    const LIMITS: SampleLimits =
        SampleLimits { max_source_tokens: 20, max_target_tokens: 9, eos_id: 1, decoder_start_id: None };

    fn key(row: u64) -> Key {
        Key::new(5).derive(row)
    }

    fn ids(count: u32) -> Vec<u32> {
        (100..100 + count).collect()
    }

    #[test]
    fn both_parts_together_are_a_window_of_the_text_and_fit() {
        for density in [None, Some(0.25), Some(0.9)] {
            let mut places = std::collections::BTreeSet::new();
            for row in 0..300 {
                let text = ids(2 + row % 60);
                let Sample { source, target, .. } = PrefixLm::new(LIMITS, density).sample(&text, key(u64::from(row)));
                assert_eq!((source.last(), target.last()), (Some(&1), Some(&1)));
                let (source, target) = (&source[..source.len() - 1], &target[..target.len() - 1]);
                let both = [source, target].concat();
                assert!(text.windows(both.len()).any(|window| window == both), "{both:?}");
                assert!((1..=19).contains(&source.len()) && (1..=8).contains(&target.len()), "{source:?} {target:?}");
                if text.len() <= 20 && density.is_none() {
                    assert_eq!(both, text);
                }
                places.insert((source.len(), target.len()));
            }
            assert!(density.is_some() || places.len() > 40, "{places:?}");
        }
        assert_eq!(target_tokens(40, 0.25), 10);
        for text in [ids(0), ids(1)] {
            let sample = PrefixLm::new(LIMITS, None).sample(&text, key(0));
            assert_eq!((sample.source.len(), sample.target), (text.len() + 1, vec![1]));
        }
    }

    #[test]
    fn denoisers_are_drawn_by_their_weights_anew_in_each_epoch_and_their_prefix_begins_the_source() {
        let prefix = |noise_density, weight| Denoiser {
            noise: Noise::PrefixLm { noise_density: Some(noise_density) },
            prefix: if noise_density > 0.2 { "s".to_owned() } else { String::new() },
            weight,
        };
        let never = Denoiser { weight: 0.0, ..Denoiser::spans(SpanCorruption::default()) };
        let mixture = [prefix(0.1, 1.0), never.clone(), prefix(0.5, 3.0), never];
        let tokenizer = sample_tokenizer();
        let prepared = Prepared::new(&mixture, LIMITS, tokenizer).unwrap();
        let start = tokenizer.encode("s").unwrap();
        let text = ids(10);
        let drawn = |epoch: u64| -> Vec<bool> {
            let of_row = |row: u64| {
                let sample = prepared.sample(&text, key(epoch).derive(row));
                let is_half = sample.target.len() == 6;
                assert_eq!(sample.source.starts_with(&start), is_half);
                assert_eq!(sample.source.len() - usize::from(is_half) * start.len() + sample.target.len(), 12);
                assert_eq!(sample.source.capacity(), sample.source.len());
                is_half
            };
            (0..4000).map(of_row).collect()
        };
        let (first, second) = (drawn(0), drawn(1));
        let halves = first.iter().filter(|is_half| **is_half).count();
        assert!(halves.abs_diff(3000) < 120, "{halves}");
        assert!(first == drawn(0) && first != second);
    }

    #[test]
    fn a_length_that_is_too_small_is_refused_by_its_task() {
        let small = SampleLimits { max_source_tokens: 2, ..LIMITS };
        let of = |denoiser| Prepared::new(&[denoiser], small, sample_tokenizer());
        let error = of(Denoiser::spans(SpanCorruption::default())).err().expect("too small").to_string();
        assert!(error.contains("`data.max_source_tokens` is 2: span corruption needs at least 3"), "{error}");
        let continued = Noise::PrefixLm { noise_density: None };
        let continued =
            of(Denoiser { noise: continued, prefix: String::new(), weight: 1.0 }).expect("one token and EOS");
        assert_eq!(continued.sample(&ids(9), key(0)).source.len(), 2);
    }

    #[test]
    fn a_prefix_without_room_is_refused_by_name() {
        let denoiser = Denoiser { prefix: "a long prefix ".repeat(30), ..Denoiser::spans(SpanCorruption::default()) };
        let error = Prepared::new(&[denoiser], LIMITS, sample_tokenizer()).err().expect("no room").to_string();
        assert!(error.contains("`data.max_source_tokens` is 20: expected at least 3 more"), "{error}");
    }
}
