//! Texts of a stream in batches: a window of them is sorted by length and computed in batches of about the same number of tokens, so that
//! little is padded. Results have the order of the texts.

use dataloader::{Side, Tokenizer};
use memory_policy::{counted, plural};
use planner::AnswerBytes;
use t5::AnswerShape;

use crate::answers::inference::{Planned, Shape};
use crate::answers::prompts::{self, Limits};
use crate::failure::{Failure, Outcome};
use crate::screen::report;

/// The texts that are sorted together, in batches of texts of full length.
const BATCHES_SORTED_TOGETHER: usize = 16;

/// Makes the results of a batch from the tokens of each of its texts.
pub type Compute<'a, T> = &'a mut dyn FnMut(&[&[u32]]) -> Outcome<Vec<T>>;

/// The texts of a window.
pub fn window(batch_samples: usize) -> usize {
    batch_samples.max(1) * BATCHES_SORTED_TOGETHER
}

/// The computation on batches of texts, with `held` bytes for a window and its results.
pub fn shape(batch_samples: usize, max_source_tokens: usize, held: u64, within: Limits) -> Shape {
    let text = 2 * prompts::MAX_PROMPT_BYTES as u64 + within.bytes;
    Shape {
        prompts: planner::Reading { rows: held + text, batch: held },
        ..Shape::of_answers(batch_samples.max(1), max_source_tokens, AnswerShape::greedy(1))
    }
}

/// Refuses a limit that leaves no room for a token.
pub fn check_length(max_source_tokens: usize) -> Outcome<()> {
    if max_source_tokens < 2 {
        return Err(Failure::usage("`--max-source-tokens`: expected at least 2, for one token and EOS"));
    }
    Ok(())
}

/// Makes tokens of texts, and counts them.
pub struct Sources<'a> {
    tokenizer: &'a Tokenizer,
    prefix: &'a str,
    eos: Option<u32>,
    max_tokens: usize,
    texts: u64,
    /// The tokens of all texts.
    pub tokens: u64,
    /// The number of texts that were cut, and the first of them, counted from 1.
    pub cut: (u64, Option<u64>),
}

impl<'a> Sources<'a> {
    /// Before the first text. `prefix` is put before each.
    pub fn new(tokenizer: &'a Tokenizer, prefix: &'a str, config: &t5::Config, max_tokens: usize) -> Self {
        let eos = config.eos_token_ids.first().copied();
        Self { tokenizer, prefix, eos, max_tokens, texts: 0, tokens: 0, cut: (0, None) }
    }

    /// The tokens of a text, with EOS.
    pub fn source(&mut self, text: &str) -> Outcome<Vec<u32>> {
        let side = self.tokenizer.truncation_side().unwrap_or(Side::Right);
        let (mut ids, is_cut) = self.tokenizer.encode_prompt(self.prefix, text, self.max_tokens - 1, side)?;
        ids.extend(self.eos);
        self.tokens += ids.len() as u64;
        self.texts += 1;
        if is_cut {
            self.cut = (self.cut.0 + 1, self.cut.1.or(Some(self.texts)));
        }
        Ok(ids)
    }

    /// Says how many texts were cut.
    pub fn note_cut(&self) {
        if let (cut, Some(first)) = self.cut {
            report::note(&format!(
                "{} of {} had more than {} tokens and were cut; the first is text {}; `--max-source-tokens N` reads more",
                counted(cut),
                plural(self.texts, "text"),
                self.max_tokens,
                counted(first)
            ));
        }
    }
}

/// The room for a batch: that of the planned one.
pub struct Room {
    bytes: AnswerBytes,
    /// The planned batch: its samples, and their tokens.
    most: (usize, usize),
}

impl Room {
    /// The bytes that a plan leaves for texts of at most `max_source_tokens` tokens.
    pub fn left_by(planned: &Planned, max_source_tokens: usize) -> Outcome<Self> {
        Ok(Self {
            bytes: planned.answer_bytes()?,
            most: (planned.plan.step.evaluation_samples.max(1), max_source_tokens),
        })
    }

    /// The tokens of the planned batch.
    pub fn tokens(&self) -> (usize, usize) {
        self.most
    }

    /// How many texts of this many tokens take at most the bytes of the planned batch.
    fn samples(&self, tokens: usize) -> usize {
        let (samples, longest) = self.most;
        let bytes = |samples, tokens| self.bytes.count(samples, tokens, AnswerShape::greedy(1));
        let most = bytes(samples, longest);
        let mut many = samples * longest / tokens.max(1);
        while many > samples && bytes(many, tokens) > most {
            many = (many * 7 / 8).max(samples);
        }
        many
    }

    /// The results for some sources in their order, `width` values for each, of `compute` for each batch.
    ///
    /// # Errors
    /// Of `compute`; a value that is not finite, because some weight is too large.
    pub fn compute<T: Copy + Default + Into<f64>>(
        &self,
        sources: &[&[u32]],
        width: usize,
        compute: Compute<'_, T>,
    ) -> Outcome<Vec<T>> {
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&row| std::cmp::Reverse(sources[row].len()));
        let mut results = vec![T::default(); sources.len() * width];
        let mut rest = order.as_slice();
        while let Some(&longest) = rest.first() {
            let (batch, later) = rest.split_at(self.samples(sources[longest].len()).min(rest.len()));
            let of_batch: Vec<&[u32]> = batch.iter().map(|&row| sources[row]).collect();
            for (&row, result) in batch.iter().zip(compute(&of_batch)?.chunks(width)) {
                if result.iter().any(|&value| !value.into().is_finite()) {
                    return Err(Failure::unusable("the model gives a text values that are not finite").hint(
                        "a weight is too large, or damaged: fetch the model again; if training wrote it, take an earlier checkpoint",
                    ));
                }
                results[row * width..][..width].copy_from_slice(result);
            }
            rest = later;
        }
        Ok(results)
    }
}
