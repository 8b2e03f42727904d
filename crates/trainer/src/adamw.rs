//! AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) with the semantics of `torch.optim.AdamW` without `amsgrad`.
//! [`t5_ops::adamw`] has the arithmetic of one parameter; this module has the options.
//!
//! State is two values of each parameter (`exp_avg`, `exp_avg_sq`): eight bytes beside the four of an f32 parameter.
//!
//! With `scale_parameter` a step is multiplied by the root mean square of its parameter, as Adafactor's: plain AdamW diverges where nanoT5
//! pretrains T5 with it, and scaled AdamW is its best optimizer. The weight decay is not scaled.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use t5_ops::{AdamwHyper, AdamwUpdate, Needs, Path, ReadyUpdates};

use crate::error::Result;
use crate::rule::{At, Changed, Rule, StateShape, check_betas, check_from_zero, elements};

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
    /// Multiplies a step by the root mean square of its parameter, or by this number if that is larger. `None`: it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_parameter: Option<f64>,
}

impl Default for AdamwOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, scale_parameter: None }
    }
}

impl AdamwOptions {
    /// The updates of these parameters.
    fn updates<'a>(&self, changes: &'a [Changed<'a>], at: At) -> Vec<AdamwUpdate<'a>> {
        let update = |changed: &'a Changed<'a>| AdamwUpdate {
            param: changed.values,
            grad: changed.gradient,
            first: &changed.state[0],
            second: &changed.state[1],
            hyper: AdamwHyper {
                learning_rate: changed.rate(&at),
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                weight_decay: changed.decay(self.weight_decay),
                step_scale: changed.step_scale,
                update: at.updates + 1,
                gradient_scale: at.gradient_scale,
                rounding: changed.rounding,
                first_row: changed.first_row,
            },
        };
        changes.iter().map(update).collect()
    }
}

impl Rule for AdamwOptions {
    fn in_words(&self) -> &'static str {
        if self.scale_parameter.is_some() { "AdamW scaled by parameter, two moments" } else { "AdamW, two moments" }
    }

    fn validate(&self) -> Result<()> {
        check_from_zero(&[
            ("optimizer.learning_rate", self.learning_rate),
            ("optimizer.eps", self.eps),
            ("optimizer.weight_decay", self.weight_decay),
            ("optimizer.eps2", self.scale_parameter.unwrap_or(0.0)),
        ])?;
        check_betas(&[("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)])
    }

    fn configured_learning_rate(&self) -> Option<f64> {
        Some(self.learning_rate)
    }

    fn state(&self, shape: &[usize]) -> Vec<StateShape> {
        ["exp_avg", "exp_avg_sq"].map(|name| (name, shape.to_vec())).into()
    }

    fn has_state_by_element(&self) -> bool {
        true
    }

    fn least_step_scale(&self) -> Option<f64> {
        self.scale_parameter
    }

    fn update(&self, changes: &[Changed], at: At) -> Result<()> {
        Ok(t5_ops::adamw_of_each(&self.updates(changes, at))?)
    }

    fn ready(&self, changes: &[Changed], at: At) -> Result<Option<ReadyUpdates>> {
        Ok(t5_ops::adamw_ready(&self.updates(changes, at))?)
    }

    fn needs(&self, parameters: &[((usize, usize), DType)]) -> Needs {
        t5_ops::adamw_needs(Path::Device, &elements(parameters))
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
