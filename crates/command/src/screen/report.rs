//! Progress for people: lines of text, and on a terminal a bar below them.
//!
//! These texts are for people; scripts read `metrics.jsonl`. Lines go to standard output and warnings to standard error, both through
//! [`crate::screen::output`], so a run never stops because its output is not read. The result that a command was asked to print is different:
//! [`result`] writes all of it or fails.
//!
//! Every text passes [`Shown`], so no row, name or answer controls the terminal.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::failure::{Failure, Outcome};
use crate::screen::output::{self, Kind, Shown, Stream, show};
use crate::screen::progress::{Progress, StepLine};

/// Writes a command's result to standard output, and waits for the reader like any other tool. JSON stays the same JSON.
///
/// # Errors
/// The result cannot be written. If the reader has gone, SIGPIPE ends the process, like any other tool.
pub fn result(text: &str) -> Outcome<()> {
    write_out(Shown::text(text).as_str())
}

/// Writes a part of a model's answer to standard output: safe for a terminal, and byte for byte into a file or a pipe.
///
/// # Errors
/// As of [`result`].
pub fn answer(text: &str) -> Outcome<()> {
    if std::io::stdout().is_terminal() { result(text) } else { write_out(text) }
}

fn write_out(text: &str) -> Outcome<()> {
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

/// Prints a line about a run.
pub fn print(text: &str) {
    show(Stream::Out, Kind::Message, &Shown::text(text));
}

/// Prints a warning to standard error.
pub fn warn(text: &str) {
    show(Stream::Err, Kind::Message, &Shown::paragraph(&painted("warning: ", YELLOW), text));
}

/// Prints a note to standard error.
pub fn note(text: &str) {
    show(Stream::Err, Kind::Message, &Shown::paragraph("", text));
}

/// Prints the error that ends the program to standard error.
pub fn error(failure: &Failure) {
    let of = output::silent_rank().map(|rank| format!("process {rank}: ")).unwrap_or_default();
    let word = if failure.is_error() { painted("error: ", RED) } else { String::new() };
    let hint = painted("hint: ", CYAN);
    let hints = failure.hints.iter().map(|text| Shown::paragraph(&format!("{of}{hint}"), text));
    let message = Shown::paragraph(&format!("{of}{word}"), &failure.message);
    output::show_anyway(Stream::Err, Kind::Message, &std::iter::once(message).chain(hints).collect());
}

const RED: u8 = 31;
const YELLOW: u8 = 33;
const CYAN: u8 = 36;

/// A bold word in colour, on a terminal whose user has not disabled colour (<https://no-color.org>).
fn painted(word: &str, colour: u8) -> String {
    static HAS_COLOURS: LazyLock<bool> = LazyLock::new(|| {
        let refuses = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        std::io::stderr().is_terminal() && !refuses && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
    });
    if *HAS_COLOURS { format!("\x1b[1;{colour}m{word}\x1b[0m") } else { word.to_string() }
}

/// The progress of a run.
#[derive(Debug)]
pub struct Report {
    bar: Option<ProgressBar>,
    progress: Progress,
    log_every_steps: Option<u64>,
    last_line: Option<Instant>,
}

impl Report {
    /// A report of a run of `total_steps` steps, of which `done` are complete. It prints a line every `log_every_steps` steps, or at
    /// intervals of time. A terminal also has a bar.
    pub fn new(total_steps: u64, done: u64, log_every_steps: Option<u64>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let target = ProgressDrawTarget::term_like_with_hz(Box::new(Terminal::default()), FRAMES_A_SECOND);
            let bar = ProgressBar::with_draw_target(Some(total_steps), target).with_position(done);
            bar.set_style(
                ProgressStyle::with_template("{bar:16} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Self { bar, progress: Progress::new(total_steps, done), log_every_steps, last_line: None }
    }

    /// Sets the plan's time of a step, which is used before the first step.
    pub fn predict(&mut self, step: Option<Duration>) {
        self.progress.predict(step);
    }

    /// Prints a line.
    pub fn line(&self, text: &str) {
        self.show(Kind::Progress, text);
    }

    /// Prints the last line of a run.
    pub fn last_line(&self, text: &str) {
        self.show(Kind::Message, text);
    }

    fn show(&self, kind: Kind, text: &str) {
        let text = Shown::text(&format!("{text}\n"));
        match &self.bar {
            Some(bar) => bar.suspend(|| show(Stream::Out, kind, &text)),
            None => show(Stream::Out, kind, &text),
        }
    }

    /// Prints a warning.
    pub fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| warn(text)),
            None => warn(text),
        }
    }

    /// Begins the steps, and shows the bar before the first step ends.
    pub fn begin(&self) {
        if let Some(bar) = &self.bar {
            bar.set_message(self.progress.beside_bar(None, Instant::now()));
        }
    }

    /// Notes a finished step: moves the bar, and prints a line if one is due.
    pub fn step(&mut self, line: &StepLine) {
        let now = Instant::now();
        self.progress.note(line, now);
        if let Some(bar) = &self.bar {
            bar.set_position(line.step);
            bar.set_message(self.progress.beside_bar(Some(line), now));
        }
        let total_steps = self.progress.total_steps();
        if self.is_due(line.step, now) || line.step == total_steps {
            self.last_line = Some(now);
            self.line(&format!("step {}/{total_steps}  {}", line.step, self.progress.log_line(line, now)));
        }
    }

    /// Whether a step has a line: by its number, or else by time, at growing intervals.
    fn is_due(&self, step: u64, now: Instant) -> bool {
        if let Some(every) = self.log_every_steps {
            return step.is_multiple_of(every);
        }
        let gap = (self.progress.elapsed(now) / 60).clamp(MIN_GAP, LARGEST_GAP);
        self.progress.is_at_the_start() || self.last_line.is_none_or(|last| now.duration_since(last) >= gap)
    }

    /// Shows a running evaluation in the bar.
    pub fn evaluating(&self, done: u64, all: u64) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("evaluating: {done}/{all} rows"));
        }
    }

    /// Notes a finished evaluation.
    pub fn note_validation(&mut self, loss: f64) {
        self.progress.note_validation(loss);
    }

    /// Steps, time and throughput of this process.
    pub fn throughput(&self) -> Option<String> {
        self.progress.summary(Instant::now())
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The progress of rows, on standard error: a bar on a terminal, otherwise occasional lines.
pub struct RowProgress {
    bar: Option<ProgressBar>,
    began: Instant,
    last_line: Instant,
}

impl RowProgress {
    /// The progress before the first row.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:16} {pos}/{len} rows  {msg}");
            let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(FRAMES_A_SECOND));
            bar
        });
        Self { bar, began: Instant::now(), last_line: Instant::now() }
    }

    /// Notes that `done` of `all` rows are finished.
    pub fn note(&mut self, done: u64, all: u64) {
        let now = Instant::now();
        #[expect(clippy::cast_precision_loss, reason = "counts of rows")]
        let left = (now - self.began).mul_f64(all.saturating_sub(done) as f64 / done.max(1) as f64);
        let left = format!("{} left", run_plan::pace::duration(left));
        match &self.bar {
            Some(bar) => {
                bar.set_length(all);
                bar.set_position(done);
                bar.set_message(left);
            }
            None if done < all && now - self.last_line >= MIN_GAP => {
                self.last_line = now;
                note(&format!("{done}/{all} rows  {left}"));
            }
            None => {}
        }
    }

    /// Removes the bar.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The shortest time between two lines of steps, if the config gives no number. It applies at the start, and in a run of many hours.
const MIN_GAP: Duration = Duration::from_secs(10);
const LARGEST_GAP: Duration = Duration::from_secs(300);

/// The most frames of the bar in a second.
const FRAMES_A_SECOND: u8 = 10;

/// The terminal on standard error. The output's thread writes to it, and everything drawn together appears together.
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
        self.write_str(text)?;
        self.draw("\n")
    }

    fn write_str(&self, text: &str) -> std::io::Result<()> {
        self.draw(Shown::text(text).as_str())
    }

    fn clear_line(&self) -> std::io::Result<()> {
        self.draw("\r\x1b[2K")
    }

    fn flush(&self) -> std::io::Result<()> {
        let frame = std::mem::take(&mut *self.frame.lock().unwrap_or_else(PoisonError::into_inner));
        show(Stream::Err, Kind::Frame, &Shown::drawing(frame));
        Ok(())
    }
}
