//! Beam search over one source, step by step, like `_beam_search` of transformers 5.23 for a batch of one.
//!
//! The search is given the log-probabilities of the next token of each beam and decides which beams continue. It uses no model, so it
//! can be tried on any numbers. Scores are kept in f32, as in transformers.
//!
//! A beam's keys and values lie in a *slot* of the cache. Of the beams that continue the same beam, the first keeps its slot; the
//! others are copied to slots whose beams ended. So a step copies as little as possible, and in place.

use super::sampling::{Draw, Sampling};

/// The settings of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    /// Beams for each source.
    pub count: usize,
    /// The sum of an answer's log-probabilities is divided by its length to this power.
    pub length_penalty: f64,
    /// When a search ends before the longest answer.
    pub early_stopping: EarlyStopping,
    /// If set, the next tokens of beams are drawn at random rather than the likeliest.
    pub sampling: Option<Sampling>,
}

impl Default for Beams {
    fn default() -> Self {
        Beams { count: 4, length_penalty: 1.0, early_stopping: EarlyStopping::default(), sampling: None }
    }
}

/// When a search ends. All variants wait until there are as many finished answers as beams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// The best beam, at its length so far, is worse than the worst finished answer.
    #[default]
    No,
    /// As soon as there are as many finished answers as beams.
    Yes,
    /// The best beam can become no better than the worst finished answer, whatever follows.
    Never,
}

/// The score of a missing answer.
const NOTHING: f32 = -1e9;

/// Facts about the answers of a search.
#[derive(Clone, Copy, Debug)]
pub struct StopCriteria<'a> {
    /// Tokens that end an answer.
    pub eos: &'a [u32],
    /// The longest answer in tokens.
    pub max_new_tokens: usize,
    /// Number of the source among all sources, for random draws.
    pub source: u64,
}

/// A search in progress.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    options: Beams,
    running: Vec<Beam>,
    finished: Vec<Finished>,
    is_done: bool,
}

/// An unfinished answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Beam {
    /// The decoder's start token and the tokens so far.
    pub history: Vec<u32>,
    /// The sum of their log-probabilities.
    score: f32,
    /// The row of the source's part of the cache.
    pub slot: usize,
}

#[derive(Clone, Debug)]
struct Finished {
    tokens: Vec<u32>,
    score: f32,
    is_answer: bool,
}

/// The log-probabilities of the next token of each slot, after the processors.
#[derive(Clone, Copy, Debug)]
pub enum Scores<'a> {
    /// Of every token, (slots, V).
    All(&'a [f32]),
    /// Of the likeliest tokens: for each slot as many as a search wants, ordered by the sum with the beam's score. Of equal sums, the first
    /// token comes first.
    Likeliest(&'a [u32], &'a [f32]),
}

impl<'a> Scores<'a> {
    /// The tokens of a slot, with their scores.
    fn slot(self, slot: usize, slots: usize) -> impl Iterator<Item = (usize, f32)> + 'a {
        let (Scores::All(scores) | Scores::Likeliest(_, scores)) = self;
        let width = self.width(slots);
        let token = move |place: usize| match self {
            Scores::All(_) => place,
            Scores::Likeliest(tokens, _) => tokens[slot * width + place] as usize,
        };
        scores[slot * width..][..width].iter().enumerate().map(move |(place, &score)| (token(place), score))
    }

    /// The number of a slot's scores.
    fn width(self, slots: usize) -> usize {
        let (Scores::All(scores) | Scores::Likeliest(_, scores)) = self;
        scores.len() / slots
    }
}

/// A beam, continued by one token.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    beam: usize,
    token: u32,
    score: f32,
    ends: bool,
}

impl BeamSearch {
    /// A search that was given no scores yet.
    pub fn new(options: Beams, start_token: u32) -> Self {
        let beam = |slot| Beam { history: vec![start_token], score: if slot == 0 { 0.0 } else { NOTHING }, slot };
        let nothing = Finished { tokens: Vec::new(), score: NOTHING, is_answer: false };
        BeamSearch {
            running: (0..options.count).map(beam).collect(),
            finished: vec![nothing; options.count],
            options,
            is_done: false,
        }
    }

