//! Progress of a run in numbers: completed steps, speed, and remaining time.
//!
//! This module reads no clock: the caller passes the time of each step.

use std::time::{Duration, Instant};

use memory_policy::{Bytes, counted, plural};

/// The number of recent steps that mostly determine the smoothed loss.
const SMOOTHED_STEPS: f64 = 20.0;

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepLine {
    /// Counted from 1.
    pub step: u64,
    /// Passes over the data, including this step: 1.25 is a quarter of the second pass.
    pub epoch: f64,
    /// Mean loss per target token.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Source and target tokens, without padding.
    pub tokens: u64,
    /// From asking for the batch to the end of the step.
    pub took: Duration,
    /// Resident set now.
    pub rss: Bytes,
    /// The memory budget, if it was given.
    pub budget: Option<Bytes>,
    /// Memory of the device that computes, unless that is the CPU.
    pub on_device: Option<Bytes>,
}

impl StepLine {
    fn memory(&self, of: &str) -> String {
        let on_host = self.budget.map_or(self.rss.to_string(), |budget| format!("{}{of}{budget}", self.rss));
        self.on_device.map_or(on_host.clone(), |bytes| format!("{on_host}, {bytes} on the device"))
    }
}

/// The progress of a run.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    total_steps: u64,
    /// Steps made before this process.
    first_step: u64,
    /// The plan's time for a step.
    predicted: Option<Duration>,
    began: Option<Instant>,
    step: u64,
    tokens: u64,
    stepping: Duration,
    loss: Option<f64>,
    validation_loss: Option<(f64, bool)>,
}

impl Progress {
    /// A run of `total_steps` steps, of which `done` are complete.
    pub fn new(total_steps: u64, done: u64) -> Self {
        Self { total_steps, first_step: done, step: done, ..Self::default() }
    }

    /// Sets the plan's time of a step, which is used before the first step of this process.
    pub fn predict(&mut self, step: Option<Duration>) {
        self.predicted = step;
    }

    /// Notes a step that ended at `now`.
    pub fn note(&mut self, line: &StepLine, now: Instant) {
        // Loading and the evaluation before the first step happen only once, so they do not count.
        self.began.get_or_insert(now.checked_sub(line.took).unwrap_or(now));
        self.step = line.step;
        self.tokens += line.tokens;
        self.stepping += line.took;
        if line.loss.is_finite() {
            #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
            let made = (line.step.saturating_sub(self.first_step) as f64).clamp(1.0, SMOOTHED_STEPS);
            let before = self.loss.unwrap_or(line.loss);
            self.loss = Some(before + (line.loss - before) / made);
        }
    }

    /// Notes the loss of an evaluation.
    pub fn note_validation(&mut self, loss: f64) {
        self.validation_loss = Some((loss, self.validation_loss.is_some_and(|(before, _)| loss > before)));
    }

    /// The number of all steps.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Whether a step of this process is among the first few.
    pub fn is_at_the_start(&self) -> bool {
        self.step <= self.first_step + 3
    }

    /// The time since the first step of this process began.
    pub fn elapsed(&self, now: Instant) -> Duration {
        self.began.map_or(Duration::ZERO, |began| now.saturating_duration_since(began))
    }

    /// The time until the last step. It includes evaluations and saves at the rate seen so far.
    pub fn time_left(&self, now: Instant) -> Option<Duration> {
        let done = u32::try_from(self.step.saturating_sub(self.first_step)).unwrap_or(u32::MAX);
        let left = u32::try_from(self.total_steps.saturating_sub(self.step)).unwrap_or(u32::MAX);
        if left == 0 {
            return Some(Duration::ZERO);
        }
        let a_step = if done == 0 { self.predicted? } else { self.elapsed(now) / done };
        a_step.checked_mul(left)
    }

    /// One line of a log, without the step's number.
    pub fn log_line(&self, line: &StepLine, now: Instant) -> String {
        format!(
            "epoch {:.2}  loss {:.4} (mean {:.4})  grad norm {:.2}  lr {}  {:.0} tokens/s  {}  {}, {} left",
            line.epoch,
            line.loss,
            self.loss.unwrap_or(line.loss),
            line.gradient_norm,
            rate(line.learning_rate),
            tokens_per_second(line),
            line.memory(" of "),
            clock(self.elapsed(now)),
            self.time_left(now).map_or("?".to_string(), clock),
        )
    }

