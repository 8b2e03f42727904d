//! Lion (Chen et al., 2023, arXiv 2302.06675). [`t5_ops::lion`] has the arithmetic of one parameter; this module has the options.
//!
//! State is one value of each parameter (`exp_avg`): half of AdamW's.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use t5_ops::{LionHyper, Needs, Path};

use crate::error::Result;
use crate::rule::{At, Changed, Rule, StateTensor, check_betas, check_from_zero, elements};

/// The options of Lion, with the defaults of its authors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LionOptions {
    /// The learning rate, which the schedule multiplies. A third to a tenth of AdamW's.
    pub learning_rate: f64,
    /// The share of the moment in the direction of an update.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay, times the learning rate. Three to ten times AdamW's.
    pub weight_decay: f64,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

impl Rule for LionOptions {
    fn in_words(&self) -> &'static str {
        "Lion, one moment"
    }

    fn validate(&self) -> Result<()> {
        check_from_zero(&[
            ("optimizer.learning_rate", self.learning_rate),
            ("optimizer.weight_decay", self.weight_decay),
        ])?;
        check_betas(&[("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)])
    }

    fn configured_learning_rate(&self) -> Option<f64> {
        Some(self.learning_rate)
    }

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::new("exp_avg", shape)]
    }

    fn has_state_by_element(&self) -> bool {
        true
    }

    fn update(&self, changes: &[Changed], at: At) -> Result<()> {
        for changed in changes {
            let hyper = LionHyper {
                learning_rate: changed.rate(&at),
                beta1: self.beta1,
                beta2: self.beta2,
                weight_decay: changed.decay(self.weight_decay),
                gradient_scale: at.gradient_scale,
                rounding: changed.rounding,
                first_row: changed.first_row,
            };
            t5_ops::lion(changed.values, changed.gradient, &changed.state[0], &hyper)?;
        }
        Ok(())
    }

    fn needs(&self, parameters: &[((usize, usize), DType)]) -> Needs {
        t5_ops::lion_needs(Path::Device, &elements(parameters))
    }
}
