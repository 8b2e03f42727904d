//! What the loss of a batch needs before its step, and the micro-batches that have it: weights of samples, gradients of the texts' vectors, a
//! teacher's states.

use candle_core::Tensor;
use t5::{MicroBatch, StepContext};

use crate::contrastive::ContrastiveStats;
use crate::error::{Error, Result};
use crate::pairs::Weighed;
use crate::ranking::RowLabels;
use crate::stats::StepStats;
use crate::trainer::{Batch, StepPlan, Trainer, gather};

/// What the passes before a step found.
pub(crate) struct Known {
    weighed: Weighed,
    /// The loss of the vectors, and its gradient by each vector of this process.
    pulled: Option<(ContrastiveStats, Vec<f64>)>,
    /// The teacher's states of each micro-batch.
    taught: Option<Vec<Tensor>>,
    /// The factor of each class in the loss of a classifier.
    class_factors: Option<Vec<f64>>,
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
                Some(mine) => Some(self.pull(of, mine.map_err(Error::before_any_change))?),
            },
        };
        let taught = match self.options.distillation {
            None => None,
            Some(_) => match self.teacher_states(batch, cut, interrupted).transpose() {
                None => return Ok(None),
                Some(states) => Some(states.map_err(Error::before_any_change)?),
            },
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
        let mut states = known.taught.take().into_iter().flatten();
        let gathered = cut.iter().map(|samples| {
            let micro_batch = gather(batch, samples, first_sample, &self.model)?;
            let micro_batch = match (teacher, states.next()) {
                (Some((teacher, of)), Some(states)) => teacher.teach(micro_batch, states, of.into()),
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
