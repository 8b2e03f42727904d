//! The losses of single samples, without gradients.

use super::T5;
use crate::context::{EvalContext, StepContext};
use crate::error::Result;
use crate::micro_batch::MicroBatch;
use crate::step::inference::infer;
use crate::step::schedule::Outline;

impl T5 {
    /// The cross-entropy of each sample's target, summed over its tokens: minus the log-probability of the whole target. One list for each
    /// micro-batch. Without dropout; weights in files are read once for all micro-batches. `interrupted` is as in [`T5::loss_unless`].
    ///
    /// # Errors
    /// An operation fails, or a weight cannot be read.
    pub fn losses_of_samples(
        &self,
        batches: &[MicroBatch],
        cx: &EvalContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f64>>>> {
        self.losses_of_step(batches, &StepContext::without_dropout(cx.activations, cx.loss_chunk_rows), interrupted)
    }

    /// As [`T5::losses_of_samples`], with the dropout of a step, and minus the logits of targets where these are its loss.
    ///
    /// # Errors
    /// As [`T5::losses_of_samples`].
    pub fn losses_of_step(
        &self,
        batches: &[MicroBatch],
        cx: &StepContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<f64>>>> {
        let events = Outline::inference(&self.config, self.has_paged_weights()).losses_of_samples(batches.len());
        let step = infer(&self.network, &events, cx, batches, interrupted)?;
        Ok(step.map(|mut step| step.take_losses_of_samples()))
    }
}
