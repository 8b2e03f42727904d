//! AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) with the semantics of `torch.optim.AdamW` without `amsgrad`.
//! [`t5_ops::adamw`] has the arithmetic of one parameter; this module has the options.
//!
//! State is two values of each parameter (`exp_avg`, `exp_avg_sq`): eight bytes beside the four of an f32 parameter.

use candle_core::{Result as TensorResult, Tensor};
use serde::{Deserialize, Serialize};
use t5_ops::{AdamwHyper, Rounding};

use crate::error::{Error, Result};

/// The options of `torch.optim.AdamW`, with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamwOptions {
    /// The learning rate, which the schedule multiplies.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
}

impl Default for AdamwOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// The moments of one parameter, each with the parameter's shape.
#[derive(Debug)]
pub(crate) struct Moments {
    pub first: Tensor,
    pub second: Tensor,
}

impl AdamwOptions {
    /// Refuses the options that torch refuses.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the option.
    pub fn validate(&self) -> Result<()> {
        let numbers = [
            ("optimizer.learning_rate", self.learning_rate),
            ("optimizer.eps", self.eps),
            ("optimizer.weight_decay", self.weight_decay),
        ];
        for (name, value) in numbers {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_option(name, "a finite number from 0 up", value));
            }
        }
        for (name, beta) in [("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::invalid_option(name, "a number from 0 up and below 1", beta));
            }
        }
        Ok(())
    }

    /// The numbers of the update after `updates` updates.
    pub(crate) fn hyper(
        &self,
        updates: u64,
        learning_rate: f64,
        gradient_scale: f64,
        rounding: Rounding,
    ) -> AdamwHyper {
        AdamwHyper {
            learning_rate,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            update: updates + 1,
            gradient_scale,
            rounding,
            first_row: 0,
        }
    }

    /// Zeroed moments of a parameter of this shape; `zeros` allocates them.
    pub(crate) fn moments(
        &self,
        shape: &[usize],
        zeros: impl Fn(&[usize]) -> TensorResult<Tensor>,
    ) -> TensorResult<Moments> {
        Ok(Moments { first: zeros(shape)?, second: zeros(shape)? })
    }

    /// Number of state values of one parameter of this shape.
    pub(crate) fn state_elements(&self, shape: &[usize]) -> u64 {
        2 * shape.iter().map(|&n| n as u64).product::<u64>()
    }
}

impl Moments {
    /// The tensors with their names.
    pub(crate) fn named(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("exp_avg", &self.first), ("exp_avg_sq", &self.second)]
    }

    pub(crate) fn named_mut(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        vec![("exp_avg", &mut self.first), ("exp_avg_sq", &mut self.second)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_torch_refuses_are_refused_by_name() {
        assert!(AdamwOptions::default().validate().is_ok());
        let check = |change: &dyn Fn(&mut AdamwOptions), name: &str| {
            let mut options = AdamwOptions::default();
            change(&mut options);
            let error = options.validate().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        check(&|o| o.learning_rate = f64::NAN, "optimizer.learning_rate");
        check(&|o| o.beta1 = 1.0, "optimizer.beta1");
        check(&|o| o.beta2 = -0.1, "optimizer.beta2");
        check(&|o| o.eps = f64::INFINITY, "optimizer.eps");
        check(&|o| o.weight_decay = -1.0, "optimizer.weight_decay");
    }
}
