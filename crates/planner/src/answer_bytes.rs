//! The bytes of answers of any length. A server uses them to decide whether to admit a request.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::DType;
use memory_policy::MemorySpace;
use t5::AnswerShape;
use t5::step::count::{Counter, Precisions};

use crate::error::Result;

/// Lengths are rounded up to a multiple of this many tokens, because a count goes through every layer.
const STEP_TOKENS: usize = 16;

/// The most counts that are kept.
const MAX_KEPT: usize = 4096;

/// Counts the bytes of answers beside the parameters, as the bill does: keys and values, workspace, packed operands.
///
/// Several sources together hold at most the sum of the bytes that each holds alone.
pub struct AnswerBytes {
    passes: Counter,
    known: RefCell<HashMap<(usize, usize, AnswerShape), u64>>,
}

impl AnswerBytes {
    /// Counts for a model with these dtypes of weights and of activations, whose tensors are at `place`.
    ///
    /// # Errors
    /// A config that is not a T5's.
    pub fn new(model: &t5::Config, (parameters, activations): (DType, DType), place: MemorySpace) -> Result<Self> {
        let precisions = Precisions { parameters, activations, gradients: DType::F32 };
        let passes = Counter::new(model, precisions, 0.0, &|_| false)?;
        let passes = if place == MemorySpace::Device { passes.on_device(&|_| [0; 2]) } else { passes };
        Ok(Self { passes, known: RefCell::default() })
    }

    /// The bytes of `samples` sources of `source_tokens` tokens, answered together. Lengths are rounded up.
    pub fn count(&self, samples: usize, source_tokens: usize, answer: AnswerShape) -> u64 {
        let rounded = |tokens: usize| tokens.max(1).next_multiple_of(STEP_TOKENS);
        let answer = AnswerShape { max_new_tokens: rounded(answer.max_new_tokens), ..answer };
        let asked = (samples, rounded(source_tokens), answer);
        if let Some(&bytes) = self.known.borrow().get(&asked) {
            return bytes;
        }
        let count = self.passes.generation(asked.0, asked.1, &answer);
        let bytes = count.cache + count.workspace + count.packed;
        let mut known = self.known.borrow_mut();
        if known.len() >= MAX_KEPT {
            known.clear();
        }
        known.insert(asked, bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_hold_more_the_longer_and_the_more_they_are_and_never_more_than_alone() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let bytes = AnswerBytes::new(&model, (DType::F32, DType::F32), MemorySpace::Host).expect("a T5");
        let alone = bytes.count(1, 64, AnswerShape::greedy(64));
        assert_eq!(alone, bytes.count(1, 60, AnswerShape::greedy(50)));
        assert!(
            bytes.count(1, 128, AnswerShape::greedy(64)) > alone
                && bytes.count(1, 64, AnswerShape::greedy(128)) > alone
        );
        let beams = AnswerShape { rows: 4, looks_at_scores: true, ..AnswerShape::greedy(64) };
        assert!(bytes.count(1, 64, beams) > alone);
        for samples in [2, 5, 16] {
            let together = bytes.count(samples, 64, AnswerShape::greedy(64));
            assert!(together > alone && together <= samples as u64 * alone, "{samples}: {together}, alone {alone}");
        }
    }
}
