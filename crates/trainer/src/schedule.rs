//! A schedule: the learning rate of every optimizer step, as a pure function.
//!
//! Invariants:
//! * The rate depends on `(learning_rate, schedule, total_steps, step)` alone. So there is no state to save, and a resumed
//!   run needs only its step number.
//! * It advances per optimizer step, never per micro-batch.
//! * Steps count from 0: `factor(0, ..)` is the first step's. Warm-up starts at 0, as in transformers, so the very first
//!   step of a warmed-up `linear`, `cosine`, `inverse-sqrt` or `constant` schedule has learning rate 0.
//!
//! Formulas: `get_{constant,linear,cosine,inverse_sqrt}_schedule[_with_warmup]` of `transformers.optimization`, and
//! `torch.optim.lr_scheduler.OneCycleLR` (Smith & Topin, arXiv 1708.07120; two phases, cosine annealing).
//!
//! ```
//! use trainer::schedule::{Schedule, ScheduleKind};
//! let linear = Schedule { kind: ScheduleKind::Linear, warmup_steps: Some(10) };
//! assert_eq!(linear.factor(5, 100), 0.5);
//! assert_eq!(linear.factor(10, 100), 1.0);
//! assert_eq!(linear.factor(100, 100), 0.0);
//! ```

use std::f64::consts::PI;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The `div_factor` that the original trainer uses; torch's own default is 25.
pub const DEFAULT_DIV_FACTOR: f64 = 50.0;
/// torch's default `pct_start`: the share of a one-cycle schedule in which the rate rises.
pub const DEFAULT_PCT_START: f64 = 0.3;
/// torch's default `final_div_factor`.
pub const DEFAULT_FINAL_DIV_FACTOR: f64 = 1e4;
/// The time scale of `inverse-sqrt` without warm-up, as in transformers.
const DEFAULT_TIMESCALE: u64 = 10_000;

/// The shape of a learning-rate curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "name")]
pub enum ScheduleKind {
    /// The learning rate itself, after warm-up.
    Constant,
    /// torch's `OneCycleLR` as the original trainer calls it: the cycle *starts* at the configured learning rate,
    /// peaks at `div_factor` times that rate, and ends at `1 / final_div_factor` of it.
    OneCycle {
        /// Peak over start (`max_lr / initial_lr`).
        div_factor: f64,
        /// The share of all steps in which the rate rises; [`Schedule::warmup_steps`] overrides it.
        pct_start: f64,
        /// Start over end (`initial_lr / min_lr`).
        final_div_factor: f64,
    },
    /// Falls linearly to 0 at the last step, after warm-up.
    Linear,
    /// Half a cosine to 0 at the last step, after warm-up.
    Cosine,
    /// `1 / sqrt(step / warmup_steps)` after warm-up.
    InverseSqrt,
}

impl ScheduleKind {
    /// One-cycle with the original trainer's constants.
    #[cfg(test)]
    pub(crate) const ONE_CYCLE: ScheduleKind = ScheduleKind::OneCycle {
        div_factor: DEFAULT_DIV_FACTOR,
        pct_start: DEFAULT_PCT_START,
        final_div_factor: DEFAULT_FINAL_DIV_FACTOR,
    };
}

impl ScheduleKind {
    /// The name in the configuration.
    pub fn name(&self) -> &'static str {
        match self {
            ScheduleKind::Constant => "constant",
            ScheduleKind::OneCycle { .. } => "one-cycle",
            ScheduleKind::Linear => "linear",
            ScheduleKind::Cosine => "cosine",
            ScheduleKind::InverseSqrt => "inverse-sqrt",
        }
    }
}

/// A curve and its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The shape.
    #[serde(flatten)]
    pub kind: ScheduleKind,
    /// Steps in which the rate rises. `None`: no warm-up, or `pct_start` for one-cycle.
    pub warmup_steps: Option<u64>,
}

impl Schedule {
    /// The configured learning rate at every step.
    pub const CONSTANT: Schedule = Schedule { kind: ScheduleKind::Constant, warmup_steps: None };

    /// Whether the rate is the same at every step.
    pub fn is_constant(&self) -> bool {
        self.kind == ScheduleKind::Constant && self.warmup_steps.unwrap_or(0) == 0
    }

