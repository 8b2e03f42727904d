//! The weight of each class in the loss of a classifier.
//!
//! Where one label is right, the loss is `sum of w[y] c / sum of w[y]` over the labels of the whole batch, as `torch.nn.CrossEntropyLoss(weight=w)`
//! has it. Where any number is right, w is the `pos_weight` of `torch.nn.BCEWithLogitsLoss`, and the loss is the mean over rows and labels.

use t5_ops::IGNORED_LABEL;

use crate::error::Result;
use crate::trainer::{Batch, Trainer};

impl Trainer {
    /// The factor of each class in a loss that is divided by the number of labels of the whole batch, of which `batch` is the share of this
    /// process. `None`: the loss has no weights.
    pub(crate) fn class_factors(&self, batch: &Batch) -> Result<Option<Vec<f64>>> {
        let weights = &self.options.class_weights;
        if weights.is_empty() {
            return Ok(None);
        }
        if self.model.config().head.labels().is_some_and(t5::Labels::is_set) {
            return Ok(Some(weights.clone()));
        }
        let mut counts = vec![0.0; weights.len()];
        for label in batch.targets.iter().flatten().filter(|label| **label != IGNORED_LABEL) {
            // A label that the model does not have is refused with its micro-batch.
            counts.get_mut(*label as usize).into_iter().for_each(|count| *count += 1.0);
        }
        // Whole numbers: their sums are the same for any number of processes.
        let (all, _) = self.numbers_of_all(Ok(counts))?;
        let (mut labels, mut total) = (0.0, 0.0);
        for (count, weight) in all.iter().zip(weights.iter().cycle()) {
            (labels, total) = (labels + count, total + count * weight);
        }
        // No label counts.
        let scale = if total > 0.0 { labels / total } else { 0.0 };
        Ok(Some(weights.iter().map(|weight| weight * scale).collect()))
    }
}
