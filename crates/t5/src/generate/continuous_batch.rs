//! Answers that grow together, each with its own settings: sources join and leave between two tokens.
//!
//! Every step adds a token to each answer. Products with weights, which take most of the time, are one product for all rows.
//! Each source has a cache of its own. So the answer to a source does not depend on the others, up to rounding, and
//! a source's memory is free as soon as it leaves.

use std::rc::Rc;

use candle_core::{DType, Tensor};

use super::beams::BeamSearch;
use super::cache::{Cache, Decoding};
use super::options::{GenerateOptions, Search};
use super::rows::Rows;
use super::tokens::Tokens;
use super::{Answer, NextScores, TokenScore, advance, best};
use crate::error::Result;
use crate::micro_batch::{MicroBatch, pad};
use crate::model::T5;
use crate::ops::Ops;

/// The sources that a model is answering.
#[derive(Debug)]
pub struct ContinuousBatch {
    model: Rc<T5>,
    activations: DType,
    members: Vec<Member>,
    next: Tokens,
}

/// A source that was encoded, and can join a group.
#[derive(Debug)]
pub struct Encoded(Member);

/// A source.
struct Member {
    key: u64,
    options: GenerateOptions,
    cache: Cache<Tensor>,
    growing: SearchState,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Member").field("key", &self.key).field("options", &self.options).finish_non_exhaustive()
    }
}

enum SearchState {
    Rows(Rows),
    Beams(BeamSearch),
}

/// One more token of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// The source's key, as given to [`ContinuousBatch::join`].
    pub key: u64,
    /// The number of the answer among those to its source.
    pub choice: usize,
    /// The answer's tokens so far. Of a beam search: a beam as it could continue.
    pub ids: &'a [u32],
    /// The score of the last token, if [`GenerateOptions::logprobs`] asks for it.
    pub score: Option<&'a TokenScore>,
}

/// The news about a source after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Grown {
    /// The source's key, as given to [`ContinuousBatch::join`].
    pub key: u64,
    /// The source's answers, best first, once they are complete. The source has then left.
    pub answers: Option<Vec<Answer>>,
}

impl ContinuousBatch {
    /// No sources yet.
    pub fn new(model: Rc<T5>, activations: DType) -> Self {
        let next = Tokens::from_config(model.config());
        ContinuousBatch { model, activations, members: Vec::new(), next }
    }

    /// The model.
    pub fn model(&self) -> &Rc<T5> {
        &self.model
    }

    /// The number of sources.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no sources.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a source (token ids, EOS included): runs the encoder over it. Returns false if `interrupted` ended that. Random
    /// draws depend on `options` alone: every source is number 0.
    ///
    /// # Errors
    /// As for [`encode`](Self::encode).
    pub fn join(
        &mut self,
        key: u64,
        source: &[u32],
        options: &GenerateOptions,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let encoded = Self::encode((&self.model, self.activations), (key, source), options, interrupted)?;
        Ok(encoded.map(|encoded| self.add(encoded)).is_some())
    }

