//! Rules that forbid tokens or make them less likely before one is chosen, like the logits processors of transformers and in
//! their order: repetition penalty, repeated n-grams, an end before the least length.
//!
//! A history is the decoder's whole input: its start token, and the tokens generated so far. The scores are logits,
//! or log-probabilities in a beam search.

/// The settings. The defaults change nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processors {
    /// Positive scores of tokens in the history are divided by this, negative ones multiplied; 1: off.
    pub repetition_penalty: f32,
    /// No sequence of so many tokens occurs twice; 0: off.
    pub no_repeat_ngram: usize,
    /// An answer has at least so many tokens before its end.
    pub min_new_tokens: usize,
}

impl Default for Processors {
    fn default() -> Self {
        Processors { repetition_penalty: 1.0, no_repeat_ngram: 0, min_new_tokens: 0 }
    }
}

impl Processors {
    /// Whether these settings change nothing.
    pub fn are_off(&self) -> bool {
        *self == Processors::default()
    }

    /// Changes the scores (V) of the token after `history`; `eos` are the tokens that end an answer.
    pub fn apply(&self, history: &[u32], eos: &[u32], scores: &mut [f32]) {
        if self.repetition_penalty != 1.0 {
            let mut seen = history.to_vec();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some(score) = scores.get_mut(token as usize) {
                    let penalty = self.repetition_penalty;
                    *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
                }
            }
        }
        let mut forbid = |token: u32| {
            if let Some(score) = scores.get_mut(token as usize) {
                *score = f32::NEG_INFINITY;
            }
        };
        if self.no_repeat_ngram > 0 && history.len() >= self.no_repeat_ngram {
            let (_, begun) = history.split_at(history.len() + 1 - self.no_repeat_ngram);
            for run in history.windows(self.no_repeat_ngram) {
                if let Some((last, first)) = run.split_last()
                    && first == begun
                {
                    forbid(*last);
                }
            }
        }
        if history.len().saturating_sub(1) < self.min_new_tokens {
            eos.iter().for_each(|&token| forbid(token));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    #[track_caller]
    fn check(processors: Processors, history: &[u32], expected: [f32; 5]) {
        let mut scores = [2.0, -1.0, 4.0, -3.0, 0.0];
        processors.apply(history, &[1], &mut scores);
        assert_eq!(scores, expected, "{processors:?} after {history:?}");
    }

    #[test]
    fn a_token_is_made_less_likely_once_however_often_it_came() {
        let penalty = Processors { repetition_penalty: 2.0, ..Processors::default() };
        check(penalty, &[0, 3, 3, 9], [1.0, -1.0, 4.0, -6.0, 0.0]);
    }

    #[test]
    fn an_ngram_that_came_is_not_completed_again_and_the_start_token_counts() {
        let no_repeat = |no_repeat_ngram| Processors { no_repeat_ngram, ..Processors::default() };
        check(no_repeat(1), &[0, 3], [NEVER, -1.0, 4.0, NEVER, 0.0]);
        check(no_repeat(2), &[0, 3, 2, 0], [2.0, -1.0, 4.0, NEVER, 0.0]);
        check(no_repeat(3), &[0, 3, 2, 4, 0, 3], [2.0, -1.0, NEVER, -3.0, 0.0]);
        check(no_repeat(3), &[0, 3], [2.0, -1.0, 4.0, -3.0, 0.0]);
    }

    #[test]
    fn an_answer_does_not_end_before_its_least_length() {
        let longer = Processors { min_new_tokens: 2, ..Processors::default() };
        check(longer, &[0], [2.0, NEVER, 4.0, -3.0, 0.0]);
        check(longer, &[0, 3], [2.0, NEVER, 4.0, -3.0, 0.0]);
        check(longer, &[0, 3, 3], [2.0, -1.0, 4.0, -3.0, 0.0]);
    }
}
