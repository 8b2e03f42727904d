//! Options of generation.

use candle_core::DType;

use super::beams::Beams;
use super::processors::Processors;
use super::sampling::Sampling;
use crate::config::Config;
use crate::error::{Error, Result};

/// Options of generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens generated for a source, EOS included.
    pub max_new_tokens: usize,
    /// Dtype in which activations are computed and cached.
    pub activations: DType,
    /// Rules that forbid tokens or make them less likely.
    pub processors: Processors,
    /// How tokens are chosen.
    pub search: Search,
    /// Answers to each source.
    pub sequences: usize,
    /// Whether answers have a score even without beam search.
    pub scores: bool,
    /// Without beam search: each token has its log-probability, and those of this many of the likeliest tokens.
    pub logprobs: Option<usize>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_new_tokens: 128,
            activations: DType::F32,
            processors: Processors::default(),
            search: Search::Greedy,
            sequences: 1,
            scores: false,
            logprobs: None,
        }
    }
}

impl Config {
    /// The tokens around every answer: the start, the ends and the padding.
    pub fn frame(&self) -> Vec<u32> {
        let mut frame = vec![self.answer_start(), self.decoder_start_token_id, self.pad_token_id];
        frame.extend(self.answer_ends().iter().chain(&self.eos_token_ids));
        frame
    }
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Search {
    /// The likeliest token each time.
    #[default]
    Greedy,
    /// Tokens that are drawn at random.
    Sample(Sampling),
    /// The likeliest answer, as far as beams find it.
    Beams(Beams),
}

/// Sizes that determine the memory of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnswerShape {
    /// The longest answer in tokens.
    pub max_new_tokens: usize,
    /// Rows of the cache for each source: beams, or answers.
    pub rows: usize,
    /// Whether all scores are read, rather than only the largest found.
    pub looks_at_scores: bool,
    /// Whether a row's likeliest tokens suffice, if they can be found: for beams of which no token is forbidden or drawn.
    pub likeliest_are_enough: bool,
    /// Whether scores are sorted.
    pub sorts: bool,
}

impl AnswerShape {
    /// The sizes of one greedy answer.
    pub fn greedy(max_new_tokens: usize) -> Self {
        GenerateOptions { max_new_tokens, ..GenerateOptions::default() }.shape()
    }
}

impl AnswerShape {
    /// Bytes beside tensors: histories with those of the candidates, and the sorted tokens of a row. They are negligible for one
    /// greedy answer.
    pub(crate) fn bytes_beside(&self, samples: usize, vocab_size: usize) -> u64 {
        let words = |count: usize| count as u64 * size_of::<u32>() as u64;
        let of_history =
            if self.looks_at_scores { words(samples * self.rows) * 6 * (self.max_new_tokens as u64 + 1) } else { 0 };
        of_history + if self.sorts { words(3 * vocab_size) } else { 0 }
    }
}

impl GenerateOptions {
    /// The options with which the log-probabilities of given answers to a source are found.
    pub fn of_given(given: &[Vec<u32>]) -> Self {
        let max_new_tokens = given.iter().map(Vec::len).max().unwrap_or(0);
        GenerateOptions { max_new_tokens, sequences: given.len(), scores: true, ..GenerateOptions::default() }
    }

    /// The sizes.
    pub fn shape(&self) -> AnswerShape {
        let rows = if let Search::Beams(beams) = self.search { beams.count } else { self.sequences };
        AnswerShape {
            max_new_tokens: self.max_new_tokens,
            rows,
            looks_at_scores: self.looks_at_scores(),
            likeliest_are_enough: self.likeliest_are_enough(),
            sorts: self.sampling().is_some(),
        }
    }

    /// Whether more than the largest logit decides the next token.
    pub(crate) fn looks_at_scores(&self) -> bool {
        self.search != Search::Greedy || !self.processors.are_off() || self.scores || self.logprobs.is_some()
    }

    pub(crate) fn likeliest_are_enough(&self) -> bool {
        matches!(self.search, Search::Beams(Beams { sampling: None, .. })) && self.processors.are_off()
    }

    fn sampling(&self) -> Option<&Sampling> {
        match &self.search {
            Search::Greedy => None,
            Search::Sample(sampling) => Some(sampling),
            Search::Beams(beams) => beams.sampling.as_ref(),
        }
    }

    /// Checks every option, and the options that can contradict each other, for a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// [`Error::Batch`], naming the first invalid option.
    pub fn check(&self, vocab_size: usize) -> Result<()> {
        let fault = |what: &str, expected: &str, got: String| {
            let hint = "`train_low_mem generate --help` lists the settings of answers";
            Err(Error::Batch { what: what.to_owned(), expected: expected.to_owned(), got, hint })
        };
        let Processors { repetition_penalty, .. } = self.processors;
        if !(repetition_penalty.is_finite() && repetition_penalty > 0.0) {
            return fault("repetition penalty", "a number above 0", repetition_penalty.to_string());
        }
        if let Some(sampling) = self.sampling() {
            if !(sampling.temperature.is_finite() && sampling.temperature > 0.0) {
                return fault("temperature", "a number above 0", sampling.temperature.to_string());
            }
            if !(0.0..=1.0).contains(&sampling.top_p) {
                return fault("top-p", "a number from 0 to 1", sampling.top_p.to_string());
            }
        }
        match self.search {
            _ if self.sequences == 0 => fault("answers to each source", "at least 1", "0".to_owned()),
            Search::Greedy if self.sequences > 1 => {
                fault("answers to each source", "1 without beams or sampling", self.sequences.to_string())
            }
            Search::Beams(beams) if beams.count == 0 || beams.count > vocab_size => {
                fault("beams", &format!("from 1 to {vocab_size}, the size of the vocabulary"), beams.count.to_string())
            }
            Search::Beams(beams) if self.sequences > beams.count => fault(
                "answers to each source",
                &format!("at most {}, the number of beams", beams.count),
                self.sequences.to_string(),
            ),
            Search::Beams(beams) if !beams.length_penalty.is_finite() => {
                fault("length penalty", "a finite number", beams.length_penalty.to_string())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::beams::Beams;

    #[test]
    fn options_that_contradict_each_other_are_refused_by_name() {
        let check = |options: GenerateOptions, name: &str| {
            let error = options.check(100).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        let default = GenerateOptions::default();
        assert!(default.check(100).is_ok());
        let beams = |count| GenerateOptions { search: Search::Beams(Beams { count, ..Beams::default() }), ..default };
        let sampled = |sampling| GenerateOptions { search: Search::Sample(sampling), ..default };
        check(GenerateOptions { sequences: 2, ..default }, "without beams or sampling");
        check(GenerateOptions { sequences: 3, ..beams(2) }, "the number of beams");
        check(GenerateOptions { sequences: 0, ..beams(2) }, "at least 1");
        check(beams(0), "beams: expected from 1 to 100");
        check(beams(101), "beams: expected from 1 to 100");
        check(sampled(Sampling { temperature: 0.0, ..Sampling::default() }), "temperature");
        check(sampled(Sampling { top_p: 1.5, ..Sampling::default() }), "top-p");
        let processors = Processors { repetition_penalty: 0.0, ..Processors::default() };
        check(GenerateOptions { processors, ..default }, "repetition penalty");
    }
}
