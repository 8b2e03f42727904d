//! A student's loss beside its teacher's logits ([`t5_ops::Distillation`]), and the pass in which the teacher reads a batch.
//!
//! The teacher reads each micro-batch before the step, and its decoder's output is kept until the micro-batch's loss. There its head makes
//! logits of some rows at a time, beside the student's. So logits never exist whole.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::trainer::{Batch, Trainer, gather};

/// The numbers of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distillation {
    /// The share of the teacher, from 0 to 1. The cross-entropy has the rest.
    pub alpha: f64,
    /// Logits of both are divided by this, above 0.
    pub temperature: f64,
}

impl From<Distillation> for t5_ops::Distillation {
    fn from(Distillation { alpha, temperature }: Distillation) -> Self {
        Self { alpha, temperature }
    }
}

impl Distillation {
    /// # Errors
    /// [`Error::InvalidOption`].
    pub(crate) fn validate(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.alpha) {
            return Err(Error::invalid_option("distill.alpha", "a number from 0 to 1", self.alpha));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return Err(Error::invalid_option("distill.temperature", "a finite number above 0", self.temperature));
        }
        Ok(())
    }
}

impl Trainer {
    /// The teacher's states of each micro-batch of a batch of this process; `None` if `interrupted` returned true.
    pub(crate) fn teacher_states(
        &self,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Tensor>>> {
        let expected = "a model that the student learns from";
        let teacher = self.frozen().ok_or_else(|| Error::invalid_option("distill.teacher", expected, "none"))?;
        let states = cut.iter().map(|samples| {
            let micro_batch = gather(batch, samples, first_sample, self.model())?;
            Ok(teacher.states(&micro_batch, self.options().precision.activations(), interrupted)?)
        });
        states.collect()
    }
}
