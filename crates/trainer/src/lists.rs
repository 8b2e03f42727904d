//! The pass that computes the scores of a batch of lists of texts, before the step that trains on their loss ([`crate::ranking`]).

use t5::StepContext;

use crate::error::{Error, Result};
use crate::ranking::{RankedText, Ranking, RowLabels};
use crate::trainer::{Batch, StepPlan, Trainer};

impl Trainer {
    /// The texts of this process with their values, in a batch that `cut` divides into micro-batches; `None` if `interrupted` returned true.
    pub(crate) fn rank(
        &self,
        (batch, labels): (&Batch, RowLabels),
        (cut, first_sample): (&[Vec<usize>], usize),
        (plan, cx): (&StepPlan, &StepContext),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<RankedText>>> {
        let mut texts = labels.texts();
        if texts.len() != batch.sources.len() {
            return Err(Error::BatchShape { sources: batch.sources.len(), targets: texts.len() });
        }
        for pass in self.passes(batch, (cut, first_sample), plan) {
            let (samples, micro_batches) = pass?;
            let Some(losses) = self.model().losses_of_step(&micro_batches, cx, interrupted)? else { return Ok(None) };
            for (text, loss) in samples.into_iter().zip(losses.concat()) {
                texts[text].value = -loss;
            }
        }
        Ok(Some(texts))
    }

    /// The loss of the whole batch, and the weight of each text of this process. If the texts of a process are an error, all processes fail.
    pub(crate) fn weigh_texts(&self, ranking: &Ranking, mine: Result<Vec<RankedText>>) -> Result<(f64, Vec<f64>)> {
        let numbers = mine.map(|texts| texts.iter().flat_map(RankedText::numbers).collect::<Vec<f64>>());
        let (all, mine) = self.numbers_of_all(numbers)?;
        let texts: Vec<RankedText> = all.as_chunks().0.iter().copied().map(RankedText::from_numbers).collect();
        let (loss, weights) = ranking.of_batch(&texts);
        Ok((loss, weights[mine.start / RankedText::NUMBERS..mine.end / RankedText::NUMBERS].to_vec()))
    }
}
