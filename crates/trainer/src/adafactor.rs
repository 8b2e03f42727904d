//! Adafactor (Shazeer & Stern, 2018, arXiv 1804.04235) with the semantics of `transformers.optimization.Adafactor`, option
//! by option. The arithmetic of one parameter is [`t5_ops::adafactor`]; here are the options and the state.
//!
//! Invariants:
//! * A frozen parameter has no state.
//! * State of a matrix (R, C) is a row of R and a column of C values (`exp_avg_sq_row`, `exp_avg_sq_col`); of a vector one
//!   value each (`exp_avg_sq`); with `beta1` one more value per parameter (`exp_avg`). It is f32, or f64 for an f64 model.
//! * `updates` counts the updates that were made, as transformers' `state["step"]`; a skipped step is not one.
//!
//! ```
//! use trainer::adafactor::AdafactorOptions;
//! let options = AdafactorOptions { learning_rate: Some(1e-3), relative_step: false, ..AdafactorOptions::default() };
//! options.validate()?;
//! assert_eq!(options.resolved_learning_rate(0, 0.5), 5e-4);
//! # Ok::<(), trainer::Error>(())
//! ```

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use t5::Parameter;
use t5_ops::keys::{self, mix};
use t5_ops::{AdafactorHyper, Rounding, SecondMoment, SquareSums};

use crate::error::{Error, Result};

/// The options of `transformers.optimization.Adafactor`, with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdafactorOptions {
    /// The external learning rate; `None` with `relative_step`.
    pub learning_rate: Option<f64>,
    /// Added to the squared gradient (`eps[0]`).
    pub eps1: f64,
    /// The least parameter scale (`eps[1]`).
    pub eps2: f64,
    /// The root mean square that an update is clipped to, before the learning rate.
    pub clip_threshold: f64,
    /// `beta2` at update t is `1 - t^decay_rate`.
    pub decay_rate: f64,
    /// Momentum; `None` keeps no first moment.
    pub beta1: Option<f64>,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
    /// Multiplies the learning rate by the parameter's root mean square.
    pub scale_parameter: bool,
    /// The learning rate is `min(1e-2, 1 / sqrt(t))` instead of an external one.
    pub relative_step: bool,
    /// With `relative_step`: `min(1e-6 t, 1 / sqrt(t))`.
    pub warmup_init: bool,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        AdafactorOptions {
            learning_rate: None,
            eps1: 1e-30,
            eps2: 1e-3,
            clip_threshold: 1.0,
            decay_rate: -0.8,
            beta1: None,
            weight_decay: 0.0,
            scale_parameter: true,
            relative_step: true,
            warmup_init: false,
        }
    }
}

impl AdafactorOptions {
    /// Refuses what transformers refuses, when it is constructed or at its first step.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the option.
    pub fn validate(&self) -> Result<()> {
        match (self.learning_rate, self.relative_step) {
            (Some(rate), true) => {
                let expected = "no value beside `optimizer.relative_step = true`, which computes the rate";
                return Err(Error::invalid_option("optimizer.learning_rate", expected, rate));
            }
            (None, false) => {
                let expected = "a number beside `optimizer.relative_step = false`";
                return Err(Error::invalid_option("optimizer.learning_rate", expected, "none"));
            }
            (Some(rate), false) if !(rate.is_finite() && rate >= 0.0) => {
                return Err(Error::invalid_option("optimizer.learning_rate", "a finite number from 0 up", rate));
            }
            _ => {}
        }
        if self.warmup_init && !self.relative_step {
            let expected = "false beside `optimizer.relative_step = false`";
            return Err(Error::invalid_option("optimizer.warmup_init", expected, true));
        }
        for (name, value) in [("optimizer.eps1", self.eps1), ("optimizer.eps2", self.eps2)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_option(name, "a finite number from 0 up", value));
            }
        }
        // Finite: an option that is not a number in JSON could not be saved.
        if !(self.clip_threshold.is_finite() && self.clip_threshold > 0.0) {
            return Err(Error::invalid_option(
                "optimizer.clip_threshold",
                "a finite number above 0",
                self.clip_threshold,
            ));
        }
        if !(self.decay_rate.is_finite() && self.decay_rate <= 0.0) {
            return Err(Error::invalid_option("optimizer.decay_rate", "a finite number from 0 down", self.decay_rate));
        }
        if let Some(beta1) = self.beta1.filter(|beta1| !(0.0..1.0).contains(beta1)) {
            return Err(Error::invalid_option("optimizer.beta1", "a number from 0 up and below 1", beta1));
        }
        if !self.weight_decay.is_finite() {
            return Err(Error::invalid_option("optimizer.weight_decay", "a finite number", self.weight_decay));
        }
        Ok(())
    }

    /// The learning rate of the update after `updates` updates, before `scale_parameter`.
    ///
    /// `schedule_factor` multiplies an external rate; a relative step follows its own schedule.
    pub fn resolved_learning_rate(&self, updates: u64, schedule_factor: f64) -> f64 {
        if !self.relative_step {
            return self.learning_rate.unwrap_or(0.0) * schedule_factor;
        }
        let step = (updates + 1) as f64;
        let least = if self.warmup_init { 1e-6 * step } else { 1e-2 };
        least.min(1.0 / step.sqrt())
    }
}

