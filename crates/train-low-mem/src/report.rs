//! What a person watching sees: a progress bar on a terminal, plain lines otherwise.
//!
//! Everything here is for reading; scripts read `metrics.jsonl`. Lines go to standard output and warnings
//! to standard error. Output that nobody reads any more (a closed pipe) never stops a run.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::failure::Failure;

/// Writes to standard output and ignores a reader that went away.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// A warning, on standard error.
pub fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "warning: {text}");
}

/// Something beside the output proper, on standard error.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The error that ends the program, on standard error.
pub fn error(failure: &Failure) {
    let _ = writeln!(std::io::stderr(), "{failure}");
}

/// What one step shows.
#[derive(Clone, Copy, Debug)]
pub struct StepLine {
    /// Counted from 1.
    pub step: u64,
    /// Mean loss per target token.
    pub loss: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Source and target tokens, without padding.
    pub tokens_per_second: f64,
    /// Resident set now.
    pub rss_bytes: u64,
}

/// The progress of a run.
#[derive(Debug)]
pub struct Report {
    bar: Option<ProgressBar>,
    total_steps: u64,
    first_step: u64,
    log_every_steps: Option<u64>,
    started: Instant,
    last_line: Option<Instant>,
}

impl Report {
    /// A report of a run of `total_steps` that has `done` steps behind it. Without a terminal a line comes
    /// every `log_every_steps`, or by the clock.
    pub fn new(total_steps: u64, done: u64, log_every_steps: Option<u64>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total_steps).with_position(done);
            bar.set_style(
                ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} {eta} left")
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.reset_eta();
            bar
        });
        Self { bar, total_steps, first_step: done, log_every_steps, started: Instant::now(), last_line: None }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        let text = format!("{text}\n");
        match &self.bar {
            Some(bar) => bar.suspend(|| print(&text)),
            None => print(&text),
        }
    }

    /// A warning.
    pub fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| warn(text)),
            None => warn(text),
        }
    }

    /// A step is done: moves the bar, or prints a line where one is due.
    pub fn step(&mut self, line: &StepLine) {
        const BETWEEN_LINES: Duration = Duration::from_secs(10);
        let figures = format!(
            "loss {:.4}  lr {:.2e}  {:.0} tokens/s  {}",
            line.loss,
            line.learning_rate,
            line.tokens_per_second,
            memory_policy::Bytes(line.rss_bytes)
        );
        if let Some(bar) = &self.bar {
            bar.set_position(line.step);
            bar.set_message(figures);
            return;
        }
        let is_due = match self.log_every_steps {
            Some(every) => line.step.is_multiple_of(every),
            None => {
                line.step <= self.first_step + 3 || self.last_line.is_none_or(|last| last.elapsed() >= BETWEEN_LINES)
            }
        };
        if is_due || line.step == self.total_steps {
            self.last_line = Some(Instant::now());
            self.line(&format!(
                "step {}/{}  {figures}  {} left",
                line.step,
                self.total_steps,
                self.time_left(line.step)
            ));
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn time_left(&self, step: u64) -> String {
        let done = u32::try_from(step.saturating_sub(self.first_step)).unwrap_or(u32::MAX).max(1);
        let left = u32::try_from(self.total_steps.saturating_sub(step)).unwrap_or(u32::MAX);
        duration(self.started.elapsed() / done * left)
    }
}

/// A duration for reading: `42 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_for_reading() {
        for (seconds, expected) in [(0, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")] {
            assert_eq!(duration(Duration::from_secs(seconds)), expected);
        }
    }
}
