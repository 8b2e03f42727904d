//! What the loss of a batch needs before its step, and the micro-batches that have it: weights of samples, gradients of the texts' vectors, a
//! teacher's states.

use candle_core::Tensor;
use t5::{MicroBatch, StepContext};
use t5_ops::TopLogits;

use crate::error::{Error, Result};
use crate::pairs::Weighed;
use crate::ranking::RowLabels;
use crate::stats::ContrastiveStats;
use crate::stats::StepStats;
use crate::trainer::{Batch, StepPlan, Trainer, gather};

/// What a teacher says about a micro-batch.
enum Taught {
    /// Its decoder's output.
    States(Tensor),
    /// Its largest logits.
    Top(TopLogits),
}

/// What the passes before a step found.
pub(crate) struct Known {
    weighed: Weighed,
    /// The loss of the vectors, and its gradient by each vector of this process.
    pulled: Option<(ContrastiveStats, Vec<f64>)>,
    /// What the teacher says about each micro-batch.
    taught: Option<Vec<Taught>>,
    /// The factor of each class in the loss of a classifier.
    class_factors: Option<Vec<f64>>,
}

fn said<T>(all: Vec<T>, of: fn(T) -> Taught) -> Vec<Taught> {
    all.into_iter().map(of).collect()
}

impl Known {
    /// Notes the loss of the batch.
    pub fn note(&self, stats: &mut StepStats) {
        self.weighed.note(stats);
        if let Some((contrastive, _)) = &self.pulled {
            (stats.loss, stats.contrastive) = (contrastive.loss, Some(*contrastive));
        }
    }
}

impl Trainer {
    /// The passes that the loss needs before a step; `None` if `interrupted` returned true.
    ///
    /// # Errors
    /// A pass of a process fails, before any change.
    pub(crate) fn passes_before(
        &self,
        (batch, labels): (&Batch, RowLabels),
        cut: (&[Vec<usize>], usize),
        (shards, plan, cx): (&[usize], &StepPlan, &StepContext),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Known>> {
        let class_factors = self.class_factors(batch)?;
        let weighed = self.weigh_samples((batch, labels), cut, (shards, plan, cx), interrupted)?;
        let Some(weighed) = weighed else { return Ok(None) };
        let pulled = match &self.options.contrastive {
            None => None,
            Some(of) => match self.vectors(of, batch, cut, cx, interrupted).transpose() {
                None => return Ok(None),
                Some(mine) => Some(self.pull(of, mine.map_err(Error::before_any_change), labels.gains)?),
            },
        };
        let taught = match self.options.distillation {
            None => None,
            Some(of) => {
                let said = match of.top_k {
                    None => {
                        self.teacher_states(batch, cut, interrupted).map(|all| all.map(|all| said(all, Taught::States)))
                    }
                    Some(count) => {
                        let numbers = (count, plan.levers.loss_chunk_rows);
                        let all = self.teacher_logits(batch, cut, numbers, interrupted);
                        all.map(|all| all.map(|all| said(all, Taught::Top)))
                    }
                };
                match said.map_err(Error::before_any_change)? {
                    None => return Ok(None),
                    said => said,
                }
            }
        };
        Ok(Some(Known { weighed, pulled, taught, class_factors }))
    }

    /// The micro-batches of a step with what its loss needs. The teacher's states move into them.
    pub(crate) fn micro_batches(
        &self,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        known: &mut Known,
    ) -> Result<Vec<MicroBatch>> {
        let teacher = self.frozen.as_ref().zip(self.options.distillation);
        let pulled = known.pulled.as_ref().zip(self.options.contrastive.as_ref());
        let mut said = known.taught.take().into_iter().flatten();
        let gathered = cut.iter().map(|samples| {
            let micro_batch = gather(batch, samples, first_sample, &self.model)?;
            let micro_batch = match (teacher, said.next()) {
                (Some((teacher, of)), Some(Taught::States(states))) => teacher.teach(micro_batch, states, of.into()),
                (Some((_, of)), Some(Taught::Top(top))) => micro_batch.taught(top, of.into()),
                _ => micro_batch,
            };
            let micro_batch = match &known.class_factors {
                Some(factors) => micro_batch.with_class_factors(factors.clone()),
                None => micro_batch,
            };
            Ok(match (&known.weighed.weights, pulled) {
                (Some(weights), _) => micro_batch.weighted(samples.iter().map(|&sample| weights[sample]).collect()),
                (None, Some(((_, gradients), of))) => {
                    let width = self.model.config().vector_width();
                    let of_text = |&text: &usize| &gradients[text * width..][..width];
                    micro_batch.pulled(of.pooling, samples.iter().flat_map(of_text).copied().collect())
                }
                (None, None) => micro_batch,
            })
        });
        gathered.collect()
    }
}
