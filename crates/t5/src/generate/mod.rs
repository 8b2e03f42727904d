//! Generation with a key/value cache: greedy, sampled, or by beam search, like that of transformers 5.23.
//!
//! The cache holds, for each decoder block, the keys and values of the tokens generated so far (space for a power of two of
//! them, doubled when full) and of the source. Finished sources leave the batch when half of it is finished.
//! [`crate::step::count`] rehearses generation for the bill. [`processors`], [`sampling`] and [`beams`] choose tokens and
//! use no model.

pub(crate) mod beams;
pub(crate) mod cache;
mod continuous_batch;
mod options;
pub(crate) mod processors;
mod rows;
pub(crate) mod sampling;
mod tokens;

use candle_core::Tensor;

use self::beams::{BeamSearch, Beams, Scores, StopCriteria};
use self::cache::{Cache, Decoding};
pub use self::continuous_batch::{ContinuousBatch, Encoded, Grown, Told};
pub use self::options::{AnswerShape, GenerateOptions, Search};
use self::rows::Rows;
use self::tokens::Tokens;
use crate::config::Config;
use crate::error::Result;
use crate::micro_batch::{MicroBatch, pad};
use crate::model::T5;
use crate::ops::Ops;

/// An answer to a source.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The tokens after the decoder's start token, up to and including the end of the sequence.
    pub ids: Vec<u32>,
    /// Of a beam search: the sum of the tokens' log-probabilities, divided by the length to the length penalty. Otherwise their
    /// mean, if scores are asked for. They are the log-probabilities after processors and filters.
    pub score: Option<f64>,
}

/// The score of a token of an answer: log-probabilities of the model, before processors and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// The token's log-probability.
    pub log_probability: f64,
    /// The likeliest tokens in its place, the likeliest first, and their log-probabilities.
    pub likeliest: Vec<(u32, f64)>,
}

/// The caller's callbacks while answers are made.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Whether to end early, without answers. Asked before every block of the encoder and before every token.
    pub interrupted: &'a dyn Fn() -> bool,
    /// Whether an answer that is not longer than this ends here.
    pub is_end: &'a dyn Fn(&[u32]) -> bool,
    /// Given the tokens of the answer to a source, one more each time. A beam search does not call it: its answers are known at
    /// the end.
    pub progress: &'a dyn Fn(usize, &[u32]),
    /// The number of a source among all that are ever asked. Random draws depend on it.
    pub number: &'a dyn Fn(usize) -> u64,
}

impl Default for Watch<'_> {
    fn default() -> Self {
        Watch { interrupted: &|| false, is_end: &|_| false, progress: &|_, _| {}, number: &|source| source as u64 }
    }
}

impl T5 {
    /// The best answer to each source (token ids, EOS included): the tokens generated after the decoder's start token, up
    /// to and including EOS.
    ///
    /// All sources run as one batch, padded to the longest; a source's answer does not depend on the
    /// others up to rounding.
    ///
    /// # Errors
    /// [`crate::Error::Batch`] for an empty source or an id outside the vocabulary, or options that contradict each other.
    pub fn generate(&self, sources: &[&[u32]], options: &GenerateOptions) -> Result<Vec<Vec<u32>>> {
        let answers = self.answers(sources, options, &Watch::default())?.expect("nobody interrupts");
        Ok(answers
            .into_iter()
            .map(|answers| answers.into_iter().next().map_or_else(Vec::new, |best| best.ids))
            .collect())
    }

    /// All answers to each source, the best first. `None` if `watch` interrupted generation.
    ///
    /// # Errors
    /// As [`T5::generate`].
    pub fn answers(
        &self,
        sources: &[&[u32]],
        options: &GenerateOptions,
        watch: &Watch,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        options.check(self.config().vocab_size)?;
        if sources.is_empty() || options.max_new_tokens == 0 {
            let nothing = Answer { ids: Vec::new(), score: None };
            return Ok(Some(vec![vec![nothing; options.sequences]; sources.len()]));
        }
        let samples: Vec<u32> = (0..sources.len() as u32).collect();
        let (ids, lengths) = pad(sources, "source", &samples, self.config(), self.device())?;
        let decoding =
            Decoding { network: &self.network, options: *options, has_paged_weights: self.has_paged_weights() };
        let batch = MicroBatch::of_sources(ids, lengths);
        let Some(cache) = decoding.begin(batch, self.config(), watch.interrupted)? else { return Ok(None) };
        let tokens = Tokens::from_config(self.config());
        let mut answering = Answering { model: self, decoding, cache, tokens, options, watch };
        match options.search {
            Search::Beams(beams) => answering.search(beams, sources.len()),
            _ => answering.choose(sources.len()),
        }
    }
}

