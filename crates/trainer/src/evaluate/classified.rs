//! The labels that a classifier gives.

use t5::{Problem, T5};
use t5_ops::IGNORED_LABEL;

use super::{Evaluation, EvaluationBatch};
use crate::error::Result;
use crate::trainer::{Batch, gather};

impl Evaluation {
    /// The likeliest labels of some samples: one, one of each token that has a label, or for each label whether it is right. A number is
    /// given by its bits.
    pub(super) fn classify(&self, model: &T5, batch: &EvaluationBatch, samples: &[usize]) -> Result<Vec<Vec<u32>>> {
        let micro_batch = gather(&Batch { sources: batch.sources, targets: batch.targets }, samples, 0, model)?;
        let logits = model.class_logits(&micro_batch, self.options.context.activations, &|| ())?;
        let labels = model.config().head.labels();
        let (outputs, problem) = labels.map_or((1, Problem::OneLabel), |of| (of.names.len(), of.problem));
        let best = |logits: &[f32]| {
            let first_largest = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
            match problem {
                Problem::OneLabel => vec![(0..outputs).fold(0, first_largest) as u32],
                Problem::LabelSet => logits.iter().map(|logit| u32::from(*logit > 0.0)).collect(),
                Problem::Number => vec![logits[0].to_bits()],
            }
        };
        let of_sample = logits.chunks(logits.len() / samples.len().max(1)).zip(samples);
        let labelled = |(logits, &sample): (&[f32], &usize)| {
            let rows = logits.chunks(outputs).zip(&batch.targets[sample]);
            rows.filter(|(_, label)| **label != IGNORED_LABEL).flat_map(|(logits, _)| best(logits)).collect()
        };
        Ok(of_sample.map(labelled).collect())
    }
}
