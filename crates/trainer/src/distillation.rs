//! A student's loss beside its teacher's logits ([`t5_ops::Distillation`]).

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

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