    /// Checks the constants.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the invalid constant.
    pub fn validate(&self) -> Result<()> {
        let ScheduleKind::OneCycle { div_factor, pct_start, final_div_factor } = self.kind else {
            return Ok(());
        };
        for (name, value) in [("schedule.div_factor", div_factor), ("schedule.final_div_factor", final_div_factor)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::invalid_option(name, "a finite number above 0", value));
            }
        }
        if !(0.0..=1.0).contains(&pct_start) {
            return Err(Error::invalid_option("schedule.pct_start", "a number between 0 and 1", pct_start));
        }
        Ok(())
    }

    /// The first step (from 0) of `total_steps` with the highest factor, and that factor.
    pub fn highest(&self, total_steps: u64) -> (u64, f64) {
        let last = total_steps.saturating_sub(1);
        // A curve rises to the end of its warm-up, and falls after it.
        let top = match self.kind {
            ScheduleKind::OneCycle { pct_start, .. } => {
                let rising = self.warmup_steps.map_or(pct_start * total_steps as f64, |steps| steps as f64);
                (rising - 1.0).max(0.0) as u64
            }
            _ => self.warmup_steps.unwrap_or(0),
        };
        let near = [top, top + 1].map(|step| step.min(last)).map(|step| (step, self.factor(step, total_steps)));
        if near[1].1 > near[0].1 { near[1] } else { near[0] }
    }

    /// The factor that multiplies the configured learning rate at `step` (from 0) of `total_steps`.
    ///
    /// After the end the curve keeps its last value.
    pub fn factor(&self, step: u64, total_steps: u64) -> f64 {
        let warmup = self.warmup_steps.unwrap_or(0);
        if let ScheduleKind::OneCycle { div_factor, pct_start, final_div_factor } = self.kind {
            let rising = self.warmup_steps.map_or(pct_start * total_steps as f64, |steps| steps as f64);
            return one_cycle(step, total_steps, rising, div_factor, final_div_factor);
        }
        if step < warmup {
            return step as f64 / warmup as f64;
        }
        let falling = total_steps.saturating_sub(warmup).max(1) as f64;
        match self.kind {
            ScheduleKind::Linear => total_steps.saturating_sub(step) as f64 / falling,
            ScheduleKind::Cosine => {
                let progress = ((step - warmup) as f64 / falling).min(1.0);
                (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
            }
            ScheduleKind::InverseSqrt => {
                let timescale = if warmup == 0 { DEFAULT_TIMESCALE } else { warmup };
                1.0 / ((step - warmup + timescale) as f64 / timescale as f64).sqrt()
            }
            ScheduleKind::Constant | ScheduleKind::OneCycle { .. } => 1.0,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        match self.warmup_steps {
            None | Some(0) => Ok(()),
            Some(steps) => write!(f, " after {steps} steps of warm-up"),
        }
    }
}

/// `OneCycleLR` in units of its initial rate: 1 rises to `div_factor` until step `rising - 1`, then falls to
/// `1 / final_div_factor` at step `total_steps - 1`.
fn one_cycle(step: u64, total_steps: u64, rising: f64, div_factor: f64, final_div_factor: f64) -> f64 {
    let last = total_steps.saturating_sub(1) as f64;
    let step = (step as f64).min(last);
    let peak = rising - 1.0;
    let (start, end, from, to) =
        if step <= peak { (1.0, div_factor, 0.0, peak) } else { (div_factor, 1.0 / final_div_factor, peak, last) };
    // A phase of length zero has already ended. torch divides by zero here.
    let progress = if to > from { (step - from) / (to - from) } else { 1.0 };
    end + (start - end) / 2.0 * ((PI * progress).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(kind: ScheduleKind, warmup_steps: Option<u64>, total_steps: u64, expected: &[(u64, f64)]) {
        let schedule = Schedule { kind, warmup_steps };
        for &(step, factor) in expected {
            let got = schedule.factor(step, total_steps);
            assert!((got - factor).abs() < 1e-12, "{kind:?} at {step}: {got}, expected {factor}");
        }
    }

    #[test]
    fn the_curves_are_those_of_transformers() {
        check(ScheduleKind::Constant, None, 10, &[(0, 1.0), (9, 1.0), (100, 1.0)]);
        check(ScheduleKind::Constant, Some(4), 10, &[(0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)]);
        check(ScheduleKind::Linear, Some(2), 10, &[(0, 0.0), (1, 0.5), (2, 1.0), (6, 0.5), (10, 0.0), (11, 0.0)]);
        check(ScheduleKind::Cosine, Some(2), 10, &[(0, 0.0), (2, 1.0), (6, 0.5), (10, 0.0), (12, 0.0)]);
        check(ScheduleKind::InverseSqrt, Some(4), 10, &[(0, 0.0), (4, 1.0), (16, 0.5)]);
        check(ScheduleKind::InverseSqrt, None, 10, &[(0, 1.0), (30_000, 0.5)]);
    }

    #[test]
    fn the_highest_factor_is_that_of_the_first_step_that_has_it() {
        let one_cycle = ScheduleKind::ONE_CYCLE;
        let kinds =
            [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::InverseSqrt, one_cycle];
        let lengths = [None, Some(0), Some(1), Some(4), Some(60)];
        for (kind, warmup_steps) in kinds.into_iter().flat_map(|kind| lengths.map(|length| (kind, length))) {
            let schedule = Schedule { kind, warmup_steps };
            for total in [1, 2, 7, 60, 94] {
                let factors = (0..total).map(|step| (step, schedule.factor(step, total)));
                let highest = factors.reduce(|best, next| if next.1 > best.1 { next } else { best }).unwrap();
                assert_eq!(schedule.highest(total), highest, "{schedule} of {total}");
            }
        }
    }

    #[test]
    fn one_cycle_starts_at_the_learning_rate_and_peaks_at_div_factor_times_it() {
        let kind = ScheduleKind::OneCycle { div_factor: 50.0, pct_start: 0.3, final_div_factor: 1e4 };
        check(kind, None, 100, &[(0, 1.0), (29, 50.0), (99, 1e-4), (500, 1e-4)]);
        check(kind, Some(11), 100, &[(0, 1.0), (5, 25.5), (10, 50.0), (99, 1e-4)]);
    }

    #[test]
    fn a_one_cycle_of_a_few_steps_is_finite() {
        for total_steps in 0..8 {
            for warmup_steps in [None, Some(0), Some(1), Some(20)] {
                let schedule = Schedule { kind: ScheduleKind::ONE_CYCLE, warmup_steps };
                for step in 0..10 {
                    let factor = schedule.factor(step, total_steps);
                    assert!(factor.is_finite() && factor > 0.0, "{total_steps} {warmup_steps:?} {step}: {factor}");
                }
            }
        }
    }

    #[test]
    fn a_schedule_survives_its_own_json() {
        for kind in [ScheduleKind::Constant, ScheduleKind::ONE_CYCLE, ScheduleKind::Linear, ScheduleKind::InverseSqrt] {
            let schedule = Schedule { kind, warmup_steps: Some(3) };
            let json = serde_json::to_string(&schedule).unwrap();
            assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule, "{json}");
        }
    }

    #[test]
    fn a_one_cycle_that_starts_at_zero_is_refused() {
        let kind = ScheduleKind::OneCycle { div_factor: 0.0, pct_start: 0.3, final_div_factor: 1e4 };
        let error = Schedule { kind, warmup_steps: None }.validate().unwrap_err();
        assert!(error.to_string().contains("schedule.div_factor"), "{error}");
    }

    proptest! {
        #[test]
        fn every_schedule_stays_between_nothing_and_its_peak(step in 0u64..2000, total in 1u64..1500, warmup in proptest::option::of(0u64..300)) {
            for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::InverseSqrt, ScheduleKind::ONE_CYCLE] {
                let factor = Schedule { kind, warmup_steps: warmup }.factor(step, total);
                let peak = if kind == ScheduleKind::ONE_CYCLE { DEFAULT_DIV_FACTOR } else { 1.0 };
                prop_assert!((0.0..=peak * (1.0 + 1e-12)).contains(&factor), "{kind:?} {factor}");
            }
        }
    }
}