    /// The beams that are continued by the next step.
    pub fn running(&self) -> &[Beam] {
        &self.running
    }

    /// Writes the last token of each beam to its slot of `tokens`.
    pub fn put_last_tokens(&self, tokens: &mut [u32]) {
        for beam in &self.running {
            tokens[beam.slot] = *beam.history.last().expect("the start token");
        }
    }

    /// Whether the search has ended.
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// The number of candidates that a search examines: even if every other one ends, there are enough to continue.
    pub fn wanted(count: usize, eos: &[u32]) -> usize {
        count * (eos.len() + 1).max(2)
    }

    /// Writes the score of each beam to its slot of `scores`.
    pub fn put_scores(&self, scores: &mut [f32]) {
        for beam in &self.running {
            scores[beam.slot] = beam.score;
        }
    }

    /// Continues by one token. `is_end` returns whether a history ends for another reason than its last token or its length. Returns the
    /// slots that the cache has to copy, from and to.
    pub fn advance(
        &mut self,
        scores: Scores,
        ends: &StopCriteria,
        is_end: &dyn Fn(&[u32]) -> bool,
    ) -> Vec<(usize, usize)> {
        let count = self.options.count;
        let mut candidates = self.candidates(scores, Self::wanted(count, ends.eos), ends);
        let length = self.running[0].history.len(); // of the answers with this token
        for candidate in &mut candidates {
            candidate.ends = ends.eos.contains(&candidate.token) || length >= ends.max_new_tokens || {
                let mut history = self.running[candidate.beam].history.clone();
                history.push(candidate.token);
                is_end(&history)
            };
        }
        let finished = self.merged(&candidates, length);
        // An ended candidate ranks far behind, and continues only if there is nothing else.
        let behind = |candidate: &Candidate| candidate.score + if candidate.ends { NOTHING } else { 0.0 };
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by(|&a, &b| behind(&candidates[b]).total_cmp(&behind(&candidates[a])));
        let next: Vec<Candidate> = order[..count.min(order.len())]
            .iter()
            .map(|&i| Candidate { score: behind(&candidates[i]), ..candidates[i] })
            .collect();
        let copies = self.follow(&next);
        self.finished = finished;
        self.is_done = candidates.iter().all(|candidate| candidate.ends) || !self.can_improve(length, ends);
        copies
    }

