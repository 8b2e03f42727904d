//! Adafactor (Shazeer & Stern, 2018, arXiv 1804.04235) with the semantics of `transformers.optimization.Adafactor`, option
//! by option. [`t5_ops::adafactor`] has the arithmetic of one parameter; this module has the options and the shapes of its state.
//!
//! The state of a matrix (R, C) is a row of R and a column of C values (`exp_avg_sq_row`, `exp_avg_sq_col`). A vector has
//! one value each (`exp_avg_sq`). With `beta1` there is one more value per parameter (`exp_avg`).
//!
//! ```
//! use trainer::OptimizerOptions;
//! use trainer::adafactor::AdafactorOptions;
//! let options = AdafactorOptions { learning_rate: Some(1e-3), relative_step: false, ..AdafactorOptions::default() };
//! let options = OptimizerOptions::from(options);
//! options.validate()?;
//! assert_eq!(options.resolved_learning_rate(0, 0.5), 5e-4);
//! # Ok::<(), trainer::Error>(())
//! ```

use candle_core::DType;
use serde::{Deserialize, Serialize};
use t5_ops::{AdafactorHyper, AdafactorUpdate, Needs, Path, ReadyUpdates, SecondMoment};

use crate::error::{Error, Result};
use crate::rule::{At, Changed, Rule, StateTensor, check_betas};

/// The options of `transformers.optimization.Adafactor`, with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdafactorOptions {
    /// The external learning rate; `None` with `relative_step`.
    pub learning_rate: Option<f64>,
    /// Added to the squared gradient (`eps[0]`).
    pub eps1: f64,
    /// The smallest parameter scale (`eps[1]`).
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
    /// The updates of these parameters, with their second moments.
    fn updates<'a>(&self, changes: &'a [Changed<'a>], second: &'a [SecondMoment], at: At) -> Vec<AdafactorUpdate<'a>> {
        let update = |(changed, second): (&'a Changed<'a>, &'a SecondMoment)| {
            let hyper = AdafactorHyper {
                learning_rate: changed.rate(&at),
                beta2: 1.0 - ((at.updates + 1) as f64).powf(self.decay_rate),
                eps1: self.eps1,
                eps2: self.eps2,
                clip_threshold: self.clip_threshold,
                scale_parameter: self.scale_parameter,
                beta1: self.beta1,
                weight_decay: changed.decay(self.weight_decay),
                gradient_scale: at.gradient_scale,
                rounding: changed.rounding,
            };
            let &Changed { values: param, gradient: grad, sums, .. } = changed;
            let first = changed.state.last().filter(|_| self.beta1.is_some());
            AdafactorUpdate { param, grad, sums, second, first, hyper }
        };
        changes.iter().zip(second).map(update).collect()
    }
}

/// The second moments among the state of each parameter.
fn second_moments(changes: &[Changed]) -> Vec<SecondMoment> {
    let second = |changed: &Changed| match (changed.values.rank(), changed.state) {
        (0 | 1, state) => SecondMoment::Full(state[0].clone()),
        (_, state) => SecondMoment::Factored { row: state[0].clone(), col: state[1].clone() },
    };
    changes.iter().map(second).collect()
}

impl Rule for AdafactorOptions {
    fn in_words(&self) -> &'static str {
        if self.beta1.is_some() { "Adafactor, factored, and a first moment" } else { "Adafactor, factored" }
    }

    fn validate(&self) -> Result<()> {
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
        if !(self.eps1.is_finite() && self.eps1 > 0.0) {
            // A row that no batch has used would be updated by 0 / 0.
            return Err(Error::invalid_option("optimizer.eps1", "a finite number above 0", self.eps1));
        }
        if !(self.eps2.is_finite() && self.eps2 >= 0.0) {
            return Err(Error::invalid_option("optimizer.eps2", "a finite number from 0 up", self.eps2));
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
        check_betas(&[("optimizer.beta1", self.beta1.unwrap_or(0.0))])?;
        if !self.weight_decay.is_finite() {
            return Err(Error::invalid_option("optimizer.weight_decay", "a finite number", self.weight_decay));
        }
        Ok(())
    }

    fn configured_learning_rate(&self) -> Option<f64> {
        self.learning_rate
    }

    fn resolved_learning_rate(&self, updates: u64, schedule_factor: f64) -> f64 {
        if !self.relative_step {
            return self.learning_rate.unwrap_or(0.0) * schedule_factor;
        }
        let step = (updates + 1) as f64;
        let least = if self.warmup_init { 1e-6 * step } else { 1e-2 };
        least.min(1.0 / step.sqrt())
    }

    fn has_own_schedule(&self) -> bool {
        self.relative_step
    }

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        let mut state = match *shape {
            [ref outer @ .., rows, columns] => [("exp_avg_sq_row", rows), ("exp_avg_sq_col", columns)]
                .map(|(name, size)| StateTensor::new(name, &[outer, &[size]].concat()))
                .into(),
            _ => vec![StateTensor::new("exp_avg_sq", shape)],
        };
        state.extend(self.beta1.map(|_| StateTensor::new("exp_avg", shape)));
        state
    }

    fn update(&self, changes: &[Changed], at: At) -> Result<()> {
        Ok(t5_ops::adafactor_of_each(&self.updates(changes, &second_moments(changes), at))?)
    }

    fn ready(&self, changes: &[Changed], at: At) -> Result<Option<ReadyUpdates>> {
        Ok(t5_ops::adafactor_ready(&self.updates(changes, &second_moments(changes), at))?)
    }

    fn needs(&self, parameters: &[((usize, usize), DType)]) -> Needs {
        t5_ops::adafactor_needs(Path::Device, parameters)
    }
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
        check(|o| o.eps1 = 0.0, Err("optimizer.eps1"));
        check(|o| o.eps2 = 0.0, Ok(()));
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
}