/// The optimizer: options, the number of updates made, and the moments of every trainable parameter.
pub struct Adafactor {
    options: AdafactorOptions,
    /// The seed of stochastic rounding, where parameters are rounded so.
    rounding_seed: Option<u64>,
    updates: u64,
    moments: Vec<Option<Moments>>,
}

struct Moments {
    /// Of the parameter's name: every parameter is rounded by other noise.
    key: u64,
    second: SecondMoment,
    first: Option<Tensor>,
}

impl Adafactor {
    /// Zeroed moments for the parameters that `trainable` has `true` for.
    ///
    /// # Errors
    /// Contradictory options; a failed allocation.
    pub fn new(options: AdafactorOptions, parameters: &[Parameter], trainable: &[bool]) -> Result<Self> {
        options.validate()?;
        let moments = parameters
            .iter()
            .zip(trainable)
            .map(|(parameter, trains)| trains.then(|| Moments::zeros(&options, parameter)).transpose())
            .collect::<Result<_>>()?;
        Ok(Adafactor { options, rounding_seed: None, updates: 0, moments })
    }

    /// Rounds bf16 parameters stochastically: by noise that is a function of this seed, the update, the parameter's
    /// name and the element, so that it is the same for every plan and number of threads.
    pub fn round_stochastically(&mut self, seed: u64) {
        self.rounding_seed = Some(seed);
    }

    /// The options.
    pub fn options(&self) -> &AdafactorOptions {
        &self.options
    }

    /// How many updates have been made.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The part of an update that changes parameter `index`. [`Adafactor::finish_update`] ends the update.
    pub fn update_one(
        &self,
        index: usize,
        values: &Tensor,
        gradient: &Tensor,
        sums: &SquareSums,
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let Some(moments) = &self.moments[index] else { return Ok(()) };
        let mut hyper = self.hyper(learning_rate, gradient_scale);
        if let Some(seed) = self.rounding_seed {
            hyper.rounding = Rounding::Stochastic { key: mix(mix(mix(seed) ^ self.updates) ^ moments.key) };
        }
        let (second, first) = (&moments.second, moments.first.as_ref());
        Ok(t5_ops::adafactor_with_sums(values, gradient, sums, second, first, &hyper)?)
    }

    /// Counts an update of which every part was made.
    pub fn finish_update(&mut self) {
        self.updates += 1;
    }

    fn hyper(&self, learning_rate: f64, gradient_scale: f64) -> AdafactorHyper {
        let o = &self.options;
        AdafactorHyper {
            learning_rate,
            beta2: 1.0 - ((self.updates + 1) as f64).powf(o.decay_rate),
            eps1: o.eps1,
            eps2: o.eps2,
            clip_threshold: o.clip_threshold,
            scale_parameter: o.scale_parameter,
            beta1: o.beta1,
            weight_decay: o.weight_decay,
            gradient_scale,
            rounding: Rounding::Nearest,
        }
    }

    /// Every tensor of the state with its name (`<parameter>.exp_avg_sq_row`, ...), in the parameters' order.
    pub fn named_state<'a>(&'a self, parameters: &'a [Parameter]) -> impl Iterator<Item = (String, &'a Tensor)> {
        self.moments.iter().zip(parameters).flat_map(|(moments, parameter)| {
            moments
                .iter()
                .flat_map(Moments::named)
                .map(|(suffix, tensor)| (format!("{}.{suffix}", parameter.name), tensor))
        })
    }

    /// Puts saved tensors in the place of the zeros. `read` is called once for each tensor of [`Adafactor::named_state`], in
    /// its order, with the name, and returns a tensor of the same shape and dtype.
    ///
    /// # Errors
    /// The result of `read`.
    pub(crate) fn restore(
        &mut self,
        parameters: &[Parameter],
        updates: u64,
        mut read: impl FnMut(&str, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        self.updates = updates;
        for (moments, parameter) in self.moments.iter_mut().zip(parameters) {
            for (suffix, tensor) in moments.iter_mut().flat_map(Moments::named_mut) {
                *tensor = read(&format!("{}.{suffix}", parameter.name), tensor)?;
            }
        }
        Ok(())
    }
}

