//! An axis: maps values to places, with ticks at round numbers.

use crate::figures;

/// An axis. Place 0 is its beginning and place 1 its end.
#[derive(Clone, Debug)]
pub struct Scale {
    from: f64,
    to: f64,
    is_log: bool,
    /// Values and their labels.
    pub ticks: Vec<(f64, String)>,
}

/// The most ticks of an axis.
const MAX_TICKS: f64 = 5.0;

impl Scale {
    /// A linear axis from the least to the largest value, with ticks at multiples of 1, 2 or 5 times a power of ten.
    pub fn linear(from: f64, to: f64) -> Self {
        Self::in_units(from, to, 1.0, figures::short)
    }

    /// A linear axis from 0 to at least `to`, rounded up to a tick.
    pub fn from_zero(to: f64) -> Self {
        let step = round_step(to.max(1e-12) / MAX_TICKS);
        Self::linear(0.0, (to / step).ceil() * step)
    }

    /// An axis of bytes from 0, in binary units.
    pub fn bytes(to: f64) -> Self {
        let (unit, name) = match to {
            to if to >= 2.0 * 1024f64.powi(3) => (1024f64.powi(3), "GiB"),
            to if to >= 2.0 * 1024f64.powi(2) => (1024f64.powi(2), "MiB"),
            _ => (1024.0, "KiB"),
        };
        Self::in_units(0.0, to, unit, |value| match value {
            0.0 => "0".to_owned(),
            value => format!("{} {name}", figures::short(value)),
        })
    }

    /// An axis of milliseconds from 0, with ticks at round seconds, minutes, hours or days.
    pub fn time(to: f64) -> Self {
        const STEPS: [(f64, f64, &str); 19] = [
            (1.0, 1e3, "s"),
            (2.0, 1e3, "s"),
            (5.0, 1e3, "s"),
            (10.0, 1e3, "s"),
            (20.0, 1e3, "s"),
            (1.0, 6e4, "min"),
            (2.0, 6e4, "min"),
            (5.0, 6e4, "min"),
            (10.0, 6e4, "min"),
            (20.0, 6e4, "min"),
            (1.0, 3.6e6, "h"),
            (2.0, 3.6e6, "h"),
            (4.0, 3.6e6, "h"),
            (12.0, 3.6e6, "h"),
            (1.0, 8.64e7, "d"),
            (2.0, 8.64e7, "d"),
            (5.0, 8.64e7, "d"),
            (10.0, 8.64e7, "d"),
            (30.0, 8.64e7, "d"),
        ];
        let to = to.max(1.0);
        let fits = |(times, unit, _): &&(f64, f64, &str)| times * unit * MAX_TICKS >= to;
        let &(times, unit, name) = STEPS.iter().find(fits).unwrap_or(&STEPS[STEPS.len() - 1]);
        let ticks = (0..=64).map(|n| f64::from(n) * times).take_while(|value| value * unit <= to);
        let shown =
            |value: f64| if value == 0.0 { "0".to_owned() } else { format!("{} {name}", figures::short(value)) };
        Self { from: 0.0, to, is_log: false, ticks: ticks.map(|value| (value * unit, shown(value))).collect() }
    }

    /// A logarithmic axis, for positive values that span more than a power of ten.
    pub fn log(from: f64, to: f64) -> Self {
        let (low, high) = (from.log10().floor() as i32, to.log10().ceil() as i32);
        let every = ((high - low) as usize).div_ceil(MAX_TICKS as usize).max(1);
        let mut ticks: Vec<f64> = (low..=high).step_by(every).map(|power| 10f64.powi(power)).collect();
        if high - low <= 2 {
            ticks.extend((low..high).flat_map(|power| [2.0, 5.0].map(|times| times * 10f64.powi(power))));
        }
        ticks.retain(|tick| (from * 0.999..=to * 1.001).contains(tick));
        Self { from, to, is_log: true, ticks: ticks.into_iter().map(|tick| (tick, figures::decimal(tick))).collect() }
    }

    /// A logarithmic axis if the values span so much that a linear axis would show a single number; otherwise a linear
    /// axis.
    pub fn of_range((least, most): (f64, f64)) -> Self {
        if least > 0.0 && most / least > 30.0 {
            return Self::log(least / 1.1, most * 1.1);
        }
        let margin = ((most - least) * 0.05).max(most.abs() * 1e-3).max(1e-12);
        let from = if least >= 0.0 && least < (most - least) { 0.0 } else { least - margin };
        Self::linear(from, most + margin)
    }

    fn in_units(from: f64, to: f64, unit: f64, shown: impl Fn(f64) -> String) -> Self {
        let to = if to > from { to } else { from + 1.0 };
        let step = round_step((to - from) / unit / MAX_TICKS);
        let first = (from / unit / step).ceil();
        let ticks = (0..=2 * MAX_TICKS as usize).map(|n| (first + n as f64) * step);
        let ticks = ticks.take_while(|value| value * unit <= to * (1.0 + 1e-9));
        // Format the rounded multiple of the step, so that the label is round, too.
        let ticks = ticks.map(|value| (value * unit, shown((value / step).round() * step))).collect();
        Self { from, to, is_log: false, ticks }
    }

    /// Returns the axis without ticks.
    pub fn without_ticks(self) -> Self {
        Self { ticks: Vec::new(), ..self }
    }

    /// The place of a value: 0 at the beginning, 1 at the end. Values beyond the axis are clamped.
    pub fn place(&self, value: f64) -> f64 {
        let place = match self.is_log {
            true => (value.max(f64::MIN_POSITIVE).ln() - self.from.ln()) / (self.to.ln() - self.from.ln()),
            false => (value - self.from) / (self.to - self.from),
        };
        place.clamp(0.0, 1.0)
    }

    /// Whether a value is within the axis.
    pub fn holds(&self, value: f64) -> bool {
        (self.from..=self.to).contains(&value)
    }

    /// Beginning, end, and whether the axis is logarithmic, for the script that shows values.
    pub fn numbers(&self) -> String {
        format!("{} {} {}", self.from, self.to, u8::from(self.is_log))
    }
}

/// The next step of 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-300).log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= least * (1.0 - 1e-9));
    times.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|(_, shown)| shown.as_str()).collect()
    }

    #[test]
    fn ticks_are_at_round_numbers() {
        assert_eq!(shown(&Scale::linear(0.0, 1000.0)), ["0", "200", "400", "600", "800", "1000"]);
        assert_eq!(shown(&Scale::linear(0.0, 0.7)), ["0", "0.2", "0.4", "0.6"]);
        assert_eq!(shown(&Scale::bytes(75e6)), ["0", "20 MiB", "40 MiB", "60 MiB"]);
        assert_eq!(shown(&Scale::time(78_000.0)), ["0", "20 s", "40 s", "60 s"]);
        assert_eq!(shown(&Scale::time(40_000_000.0)), ["0", "4 h", "8 h"]);
        assert_eq!(shown(&Scale::log(0.02, 8.0)), ["0.1", "1"]);
        assert_eq!(shown(&Scale::of_range((3.0, 3.0)))[1], "3");
    }

    #[test]
    fn places_go_from_one_end_to_the_other() {
        let (linear, log) = (Scale::linear(0.0, 10.0), Scale::log(1.0, 100.0));
        assert_eq!([0.0, 5.0, 20.0].map(|value| linear.place(value)), [0.0, 0.5, 1.0]);
        assert!((log.place(10.0) - 0.5).abs() < 1e-12);
        assert!(log.place(0.0) == 0.0 && linear.place(f64::INFINITY) == 1.0);
    }
}
