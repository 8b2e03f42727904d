//! Progress for a person: a bar on a terminal, plain lines otherwise.
//!
//! Everything about a run is for reading; scripts read `metrics.jsonl`. Lines go to standard output and warnings
//! to standard error, both through [`crate::output`]: output that nobody reads never stops a run. What a command was
//! asked to print is another matter: [`result`] writes all of it or fails.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::failure::{Failure, Outcome};
use crate::output::{Kind, Stream, show};

/// Writes a command's result to standard output, waiting for the reader as any tool does.
///
/// # Errors
/// Where it cannot be written. A reader that went away ends the process as it ends any tool: by SIGPIPE.
pub fn result(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            let _ = signal_hook::low_level::emulate_default_handler(signal_hook::consts::SIGPIPE);
            Err(Failure::internal("standard output: closed by the reader"))
        }
        Err(error) => Err(Failure::internal(format!("standard output: cannot write the result: {error}"))),
    }
}

/// Says something about a run.
pub fn print(text: &str) {
    show(Stream::Out, Kind::Message, text);
}

/// A warning, on standard error.
pub fn warn(text: &str) {
    show(Stream::Err, Kind::Message, &format!("warning: {text}\n"));
}

/// Something beside the output proper, on standard error.
pub fn note(text: &str) {
    show(Stream::Err, Kind::Message, &format!("{text}\n"));
}

/// The error that ends the program, on standard error.
pub fn error(failure: &Failure) {
    show(Stream::Err, Kind::Message, &format!("{failure}\n"));
}

/// The figures of one step.
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
            let target = ProgressDrawTarget::term_like_with_hz(Box::new(Terminal::default()), FRAMES_A_SECOND);
            let bar = ProgressBar::with_draw_target(Some(total_steps), target).with_position(done);
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
        self.show(Kind::Progress, text);
    }

    /// The line that a run ends with.
    pub fn last_line(&self, text: &str) {
        self.show(Kind::Message, text);
    }

    fn show(&self, kind: Kind, text: &str) {
        let text = format!("{text}\n");
        match &self.bar {
            Some(bar) => bar.suspend(|| show(Stream::Out, kind, &text)),
            None => show(Stream::Out, kind, &text),
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

/// How often the bar is drawn, at most.
const FRAMES_A_SECOND: u8 = 10;

/// The terminal on standard error, written to by the output's thread: what is drawn together is shown together.
#[derive(Debug, Default)]
struct Terminal {
    frame: Mutex<String>,
}

impl Terminal {
    fn draw(&self, text: &str) -> std::io::Result<()> {
        self.frame.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
        Ok(())
    }

    /// The control sequence that moves the cursor `n` places.
    fn go(&self, n: usize, direction: char) -> std::io::Result<()> {
        if n == 0 { Ok(()) } else { self.draw(&format!("\x1b[{n}{direction}")) }
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| size.ws_col.max(1))
    }

    fn move_cursor_up(&self, n: usize) -> std::io::Result<()> {
        self.go(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> std::io::Result<()> {
        self.go(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> std::io::Result<()> {
        self.go(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> std::io::Result<()> {
        self.go(n, 'D')
    }

    fn write_line(&self, text: &str) -> std::io::Result<()> {
        self.draw(text)?;
        self.draw("\n")
    }

    fn write_str(&self, text: &str) -> std::io::Result<()> {
        self.draw(text)
    }

    fn clear_line(&self) -> std::io::Result<()> {
        self.draw("\r\x1b[2K")
    }

    fn flush(&self) -> std::io::Result<()> {
        let frame = std::mem::take(&mut *self.frame.lock().unwrap_or_else(PoisonError::into_inner));
        show(Stream::Err, Kind::Frame, &frame);
        Ok(())
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
