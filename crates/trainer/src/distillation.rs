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
    /// The student learns from so many of the teacher's largest logits of each token; the others count as minus infinity. `None`: from all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
}

impl From<Distillation> for t5_ops::Distillation {
    fn from(Distillation { alpha, temperature, .. }: Distillation) -> Self {
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
        if self.top_k == Some(0) {
            return Err(Error::invalid_option("distill.top_k", "at least 1", 0));
        }
        Ok(())
    }
}
