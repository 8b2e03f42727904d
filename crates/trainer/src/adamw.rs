//! AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) with the semantics of `torch.optim.AdamW` without `amsgrad`.
//! [`t5_ops::adamw`] has the arithmetic of one parameter; this module has the options.
//!
//! State is two values of each parameter (`exp_avg`, `exp_avg_sq`): eight bytes beside the four of an f32 parameter.
//!
//! With `scale_parameter` a step is multiplied by the root mean square of its parameter, as Adafactor's: plain AdamW diverges where nanoT5
//! pretrains T5 with it, and scaled AdamW is its best optimizer. The weight decay is not scaled.
//!
//! With [`StatePrecision::Int8`] the state of a value is two bytes, as of `bitsandbytes.optim.AdamW8bit`; see
//! [`t5_ops::adamw_int8_of_each`]. Blocks cross rows, so this state stays in memory.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use t5_ops::{AdamwHyper, AdamwInt8Update, AdamwUpdate, Needs, Path, QuantisedMoment, ReadyUpdates};

use crate::error::Result;
use crate::rule::{At, Changed, Rule, StateTensor, check_betas, check_from_zero, elements};

/// Smaller parameters keep their moments in f32, as bitsandbytes' `min_8bit_size` says.
const LEAST_INT8: usize = 4096;

/// How moments are held between updates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StatePrecision {
    /// As f32.
    #[default]
    F32,
    /// A byte a value, and the largest magnitude of each block of 256.
    Int8,
}

impl StatePrecision {
    fn is_f32(&self) -> bool {
        *self == Self::F32
    }
}

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
    /// How moments are held between updates.
    #[serde(default, skip_serializing_if = "StatePrecision::is_f32")]
    pub state_precision: StatePrecision,
}

impl Default for AdamwOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            scale_parameter: None,
            state_precision: StatePrecision::F32,
        }
    }
}

impl AdamwOptions {
    /// Whether the moments of a parameter of this many elements are in int8.
    fn is_int8(&self, elements: usize) -> bool {
        self.state_precision == StatePrecision::Int8 && elements >= LEAST_INT8
    }

    fn hyper(&self, changed: &Changed, at: At) -> AdamwHyper {
        AdamwHyper {
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
        }
    }

    /// The updates of parameters whose moments are in f32.
    fn updates<'a>(&self, changes: &'a [Changed<'a>], at: At) -> Vec<AdamwUpdate<'a>> {
        let update = |changed: &'a Changed<'a>| match changed.state {
            [first, second] => {
                let hyper = self.hyper(changed, at);
                Some(AdamwUpdate { param: changed.values, grad: changed.gradient, first, second, hyper })
            }
            _ => None,
        };
        changes.iter().filter_map(update).collect()
    }

    /// The updates of parameters whose moments are in int8.
    fn int8_updates<'a>(&self, changes: &'a [Changed<'a>], at: At) -> Vec<AdamwInt8Update<'a>> {
        let update = |changed: &'a Changed<'a>| match changed.state {
            [first, first_largest, second, second_largest] => {
                let moments = [(first, first_largest), (second, second_largest)];
                let moments = moments.map(|(codes, largest)| QuantisedMoment { codes, largest });
                let hyper = self.hyper(changed, at);
                Some(AdamwInt8Update { param: changed.values, grad: changed.gradient, moments, hyper })
            }
            _ => None,
        };
        changes.iter().filter_map(update).collect()
    }
}

impl Rule for AdamwOptions {
    fn in_words(&self) -> &'static str {
        match (self.scale_parameter.is_some(), self.state_precision) {
            (false, StatePrecision::F32) => "AdamW, two moments",
            (false, StatePrecision::Int8) => "AdamW, two moments in int8",
            (true, StatePrecision::F32) => "AdamW scaled by parameter, two moments",
            (true, StatePrecision::Int8) => "AdamW scaled by parameter, two moments in int8",
        }
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

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        let elements = shape.iter().product();
        if !self.is_int8(elements) {
            return ["exp_avg", "exp_avg_sq"].map(|name| StateTensor::new(name, shape)).into();
        }
        let moment = |codes, largest| {
            let largest = StateTensor::new(largest, &[t5_ops::moment_blocks(elements)]).with_dtype(DType::F32);
            [StateTensor::new(codes, shape).with_dtype(DType::U8), largest]
        };
        [moment("exp_avg", "exp_avg_absmax"), moment("exp_avg_sq", "exp_avg_sq_absmax")].concat()
    }

    fn has_state_by_element(&self) -> bool {
        self.state_precision == StatePrecision::F32
    }

    fn least_step_scale(&self) -> Option<f64> {
        self.scale_parameter
    }

    fn update(&self, changes: &[Changed], at: At) -> Result<()> {
        t5_ops::adamw_of_each(&self.updates(changes, at))?;
        Ok(t5_ops::adamw_int8_of_each(&self.int8_updates(changes, at))?)
    }

    fn ready(&self, changes: &[Changed], at: At) -> Result<Option<ReadyUpdates>> {
        match self.state_precision {
            StatePrecision::F32 => Ok(t5_ops::adamw_ready(&self.updates(changes, at))?),
            StatePrecision::Int8 => Ok(None),
        }
    }

    fn needs(&self, parameters: &[((usize, usize), DType)]) -> Needs {
        let is_int8 = |&(elements, _): &(u64, DType)| self.is_int8(elements as usize);
        let (int8, others): (Vec<_>, Vec<_>) = elements(parameters).into_iter().partition(is_int8);
        let [int8, others] =
            [t5_ops::adamw_int8_needs(Path::Device, &int8), t5_ops::adamw_needs(Path::Device, &others)];
        Needs::most([others, int8])
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
