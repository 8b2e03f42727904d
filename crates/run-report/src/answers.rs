//! Sample answers of a run's evaluations, in bounded memory: the first and the newest evaluation, and some between
//! them.

use serde::{Deserialize, Serialize};

use crate::figures::clipped;

/// The most characters kept of a text.
const MAX_CHARACTERS: usize = 400;
/// The most answers kept of an evaluation.
const MAX_OF_AN_EVALUATION: usize = 12;
/// The most bytes of all texts.
const MAX_BYTES: usize = 48 << 10;
/// The most evaluations whose answers are kept.
const MAX_EVALUATIONS: usize = 16;

/// The answer to one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SampleAnswer {
    /// The prompt.
    pub prompt: String,
    /// The model's answer.
    pub answer: String,
    /// The right answer.
    pub expected: String,
}

impl SampleAnswer {
    /// Whether the answer is right.
    pub fn is_right(&self) -> bool {
        self.answer.trim() == self.expected.trim()
    }

    fn bytes(&self) -> usize {
        self.prompt.len() + self.answer.len() + self.expected.len()
    }
}

/// Answers, by the step of their evaluation.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    kept: Vec<(u64, Vec<SampleAnswer>)>,
}

impl Answers {
    /// Adds the answers of the evaluation at `step`. Earlier answers of the same step are replaced.
    pub fn note(&mut self, step: u64, answers: Vec<SampleAnswer>) {
        let cut = |text: String| clipped(&text, MAX_CHARACTERS);
        let answers: Vec<SampleAnswer> = answers
            .into_iter()
            .take(MAX_OF_AN_EVALUATION)
            .map(|SampleAnswer { prompt, answer, expected }| SampleAnswer {
                prompt: cut(prompt),
                answer: cut(answer),
                expected: cut(expected),
            })
            .collect();
        if answers.is_empty() {
            return;
        }
        self.kept.retain(|(other, _)| *other != step);
        self.kept.push((step, answers));
        while self.kept.len() > MAX_EVALUATIONS || (self.bytes() > MAX_BYTES && self.kept.len() > 2) {
            self.thin();
        }
        while self.bytes() > MAX_BYTES {
            self.kept.iter_mut().for_each(|(_, answers)| answers.truncate((answers.len() / 2).max(1)));
            if self.kept.iter().all(|(_, answers)| answers.len() == 1) {
                break;
            }
        }
    }

    /// Removes the evaluation that is nearest to its neighbours, but never the first or the last.
    fn thin(&mut self) {
        let gap = |at: usize| self.kept[at + 1].0.saturating_sub(self.kept[at - 1].0);
        if let Some(at) = (1..self.kept.len().saturating_sub(1)).min_by_key(|at| gap(*at)) {
            self.kept.remove(at);
        }
    }

    fn bytes(&self) -> usize {
        self.kept.iter().flat_map(|(_, answers)| answers).map(SampleAnswer::bytes).sum()
    }

    /// The answers, oldest first, with the steps of their evaluations.
    pub fn by_step(&self) -> &[(u64, Vec<SampleAnswer>)] {
        &self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(characters: usize) -> SampleAnswer {
        SampleAnswer { prompt: "字".repeat(characters), answer: "<b>".into(), expected: "<b> ".into() }
    }

    #[test]
    fn the_first_and_the_newest_stay_and_the_bytes_are_bounded() {
        let mut answers = Answers::default();
        for step in 0..1000 {
            answers.note(step * 10, vec![answer(2000); 50]);
        }
        let steps: Vec<u64> = answers.by_step().iter().map(|(step, _)| *step).collect();
        assert_eq!((steps[0], steps[steps.len() - 1]), (0, 9990));
        assert!(answers.bytes() <= MAX_BYTES && steps.len() <= MAX_EVALUATIONS, "{}", answers.bytes());
        assert!(answers.by_step()[0].1[0].is_right());
        answers.note(9990, vec![answer(1)]);
        assert_eq!(answers.by_step().last().map(|(_, of)| of.len()), Some(1), "the same step is replaced");
    }
}