impl Moments {
    fn zeros(options: &AdafactorOptions, parameter: &Parameter) -> Result<Self> {
        let (dtype, device) = (state_dtype(parameter.tensor.dtype()), parameter.tensor.device());
        let zeros = |shape: &[usize], device: &Device| Tensor::zeros(shape, dtype, device);
        let dims = parameter.tensor.dims();
        let second = match *dims {
            [.., rows, columns] => {
                let outer = &dims[..dims.len() - 2];
                let row = zeros(&[outer, &[rows]].concat(), device)?;
                let col = zeros(&[outer, &[columns]].concat(), device)?;
                SecondMoment::Factored { row, col }
            }
            _ => SecondMoment::Full(zeros(dims, device)?),
        };
        let first = options.beta1.map(|_| zeros(dims, device)).transpose()?;
        Ok(Moments { key: keys::of_name(&parameter.name), second, first })
    }

    fn named(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let (second, more) = match &self.second {
            SecondMoment::Factored { row, col } => (("exp_avg_sq_row", row), Some(("exp_avg_sq_col", col))),
            SecondMoment::Full(full) => (("exp_avg_sq", full), None),
        };
        let first = self.first.as_ref().map(|first| ("exp_avg", first));
        std::iter::once(second).chain(more).chain(first)
    }

    fn named_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Tensor)> {
        let (second, more) = match &mut self.second {
            SecondMoment::Factored { row, col } => (("exp_avg_sq_row", row), Some(("exp_avg_sq_col", col))),
            SecondMoment::Full(full) => (("exp_avg_sq", full), None),
        };
        let first = self.first.as_mut().map(|first| ("exp_avg", first));
        std::iter::once(second).chain(more).chain(first)
    }
}

/// Moments of low-precision parameters are kept in f32.
pub(crate) fn state_dtype(parameter: DType) -> DType {
    if parameter == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Number of state values of one parameter of this shape: what [`Adafactor::new`] allocates for it.
pub(crate) fn state_elements(options: &AdafactorOptions, shape: &[usize]) -> u64 {
    let product = |dims: &[usize]| dims.iter().map(|&n| n as u64).product::<u64>();
    let second = match *shape {
        [.., rows, columns] => product(&shape[..shape.len() - 2]) * (rows + columns) as u64,
        _ => product(shape),
    };
    second + if options.beta1.is_some() { product(shape) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl Fn(&mut AdafactorOptions), expected: Result<(), &str>) {
        let mut options = AdafactorOptions::default();
        change(&mut options);
        match (options.validate(), expected) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(name)) => assert!(error.to_string().contains(name), "{error}"),
            (got, expected) => panic!("{options:?}: {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn contradictory_options_are_refused_as_transformers_refuses_them() {
        check(|_| {}, Ok(()));
        check(|o| o.learning_rate = Some(1e-3), Err("optimizer.learning_rate"));
        check(|o| o.relative_step = false, Err("optimizer.learning_rate"));
        check(|o| (o.learning_rate, o.relative_step) = (Some(1e-3), false), Ok(()));
        check(|o| (o.learning_rate, o.relative_step) = (Some(f64::NAN), false), Err("optimizer.learning_rate"));
        check(
            |o| (o.learning_rate, o.relative_step, o.warmup_init) = (Some(1e-3), false, true),
            Err("optimizer.warmup_init"),
        );
        check(|o| o.beta1 = Some(1.0), Err("optimizer.beta1"));
        check(|o| o.clip_threshold = 0.0, Err("optimizer.clip_threshold"));
        check(|o| o.eps2 = f64::INFINITY, Err("optimizer.eps2"));
        check(|o| o.decay_rate = 0.5, Err("optimizer.decay_rate"));
    }

    #[test]
    fn the_relative_step_is_a_hundredth_until_the_ten_thousandth_update() {
        let options = AdafactorOptions::default();
        assert_eq!(options.resolved_learning_rate(0, 1.0), 1e-2);
        assert_eq!(options.resolved_learning_rate(39_999, 1.0), 5e-3);
        let warm = AdafactorOptions { warmup_init: true, ..options };
        assert_eq!(warm.resolved_learning_rate(9, 1.0), 1e-6 * 10.0);
    }

    #[test]
    fn the_stated_number_of_state_values_is_what_is_allocated() {
        for beta1 in [None, Some(0.9)] {
            let options = AdafactorOptions { beta1, ..AdafactorOptions::default() };
            for shape in [&[7][..], &[3, 5], &[2, 3, 5], &[]] {
                let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
                let parameter = Parameter { name: "p".into(), tensor, part: t5::Part::Shared };
                let moments = Moments::zeros(&options, &parameter).unwrap();
                let elements: usize = moments.named().map(|(_, tensor)| tensor.elem_count()).sum();
                assert_eq!(elements as u64, state_elements(&options, shape), "{shape:?}");
            }
        }
    }
}