/// A batch of sources in generation.
struct Answering<'a> {
    model: &'a T5,
    decoding: Decoding<'a, Tensor>,
    cache: Cache<Tensor>,
    tokens: Tokens,
    options: &'a GenerateOptions,
    watch: &'a Watch<'a>,
}

impl Answering<'_> {
    /// The logits (R, V) after one more token of each row. `None` when interrupted.
    fn logits(&mut self, tokens: &[u32]) -> Result<Option<Tensor>> {
        if (self.watch.interrupted)() {
            return Ok(None);
        }
        Ok(Some(self.tokens.logits(&self.decoding, tokens, &mut [&mut self.cache])?))
    }

    /// Drops finished sources from the batch, once they are half of it. `active` are the sources in the cache.
    fn drop_done(&mut self, active: &mut Vec<usize>, is_done: impl Fn(usize) -> bool) -> Result<()> {
        let left: Vec<usize> = (0..active.len()).filter(|&place| !is_done(active[place])).collect();
        if !left.is_empty() && left.len() * 2 <= active.len() {
            self.tokens.forget();
            self.cache.keep_sources(&left)?;
            *active = left.iter().map(|&place| active[place]).collect();
        }
        Ok(())
    }

    /// Chooses the likeliest token, or draws one, until every answer has ended.
    fn choose(&mut self, sources: usize) -> Result<Option<Vec<Vec<Answer>>>> {
        let config = self.model.config();
        let mut rows = Rows::new(*self.options, config.answer_start(), sources);
        let (watch, sequences) = (self.watch, self.options.sequences);
        let mut told = |row: usize, answer: &[u32], _: Option<&TokenScore>| {
            let is_end = (watch.is_end)(answer);
            if row.is_multiple_of(sequences) {
                (watch.progress)(row / sequences, answer);
            }
            is_end
        };
        let mut active: Vec<usize> = (0..sources).collect(); // the source of each part of the cache
        while rows.have_more(&active) && self.cache.position() < self.options.max_new_tokens {
            let Some(logits) = self.logits(&rows.last_tokens(&active))? else { return Ok(None) };
            if self.options.looks_at_scores() {
                let scores = logits.scores(false)?;
                drop(logits);
                rows.choose(&active, scores, config, watch.number, &mut told);
            } else {
                rows.take(&active, &logits.largest()?, &[], config, &mut told);
            }
            self.drop_done(&mut active, |source| rows.is_done(source))?;
        }
        Ok(Some(rows.into_answers()))
    }

    /// Beam search.
    fn search(&mut self, beams: Beams, sources: usize) -> Result<Option<Vec<Vec<Answer>>>> {
        let config = self.model.config();
        let start = config.answer_start();
        let mut searches = vec![BeamSearch::new(beams, start); sources];
        let mut active: Vec<usize> = (0..sources).collect();
        while active.iter().any(|&source| !searches[source].is_done()) {
            let mut tokens = vec![start; active.len() * beams.count];
            for (place, &source) in active.iter().enumerate() {
                searches[source].put_last_tokens(&mut tokens[place * beams.count..][..beams.count]);
            }
            let Some(logits) = self.logits(&tokens)? else { return Ok(None) };
            let looked_at = active.iter().map(|&source| &searches[source]);
            let mut scores = NextScores::compute(&logits, looked_at, self.options, config)?;
            drop(logits);
            let mut copies = Vec::new();
            for (place, &source) in active.iter().enumerate() {
                let is_end = |answer: &[u32]| (self.watch.is_end)(answer);
                let scores = scores.of_source(place, active.len());
                let of_source =
                    advance(&mut searches[source], scores, self.options, config, (self.watch.number)(source), &is_end);
                copies.extend(of_source.map(|(from, to)| (place * beams.count + from, place * beams.count + to)));
            }
            self.cache.copy_rows(&copies)?;
            self.drop_done(&mut active, |source| searches[source].is_done())?;
        }
        Ok(Some(searches.into_iter().map(|search| best(search, self.options.sequences)).collect()))
    }
}

