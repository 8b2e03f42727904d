//! Answers that grow by one token at a time: the likeliest, or one drawn at random.

use super::options::{GenerateOptions, Search};
use super::sampling::Draw;
use super::{Answer, TokenScore};
use crate::config::Config;

/// The rows of all sources; those of one source follow each other.
pub(super) struct Rows {
    options: GenerateOptions,
    rows: Vec<Row>,
    /// The tokens that each row takes, whatever is likeliest, if only their log-probabilities are wanted.
    given: Vec<Vec<u32>>,
}

/// Hears of a row's answer so far and the score of its last token. Returns whether the answer ends here.
pub(super) type Told<'a> = dyn FnMut(usize, &[u32], Option<&TokenScore>) -> bool + 'a;

struct Row {
    /// The decoder's start token, and the answer.
    history: Vec<u32>,
    log_probability: f64,
    is_done: bool,
}

impl Rows {
    pub fn new(options: GenerateOptions, start_token: u32, sources: usize) -> Self {
        let row = || Row { history: vec![start_token], log_probability: 0.0, is_done: false };
        Rows { options, rows: (0..sources * options.sequences).map(|_| row()).collect(), given: Vec::new() }
    }

    /// The rows of one source that take these tokens, none of them empty.
    pub fn given(options: GenerateOptions, start_token: u32, given: Vec<Vec<u32>>) -> Self {
        Rows { given, ..Rows::new(options, start_token, 1) }
    }

    /// The rows of these sources, in the order of the cache.
    fn indices(&self, active: &[usize]) -> Vec<usize> {
        let sequences = self.options.sequences;
        active.iter().flat_map(|source| source * sequences..(source + 1) * sequences).collect()
    }

    pub fn have_more(&self, active: &[usize]) -> bool {
        active.iter().any(|&source| !self.is_done(source))
    }

    /// Whether every answer to a source is complete.
    pub fn is_done(&self, source: usize) -> bool {
        let sequences = self.options.sequences;
        self.rows[source * sequences..][..sequences].iter().all(|row| row.is_done)
    }

    pub fn last_tokens(&self, active: &[usize]) -> Vec<u32> {
        self.indices(active).into_iter().map(|row| *self.rows[row].history.last().expect("the start token")).collect()
    }

    /// Adds a token to each unfinished row. `scores` has their scores, if there are any. `told` returns whether an answer ends here for
    /// another reason than its token.
    pub fn take(
        &mut self,
        active: &[usize],
        tokens: &[u32],
        scores: &[Option<TokenScore>],
        config: &Config,
        told: &mut Told,
    ) {
        for (place, (number, &token)) in self.indices(active).into_iter().zip(tokens).enumerate() {
            let row = &mut self.rows[number];
            if row.is_done {
                continue;
            }
            row.history.push(token);
            let answer = &row.history[1..];
            let is_end = match self.given.get(number) {
                Some(given) => answer.len() >= given.len(),
                None => config.answer_ends().contains(&token),
            };
            row.is_done = told(number, answer, scores.get(place).and_then(Option::as_ref)) || is_end;
        }
    }

    /// Chooses a token for each row by its scores, (R, V).
    pub fn choose(
        &mut self,
        active: &[usize],
        mut scores: Vec<f32>,
        config: &Config,
        number_of: &dyn Fn(usize) -> u64,
        told: &mut Told,
    ) {
        let rows = self.indices(active);
        let width = scores.len() / rows.len().max(1);
        let mut tokens = Vec::with_capacity(rows.len());
        let mut of_tokens = Vec::with_capacity(rows.len());
        for (&number, scores) in rows.iter().zip(scores.chunks_mut(width.max(1))) {
            let row = &mut self.rows[number];
            if row.is_done {
                tokens.push(0);
                of_tokens.push(None);
                continue;
            }
            if let Some(given) = self.given.get(number) {
                let token = given[row.history.len() - 1];
                row.log_probability += log_probability(scores, token);
                tokens.push(token);
                of_tokens.push(None);
                continue;
            }
            // Processors and filters change the scores, and log-probabilities are those of the model.
            let of_model = self.options.logprobs.map(|most| (scores.to_vec(), most));
            self.options.processors.apply(&row.history, config.answer_ends(), scores);
            let token = match &self.options.search {
                Search::Sample(sampling) => {
                    sampling.filter(scores, 1);
                    let draw = Draw {
                        source: number_of(number / self.options.sequences),
                        sequence: (number % self.options.sequences) as u64,
                        position: row.history.len() as u64 - 1,
                    };
                    sampling.token(scores, draw)
                }
                _ => likeliest(scores),
            };
            if self.options.scores {
                row.log_probability += log_probability(scores, token);
            }
            tokens.push(token);
            of_tokens.push(of_model.map(|(scores, most)| TokenScore::new(&scores, token, most)));
        }
        self.take(active, &tokens, &of_tokens, config, told);
    }

    pub fn into_answers(self) -> Vec<Vec<Answer>> {
        let answer = |row: &Row| {
            let ids = row.history[1..].to_vec();
            let score = self.options.scores.then(|| row.log_probability / ids.len().max(1) as f64);
            Answer { ids, score }
        };
        self.rows.chunks(self.options.sequences).map(|rows| rows.iter().map(answer).collect()).collect()
    }
}

/// The index of the largest value; the first of equal values.
fn likeliest(scores: &[f32]) -> u32 {
    let first = (0, f32::NEG_INFINITY);
    scores.iter().enumerate().fold(first, |best, (i, &score)| if score > best.1 { (i, score) } else { best }).0 as u32
}

impl TokenScore {
    /// The log-probability of a token by the scores of all tokens, and the `most` likeliest tokens.
    #[expect(clippy::cast_possible_truncation, reason = "ids are u32")]
    fn new(scores: &[f32], token: u32, most: usize) -> Self {
        let all = log_total(scores);
        let mut likeliest: Vec<(u32, f64)> = Vec::with_capacity(most + 1);
        for (id, &score) in scores.iter().enumerate() {
            let score = f64::from(score);
            if likeliest.len() < most || likeliest.last().is_some_and(|last| score > last.1) {
                let place = likeliest.partition_point(|other| other.1 >= score);
                likeliest.insert(place, (id as u32, score));
                likeliest.truncate(most);
            }
        }
        likeliest.iter_mut().for_each(|(_, score)| *score -= all);
        TokenScore { log_probability: f64::from(scores[token as usize]) - all, likeliest }
    }
}

/// The log-softmax of one of the scores.
fn log_probability(scores: &[f32], token: u32) -> f64 {
    f64::from(scores[token as usize]) - log_total(scores)
}

/// The logarithm of the sum of the exponentials.
fn log_total(scores: &[f32]) -> f64 {
    let largest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + scores.iter().map(|&score| (f64::from(score) - largest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_s_score_is_its_log_softmax_beside_those_of_the_likeliest() {
        let scores = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let score = TokenScore::new(&scores, 2, 3);
        let total = scores.iter().map(|&score| f64::from(score).exp()).sum::<f64>();
        let expected = |id: usize| (f64::from(scores[id]).exp() / total).ln();
        let is_near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(is_near(score.log_probability, expected(2)), "{score:?}");
        let ids: Vec<u32> = score.likeliest.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 2]);
        assert!(score.likeliest.iter().all(|&(id, score)| is_near(score, expected(id as usize))));
        assert!(TokenScore::new(&scores, 0, 0).likeliest.is_empty());
    }
}
