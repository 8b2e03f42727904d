//! The scores of lists of texts.

use t5::{EvalContext, StepContext, T5};

use super::{Evaluation, EvaluationBatch};
use crate::error::Result;
use crate::micro_batches;
use crate::ranking::{self, RankedText, Ranking};
use crate::trainer::{self, Batch, gather};

impl Evaluation {
    /// The texts of a batch's lists with their scores. `None` when interrupted.
    pub(super) fn rank(
        &self,
        model: &T5,
        (ranking, answers): (&Ranking, &[u32]),
        batch: &EvaluationBatch,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<RankedText>>> {
        let EvalContext { activations, loss_chunk_rows } = self.options.context;
        let cx = StepContext::without_dropout(activations, loss_chunk_rows).measuring(ranking.loss.is_of_logits());
        let mut texts = batch.labels.texts();
        let samples = Batch { sources: batch.sources, targets: batch.targets };
        let lengths = trainer::lengths(&samples, &model.config().head);
        for cut in micro_batches::cut(&lengths, self.options.micro_batch_samples.max(1)) {
            let micro_batch = gather(&samples, &cut, 0, model)?.with_answers(answers.to_vec());
            let Some(losses) = model.losses_of_step(&[micro_batch], &cx, interrupted)? else { return Ok(None) };
            for (&text, losses) in cut.iter().zip(losses.concat().chunks(answers.len().max(1))) {
                let text = &mut texts[text];
                (text.value, text.score) = match losses {
                    &[first, second] => {
                        (-losses[usize::from(text.gain <= 0.0)], ranking::score_of_answers([first, second]))
                    }
                    losses => (-losses[0], -losses[0]),
                };
            }
        }
        Ok(Some(texts))
    }
}