/// Log-probabilities of the next token of several searches, as their device returns them.
enum NextScores {
    /// Of every token, (R, V).
    All(Vec<f32>),
    /// Of the likeliest tokens; see [`Scores::Likeliest`].
    Likeliest(Vec<u32>, Vec<f32>),
}

/// Log-probabilities of the next token of one search.
enum SearchScores<'a> {
    /// Of every token; they may be changed.
    All(&'a mut [f32]),
    Likeliest(&'a [u32], &'a [f32]),
}

impl NextScores {
    /// The log-probabilities for the logits (R, V) of these searches. The likeliest tokens suffice where none is forbidden or drawn.
    fn compute<'a>(
        logits: &Tensor,
        searches: impl Iterator<Item = &'a BeamSearch>,
        options: &GenerateOptions,
        config: &Config,
    ) -> Result<Self> {
        if let Search::Beams(Beams { count, .. }) = options.search
            && options.likeliest_are_enough()
        {
            let mut offsets = vec![0.0; logits.dim(0)?];
            searches.zip(offsets.chunks_mut(count)).for_each(|(search, offsets)| search.put_scores(offsets));
            let wanted = BeamSearch::wanted(count, config.answer_ends()).min(logits.dim(1)?);
            if let Some((tokens, scores)) = logits.candidates(&offsets, wanted)? {
                return Ok(NextScores::Likeliest(tokens, scores));
            }
        }
        logits.scores(true).map(NextScores::All)
    }

    /// The log-probabilities of the search at `place`, of `searches` searches.
    fn of_source(&mut self, place: usize, searches: usize) -> SearchScores<'_> {
        let range = |len: usize| place * (len / searches)..(place + 1) * (len / searches);
        match self {
            NextScores::All(scores) => {
                let range = range(scores.len());
                SearchScores::All(&mut scores[range])
            }
            NextScores::Likeliest(tokens, scores) => {
                SearchScores::Likeliest(&tokens[range(tokens.len())], &scores[range(scores.len())])
            }
        }
    }
}

/// Continues a search by one token. Returns the slots that the cache has to copy, from and to; none for a search that has ended.
fn advance(
    search: &mut BeamSearch,
    scores: SearchScores,
    options: &GenerateOptions,
    config: &Config,
    number: u64,
    is_end: &dyn Fn(&[u32]) -> bool,
) -> std::vec::IntoIter<(usize, usize)> {
    if search.is_done() {
        return Vec::new().into_iter();
    }
    let scores = match scores {
        SearchScores::All(scores) => {
            process(search, scores, options, config);
            Scores::All(scores)
        }
        SearchScores::Likeliest(tokens, scores) => Scores::Likeliest(tokens, scores),
    };
    let ends = StopCriteria { eos: config.answer_ends(), max_new_tokens: options.max_new_tokens, source: number };
    search.advance(scores, &ends, &|history| is_end(&history[1..])).into_iter()
}

/// Applies the processors and filters of its options to the log-probabilities (slots, V) of a search.
fn process(search: &BeamSearch, scores: &mut [f32], options: &GenerateOptions, config: &Config) {
    let width = scores.len() / search.running().len();
    for beam in search.running() {
        let row = &mut scores[beam.slot * width..][..width];
        options.processors.apply(&beam.history, config.answer_ends(), row);
        if let Search::Beams(Beams { sampling: Some(sampling), .. }) = &options.search {
            sampling.filter(row, config.answer_ends().len() + 1);
        }
    }
}

/// The best answers of a search.
fn best(search: BeamSearch, sequences: usize) -> Vec<Answer> {
    let answer = |(ids, score)| Answer { ids, score: Some(f64::from(score)) };
    search.into_answers().take(sequences).map(answer).collect()
}