    /// The best candidates, best first; drawn without replacement if beams are sampled.
    fn candidates(&self, scores: Scores, wanted: usize, ends: &StopCriteria) -> Vec<Candidate> {
        let width = scores.width(self.options.count);
        let position = self.running[0].history.len() as u64 - 1;
        let draw = Draw { source: ends.source, sequence: 0, position };
        let mut best: Vec<(f64, Candidate)> = Vec::with_capacity(wanted + 1);
        for (number, beam) in self.running.iter().enumerate() {
            for (token, score) in scores.slot(beam.slot, self.options.count) {
                let score = if score.is_nan() { f32::NEG_INFINITY } else { score + beam.score };
                let key = match &self.options.sampling {
                    Some(_) if score == f32::NEG_INFINITY => f64::NEG_INFINITY,
                    Some(sampling) => f64::from(score) + sampling.gumbel(draw, (number * width + token) as u64),
                    None => f64::from(score),
                };
                // Of equal ones, the first comes first.
                if best.len() == wanted && best[wanted - 1].0 >= key {
                    continue;
                }
                let at = best.partition_point(|(other, _)| *other >= key);
                best.insert(at, (key, Candidate { beam: number, token: token as u32, score, ends: false }));
                best.truncate(wanted);
            }
        }
        best.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// The best answers, including those that end now. Only the first candidates count: the others are here to continue.
    fn merged(&self, candidates: &[Candidate], length: usize) -> Vec<Finished> {
        let is_full =
            self.options.early_stopping == EarlyStopping::Yes && self.finished.iter().all(|one| one.is_answer);
        let divisor = (length as f64).powf(self.options.length_penalty) as f32;
        let mut all = self.finished.clone();
        for candidate in candidates.iter().take(self.options.count).filter(|candidate| candidate.ends && !is_full) {
            let beam = &self.running[candidate.beam];
            let tokens = beam.history[1..].iter().copied().chain([candidate.token]).collect();
            all.push(Finished { tokens, score: candidate.score / divisor, is_answer: true });
        }
        // The sort is stable: of equal answers, the older comes first.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(self.options.count);
        all
    }

    /// Makes the candidates the running beams, and gives each a slot.
    fn follow(&mut self, next: &[Candidate]) -> Vec<(usize, usize)> {
        let before = std::mem::take(&mut self.running);
        let mut is_taken = vec![false; before.len()];
        let keeps: Vec<bool> =
            next.iter().map(|next| !std::mem::replace(&mut is_taken[before[next.beam].slot], true)).collect();
        let mut free = (0..before.len()).filter(|&slot| !is_taken[slot]);
        let mut copies = Vec::new();
        self.running = next
            .iter()
            .zip(keeps)
            .map(|(next, keeps)| {
                let parent = &before[next.beam];
                let slot = if keeps { parent.slot } else { free.next().expect("as many slots as beams") };
                if slot != parent.slot {
                    copies.push((parent.slot, slot));
                }
                let history = parent.history.iter().copied().chain([next.token]).collect();
                Beam { history, score: next.score, slot }
            })
            .collect();
        copies
    }

    /// Whether a beam may still become better than an answer.
    fn can_improve(&self, length: usize, ends: &StopCriteria) -> bool {
        let Beams { length_penalty, early_stopping, .. } = self.options;
        if early_stopping == EarlyStopping::Yes && self.finished.iter().all(|one| one.is_answer) {
            return false;
        }
        let is_hopeful = early_stopping == EarlyStopping::Never && length_penalty > 0.0;
        let best_length = if is_hopeful { ends.max_new_tokens } else { length };
        let best = self.running[0].score / (best_length as f64).powf(length_penalty) as f32;
        // A missing answer scores less than any other.
        let worst = self.finished.iter().map(|one| one.score).fold(f32::INFINITY, f32::min);
        best > worst
    }

    /// The answers, best first, with their scores.
    pub fn into_answers(self) -> impl Iterator<Item = (Vec<u32>, f32)> {
        self.finished.into_iter().map(|one| (one.tokens, one.score))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: usize = 6;

    /// Log-probabilities that follow from the history alone.
    fn model(history: &[u32]) -> Vec<f32> {
        let hash = |token: usize| {
            let words = history.iter().fold(7_u64, |hash, &word| t5_ops::keys::mix(hash ^ u64::from(word)));
            (t5_ops::keys::mix(words ^ token as u64) % 1000) as f32 / 250.0
        };
        let logits: Vec<f32> = (0..V).map(hash).collect();
        let total = logits.iter().map(|x| x.exp()).sum::<f32>().ln();
        logits.iter().map(|x| x - total).collect()
    }

    fn searched(options: Beams, max_new_tokens: usize) -> (Vec<(Vec<u32>, f32)>, usize) {
        let ends = StopCriteria { eos: &[1], max_new_tokens, source: 0 };
        let mut search = BeamSearch::new(options, 0);
        // The history in each slot, copied as a cache would be.
        let mut slots = vec![vec![0_u32]; options.count];
        let mut copied = 0;
        while !search.is_done() {
            let mut scores = vec![0.0; options.count * V];
            for beam in search.running() {
                assert_eq!(slots[beam.slot], beam.history[..slots[beam.slot].len()], "a slot has its beam's past");
                slots[beam.slot].clone_from(&beam.history);
                scores[beam.slot * V..][..V].copy_from_slice(&model(&beam.history));
            }
            // The likeliest tokens alone give the same beams.
            let mut other = search.clone();
            let (tokens, likeliest) = likeliest(&search, &scores, BeamSearch::wanted(options.count, &[1]));
            let copies = search.advance(Scores::All(&scores), &ends, &|_| false);
            if options.sampling.is_none() {
                let of_other = other.advance(Scores::Likeliest(&tokens, &likeliest), &ends, &|_| false);
                assert_eq!((&copies, &search.running), (&of_other, &other.running));
            }
            for (from, to) in copies {
                slots[to] = slots[from].clone();
                copied += 1;
            }
        }
        (search.into_answers().collect(), copied)
    }

    /// The likeliest tokens of each slot with their scores.
    fn likeliest(search: &BeamSearch, scores: &[f32], wanted: usize) -> (Vec<u32>, Vec<f32>) {
        let slots = search.running.len();
        let mut offsets = vec![0.0; slots];
        search.put_scores(&mut offsets);
        let of_slot = |slot: usize| {
            let row = &scores[slot * V..][..V];
            let mut order: Vec<usize> = (0..V).collect();
            order.sort_by(|&a, &b| (row[b] + offsets[slot]).total_cmp(&(row[a] + offsets[slot])));
            order.into_iter().take(wanted.min(V)).map(|token| (token as u32, row[token])).collect::<Vec<_>>()
        };
        (0..slots).flat_map(of_slot).unzip()
    }

    /// Every answer of at most `most` tokens, with the sum of its log-probabilities.
    fn all_answers(history: &[u32], sum: f32, most: usize) -> Vec<(Vec<u32>, f32)> {
        let scores = model(history);
        let next = |token: usize| {
            let (longer, sum) = ([history, &[token as u32]].concat(), sum + scores[token]);
            if token == 1 || longer.len() > most {
                vec![(longer[1..].to_vec(), sum)]
            } else {
                all_answers(&longer, sum, most)
            }
        };
        (0..V).flat_map(next).collect()
    }

    #[test]
    fn a_search_with_as_many_beams_as_answers_finds_the_best_ones() {
        let mut all = all_answers(&[0], 0.0, 3);
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        let options = Beams { count: 150, length_penalty: 0.0, early_stopping: EarlyStopping::Never, sampling: None };
        let (found, _) = searched(options, 3);
        for ((tokens, score), (expected, sum)) in found.iter().zip(&all).take(20) {
            assert!(
                tokens == expected && (score - sum).abs() < 1e-5,
                "{tokens:?} {score}, expected {expected:?} {sum}"
            );
        }
    }

    #[test]
    fn one_beam_is_greedy_and_copies_nothing() {
        let (found, copied) = searched(Beams { count: 1, ..Beams::default() }, 9);
        let mut history = vec![0];
        while history.len() <= 9 && history.last() != Some(&1) {
            let scores = model(&history);
            history.push((0..V).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap() as u32);
        }
        // One beam keeps two candidates: an end is an answer only if it is the best.
        assert!(copied == 0 && found[0].0.len() <= 9, "{found:?}");
        assert_eq!(found[0].0[0], history[1]);
    }

    #[test]
    fn a_step_copies_fewer_slots_than_there_are_beams() {
        for count in [2, 3, 5] {
            let (found, copied) = searched(Beams { count, ..Beams::default() }, 12);
            assert_eq!(found.len(), count);
            assert!(copied <= 12 * (count - 1), "{copied}");
            assert!(found.windows(2).all(|pair| pair[0].1 >= pair[1].1), "best first");
        }
    }

    #[test]
    fn stopping_early_takes_the_first_answers_and_never_takes_at_least_as_good_ones() {
        let best = |early_stopping| searched(Beams { count: 3, early_stopping, ..Beams::default() }, 10).0[0].1;
        let [yes, no, never] = [EarlyStopping::Yes, EarlyStopping::No, EarlyStopping::Never].map(best);
        assert!(yes <= never && no <= never, "{yes} {no} {never}");
    }

    #[test]
    fn sampled_beams_follow_from_the_seed() {
        let found = |seed| {
            let sampling = Some(Sampling { seed, temperature: 2.0, ..Sampling::default() });
            searched(Beams { count: 3, sampling, ..Beams::default() }, 8).0
        };
        assert_eq!(found(1), found(1));
        assert!((2..12).any(|seed| found(seed) != found(1)));
    }

    #[test]
    fn scores_that_are_not_numbers_end_in_an_answer_and_no_panic() {
        let mut search = BeamSearch::new(Beams::default(), 0);
        let ends = StopCriteria { eos: &[1], max_new_tokens: 3, source: 0 };
        while !search.is_done() {
            search.advance(Scores::All(&[f32::NAN; 4 * V]), &ends, &|_| false);
        }
        assert_eq!(search.into_answers().count(), 4);
    }
}
