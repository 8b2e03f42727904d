//! Answers that grow by one token at a time: the likeliest, or one drawn at random.

use super::Answer;
use super::options::{GenerateOptions, Search};
use super::sampling::Draw;
use crate::config::Config;

/// The rows of all sources; those of one source follow each other.
pub(super) struct Rows {
    options: GenerateOptions,
    rows: Vec<Row>,
}

struct Row {
    /// The decoder's start token, and the answer.
    history: Vec<u32>,
    log_probability: f64,
    is_done: bool,
}

impl Rows {
    pub fn new(options: GenerateOptions, start_token: u32, sources: usize) -> Self {
        let row = || Row { history: vec![start_token], log_probability: 0.0, is_done: false };
        Rows { options, rows: (0..sources * options.sequences).map(|_| row()).collect() }
    }

    /// The rows of these sources, in the order of the cache.
    fn of(&self, active: &[usize]) -> Vec<usize> {
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
        self.of(active).into_iter().map(|row| *self.rows[row].history.last().expect("the start token")).collect()
    }

    /// Adds a token to each unfinished row. `told` is given the number of a row and its answer so far, and returns whether the
    /// answer ends here for another reason than its token.
    pub fn take(
        &mut self,
        active: &[usize],
        tokens: &[u32],
        config: &Config,
        told: &mut dyn FnMut(usize, &[u32]) -> bool,
    ) {
        for (number, &token) in self.of(active).into_iter().zip(tokens) {
            let row = &mut self.rows[number];
            if row.is_done {
                continue;
            }
            row.history.push(token);
            let answer = &row.history[1..];
            row.is_done = told(number, answer) || config.answer_ends().contains(&token);
        }
    }

    /// Chooses a token for each row by its scores, (R, V).
    pub fn choose(
        &mut self,
        active: &[usize],
        mut scores: Vec<f32>,
        config: &Config,
        number_of: &dyn Fn(usize) -> u64,
        told: &mut dyn FnMut(usize, &[u32]) -> bool,
    ) {
        let rows = self.of(active);
        let width = scores.len() / rows.len().max(1);
        let mut tokens = Vec::with_capacity(rows.len());
        for (&number, scores) in rows.iter().zip(scores.chunks_mut(width.max(1))) {
            let row = &mut self.rows[number];
            if row.is_done {
                tokens.push(0);
                continue;
            }
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
        }
        self.take(active, &tokens, config, told);
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

/// The log-softmax of one of the scores.
fn log_probability(scores: &[f32], token: u32) -> f64 {
    let largest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = scores.iter().map(|&score| (f64::from(score) - largest).exp()).sum();
    f64::from(scores[token as usize]) - largest - total.ln()
}