    /// The text beside a progress bar. The most important values come first, because a narrow terminal cuts the text.
    pub fn beside_bar(&self, line: Option<&StepLine>, now: Instant) -> String {
        let left = self.time_left(now).map_or("-:--".to_string(), clock);
        let times = format!("{}<{left}", clock(self.elapsed(now)));
        let Some(line) = line else { return format!("0/{}  {times}", self.total_steps) };
        let validation = self
            .validation_loss
            .map_or(String::new(), |(loss, is_worse)| format!(" (val {loss:.3} {})", if is_worse { '▲' } else { '▼' }));
        format!(
            "{}/{}  {times}  loss {:.3}{validation}  {:.0} tok/s  {}  grad norm {:.2}  epoch {:.1}",
            line.step,
            self.total_steps,
            self.loss.unwrap_or(line.loss),
            tokens_per_second(line),
            line.memory("/"),
            line.gradient_norm,
            line.epoch
        )
    }

    /// Steps, time and throughput of this process; `None` if it made no step.
    pub fn summary(&self, now: Instant) -> Option<String> {
        let steps = self.step.saturating_sub(self.first_step);
        let seconds = self.stepping.as_secs_f64();
        if steps == 0 || seconds <= 0.0 {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "for reading")]
        let (rate, each) = (self.tokens as f64 / seconds, seconds / steps as f64);
        let tokens = counted(self.tokens);
        Some(format!(
            "{} in {}: {tokens} tokens, {rate:.0} tokens/s, {each:.3} s a step",
            plural(steps, "step"),
            clock(self.elapsed(now))
        ))
    }
}

fn tokens_per_second(line: &StepLine) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "tokens of a batch are far below 2^53")]
    let tokens = line.tokens as f64;
    tokens / line.took.as_secs_f64().max(1e-9)
}

/// A learning rate: `2.61e-2`, and `0` for nothing.
pub fn rate(rate: f64) -> String {
    if rate == 0.0 { "0".to_string() } else { format!("{rate:.2e}") }
}

/// A time as a clock shows it: `0:48`, `3:46`, `2:05:00`.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, loss: f64) -> StepLine {
        StepLine {
            step,
            epoch: 1.25,
            loss,
            gradient_norm: 0.5,
            learning_rate: 0.0261,
            tokens: 400,
            took: Duration::from_secs(2),
            rss: Bytes::mib(50),
            budget: Some(Bytes::mib(600)),
            on_device: None,
        }
    }

    #[test]
    fn the_time_left_is_right_from_the_first_step_and_after_a_resume() {
        let mut progress = Progress::new(1000, 190);
        let start = Instant::now();
        assert_eq!(progress.time_left(start), None);
        progress.predict(Some(Duration::from_secs(3)));
        assert_eq!(progress.time_left(start), Some(Duration::from_secs(3 * 810)));
        // The minute of loading and evaluation before the first step does not count.
        let now = start + Duration::from_secs(60);
        progress.note(&line(191, 1.0), now);
        assert_eq!(progress.time_left(now), Some(Duration::from_secs(2 * 809)));
        // The eight seconds of an evaluation between two steps count.
        let now = now + Duration::from_secs(10);
        progress.note(&line(192, 1.0), now);
        assert_eq!(progress.time_left(now), Some(Duration::from_secs(6 * 808)));
    }

    #[test]
    fn lines_are_for_reading() {
        let mut progress = Progress::new(10, 0);
        let start = Instant::now();
        progress.note(&line(1, 2.0), start);
        let now = start + Duration::from_secs(2);
        progress.note(&line(2, 1.0), now);
        let expected = "epoch 1.25  loss 1.0000 (mean 1.5000)  grad norm 0.50  lr 2.61e-2  200 tokens/s  50 MiB of 600 MiB  0:04, 0:16 left";
        assert_eq!(progress.log_line(&line(2, 1.0), now), expected);
        let on_device = StepLine { on_device: Some(Bytes::gib(3)), ..line(2, 1.0) };
        let text = progress.log_line(&on_device, now);
        assert!(text.contains("50 MiB of 600 MiB, 3 GiB on the device  0:04"), "{text}");
        progress.note_validation(0.9);
        let bar = progress.beside_bar(Some(&line(2, 1.0)), now);
        assert!(bar.starts_with("2/10  0:04<0:16  loss 1.500 (val 0.900 ▼)  200 tok/s  50 MiB/600 MiB"), "{bar}");
        assert_eq!(progress.summary(now).unwrap(), "2 steps in 0:04: 800 tokens, 200 tokens/s, 2.000 s a step");
        assert_eq!(Progress::new(10, 3).summary(now), None);
    }

    #[test]
    fn times_and_rates_are_for_reading() {
        assert_eq!([59, 226, 7500].map(|seconds| clock(Duration::from_secs(seconds))), ["0:59", "3:46", "2:05:00"]);
        assert_eq!((rate(0.0), rate(1e-3)), ("0".to_string(), "1.00e-3".to_string()));
    }
}