    /// Encodes a source for a group of this model and these activations, which it can then join: others of the group may grow meanwhile. `None` if
    /// `interrupted`, which is asked before every block, ended that.
    ///
    /// # Errors
    /// [`crate::Error::Batch`] for an empty source or an id outside the vocabulary, options that contradict each other, or other
    /// activations than those of this group.
    pub fn encode(
        (model, activations): (&T5, DType),
        (key, source): (u64, &[u32]),
        options: &GenerateOptions,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Encoded>> {
        let config = model.config();
        options.check(config.vocab_size)?;
        let growing = match options.search {
            Search::Beams(beams) => SearchState::Beams(BeamSearch::new(beams, config.answer_start())),
            _ => SearchState::Rows(Rows::new(*options, config.answer_start(), 1)),
        };
        encoded((model, activations), (key, source), options, growing, interrupted)
    }

    /// Encodes a source whose answers are given: each has the score of its mean log-probability. Otherwise the same as
    /// [`encode`](Self::encode).
    ///
    /// # Errors
    /// As for [`encode`](Self::encode).
    ///
    /// # Panics
    /// A given answer is empty, or has a token that is not in the vocabulary.
    pub fn encode_given(
        (model, activations): (&T5, DType),
        (key, source): (u64, &[u32]),
        given: Vec<Vec<u32>>,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Encoded>> {
        let is_known = |id: &u32| (*id as usize) < model.config().vocab_size;
        let is_answer = |ids: &Vec<u32>| !ids.is_empty() && ids.iter().all(is_known);
        assert!(given.iter().all(is_answer), "a given answer has tokens of the vocabulary");
        let options = GenerateOptions::of_given(&given);
        let rows = Rows::given(options, model.config().answer_start(), given);
        encoded((model, activations), (key, source), &options, SearchState::Rows(rows), interrupted)
    }

    /// Adds a source that was encoded.
    pub fn add(&mut self, encoded: Encoded) {
        self.members.push(encoded.0);
    }

    /// Keeps only the sources for which `stays` returns true.
    pub fn retain(&mut self, mut stays: impl FnMut(u64) -> bool) {
        let before = self.members.len();
        self.members.retain(|member| stays(member.key));
        if self.members.len() < before {
            self.next.forget();
        }
    }

    /// Adds a token to every answer. `told` returns whether an answer ends here. For a beam search, it is told of beams as they could
    /// continue, in no order, and only its result counts. Returns the sources whose answers are complete.
    ///
    /// # Errors
    /// An operation fails.
    pub fn step(&mut self, told: &mut dyn FnMut(Told) -> bool) -> Result<Vec<Grown>> {
        self.step_of(|_| true, told)
    }

    /// The same as [`step`](Self::step) for the sources with these keys. The others wait.
    ///
    /// # Errors
    /// As for [`step`](Self::step).
    pub fn step_of(
        &mut self,
        takes_part: impl Fn(u64) -> bool,
        told: &mut dyn FnMut(Told) -> bool,
    ) -> Result<Vec<Grown>> {
        let (now, later) = std::mem::take(&mut self.members).into_iter().partition(|member| takes_part(member.key));
        self.members = now;
        let grown = self.step_of_all(told);
        self.members.extend::<Vec<Member>>(later);
        grown
    }

    fn step_of_all(&mut self, told: &mut dyn FnMut(Told) -> bool) -> Result<Vec<Grown>> {
        if self.members.is_empty() {
            return Ok(Vec::new());
        }
        let tokens: Vec<u32> = self.members.iter().flat_map(Member::last_tokens).collect();
        let model = Rc::clone(&self.model);
        let logits = {
            let options = GenerateOptions { activations: self.activations, ..GenerateOptions::default() };
            let decoding = Decoding { network: &model.network, options, has_paged_weights: model.has_paged_weights() };
            let mut caches: Vec<&mut Cache<Tensor>> = self.members.iter_mut().map(|member| &mut member.cache).collect();
            self.next.logits(&decoding, &tokens, &mut caches)?
        };
        let mut from = 0;
        let mut grown = Vec::new();
        for member in &mut self.members {
            let rows = member.cache.rows();
            let part = if rows == tokens.len() { logits.clone() } else { logits.part(from, rows)? };
            from += rows;
            member.take(part, &model, told)?;
            if member.is_done() {
                grown.push(member.key);
            }
        }
        if !grown.is_empty() {
            // A source that leaves takes along all memory that was allocated for it.
            self.next.forget();
        }
        let whole = |key| {
            let place = self.members.iter().position(|member| member.key == key).expect("it was there");
            Grown { key, answers: Some(self.members.remove(place).into_answers()) }
        };
        Ok(grown.into_iter().map(whole).collect())
    }
}

/// Runs the encoder over a source.
fn encoded(
    (model, activations): (&T5, DType),
    (key, source): (u64, &[u32]),
    options: &GenerateOptions,
    growing: SearchState,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Encoded>> {
    let options = GenerateOptions { activations, ..*options };
    let (ids, lengths) = pad(&[source], "source", &[0], model.config(), model.device())?;
    let decoding = Decoding { network: &model.network, options, has_paged_weights: model.has_paged_weights() };
    let cache = decoding.begin(MicroBatch::of_sources(ids, lengths), model.config(), interrupted)?;
    Ok(cache.map(|cache| Encoded(Member { key, options, cache, growing })))
}

impl Member {
    fn last_tokens(&self) -> Vec<u32> {
        match &self.growing {
            SearchState::Rows(rows) => rows.last_tokens(&[0]),
            SearchState::Beams(search) => {
                let mut tokens = vec![0; self.cache.rows()];
                search.put_last_tokens(&mut tokens);
                tokens
            }
        }
    }

    /// Takes the logits (R, V) of the source's rows.
    fn take(&mut self, logits: Tensor, model: &T5, told: &mut dyn FnMut(Told) -> bool) -> Result<()> {
        let (config, key) = (model.config(), self.key);
        match &mut self.growing {
            SearchState::Rows(rows) => {
                let mut told =
                    |choice: usize, ids: &[u32], score: Option<&TokenScore>| told(Told { key, choice, ids, score });
                if self.options.looks_at_scores() {
                    rows.choose(&[0], logits.scores(false)?, config, &|_| 0, &mut told);
                } else {
                    rows.take(&[0], &logits.largest()?, &[], config, &mut told);
                }
            }
            SearchState::Beams(search) => {
                let mut scores = NextScores::compute(&logits, [&*search].into_iter(), &self.options, config)?;
                let told = std::cell::RefCell::new(told);
                let is_end = |ids: &[u32]| (told.borrow_mut())(Told { key, choice: 0, ids, score: None });
                let copies = advance(search, scores.of_source(0, 1), &self.options, config, 0, &is_end);
                self.cache.copy_rows(&copies.collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        match &self.growing {
            SearchState::Rows(rows) => rows.is_done(0) || self.cache.position() >= self.options.max_new_tokens,
            SearchState::Beams(search) => search.is_done(),
        }
    }

    fn into_answers(self) -> Vec<Answer> {
        match self.growing {
            SearchState::Rows(rows) => rows.into_answers().pop().unwrap_or_default(),
            SearchState::Beams(search) => best(search, self.options.sequences),
        }
    }
}
