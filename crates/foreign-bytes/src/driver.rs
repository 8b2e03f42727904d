//! The driver: runs parsers in child processes, each of which handles thousands of inputs.
//!
//! A child makes its inputs itself, from seed and number, and prints a line for each. So the parent always knows which
//! input a child was processing when it died or was silent for too long, and can make that input again. An input that
//! took too much memory or time is retried alone in a fresh process before it counts. Memory left by an earlier input,
//! or a busy machine, is not a finding.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::process_memory::{forget_peak, peak_kib, resident_kib};
use crate::{Finding, Kind, Mutator, Parser, Scratch, Tally, corpus};

/// Limits of one try.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest time for an input.
    pub time: Duration,
    /// The most memory above the base, in KiB. The base is the resident set before the first input.
    pub excess_kib: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time: Duration::from_secs(10), excess_kib: 64 << 10 }
    }
}

/// The hard memory limit of a child, so that a parser cannot exhaust the machine.
const MAX_DATA_BYTES: u64 = 2 << 30;

/// Tries of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// The repository with the corpus.
    pub root: PathBuf,
    /// The program that calls [`run_child`] for the arguments `--child PARSER SEED FROM TO`.
    pub program: PathBuf,
    /// The seed that determines the inputs.
    pub seed: u64,
    /// Number of inputs for a parser.
    pub tries: u64,
    /// Limits of each try.
    pub limits: Limits,
    /// The directory for inputs that broke a promise.
    pub findings: Option<PathBuf>,
}

/// Tries inputs `0..run.tries` of a parser.
///
/// # Errors
/// No child can be started, or the corpus cannot be read.
pub fn try_parser(run: &Run, parser: &'static Parser) -> io::Result<Tally> {
    let mut tally = Tally::new(parser.name);
    let began = Instant::now();
    let mut suspects = Vec::new();
    let mut next = 0;
    while next < run.tries {
        let mut on_line = |line: Line| {
            tally.tries += 1;
            tally.accepted += u64::from(line.outcome == "ok");
            tally.slowest_us = tally.slowest_us.max(line.microseconds);
            let broken = line.broken(&run.limits);
            if broken != Some(Kind::OverLimit) {
                tally.largest_excess_kib = tally.largest_excess_kib.max(line.excess_kib);
            }
            suspects.extend(broken.map(|kind| (line.number, kind, line.what())));
            broken == Some(Kind::OverLimit)
        };
        next = match watch(run, parser, next, run.tries, &mut on_line)? {
            End::Done => run.tries,
            End::Stopped(at) => at,
            End::Broken(at, kind, what) => {
                tally.tries += 1;
                suspects.push((at, kind, what));
                at + 1
            }
        };
    }
    let inputs = corpus(&run.root, parser)?;
    let mutator = Mutator::new(&inputs, parser, run.seed);
    for (number, kind, what) in suspects {
        let (kind, what) = match kind {
            Kind::Hang | Kind::OverLimit => match alone(run, parser, number, &mut tally)? {
                Some(confirmed) => confirmed,
                None => continue,
            },
            _ => (kind, what),
        };
        let saved = save(run, parser.name, kind, number, &mutator.input(number))?;
        tally.findings.push(Finding { parser: parser.name, number, kind, what, saved });
    }
    tally.seconds = began.elapsed().as_secs_f64();
    Ok(tally)
}

/// Tries one input in a fresh process.
fn alone(run: &Run, parser: &Parser, number: u64, tally: &mut Tally) -> io::Result<Option<(Kind, String)>> {
    let mut found = None;
    let mut on_line = |line: Line| {
        tally.largest_excess_kib = tally.largest_excess_kib.max(line.excess_kib);
        found = line.broken(&run.limits).map(|kind| (kind, line.what()));
        false
    };
    match watch(run, parser, number, number + 1, &mut on_line)? {
        End::Done | End::Stopped(_) => Ok(found),
        End::Broken(_, kind, what) => Ok(Some((kind, what))),
    }
}

pub(crate) fn save(run: &Run, parser: &str, kind: Kind, number: u64, input: &[u8]) -> io::Result<Option<PathBuf>> {
    let Some(directory) = &run.findings else { return Ok(None) };
    std::fs::create_dir_all(directory)?;
    let path = directory.join(format!("{parser}-{}-{}-{number}", kind.name(), run.seed));
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
    file.write_all(input)?;
    Ok(Some(path))
}

/// The end of a child.
enum End {
    /// The child tried all of its inputs.
    Done,
    /// The parent stopped the child before this input.
    Stopped(u64),
    /// This input ended the child, or took too long.
    Broken(u64, Kind, String),
}

/// Runs a child over `from..to`. If `on_line` returns true for a line, the child is stopped, and a new one takes over.
fn watch(run: &Run, parser: &Parser, from: u64, to: u64, on_line: &mut dyn FnMut(Line) -> bool) -> io::Result<End> {
    let mut child = Watched::start(run, parser, from, to)?;
    let mut next = from;
    loop {
        match child.lines.recv_timeout(run.limits.time) {
            Ok(Line { outcome, .. }) if outcome == "ready" => {}
            Ok(line) => {
                next = line.number + 1;
                if on_line(line) {
                    child.stop();
                    return Ok(End::Stopped(next));
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                child.stop();
                let what = format!("more than {} s", run.limits.time.as_secs_f64());
                return Ok(End::Broken(next, Kind::Hang, what));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.process.wait()?;
                if status.success() && next == to {
                    return Ok(End::Done);
                }
                let said = child.stop();
                return Ok(End::Broken(next, Kind::Died, format!("{status}: {}", said.trim())));
            }
        }
    }
}

/// A child process and the lines that it prints.
struct Watched {
    process: Child,
    lines: Receiver<Line>,
    errors: Option<JoinHandle<String>>,
}

impl Watched {
    fn start(run: &Run, parser: &Parser, from: u64, to: u64) -> io::Result<Self> {
        let mut command = Command::new(&run.program);
        command.args(["--child", parser.name]).args([run.seed, from, to].map(|number| number.to_string()));
        // Freed memory goes back to the system at once, so the resident set equals the memory in use.
        command.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_TRIM_THRESHOLD_", "65536");
        command.env("MALLOC_ARENA_MAX", "1").env("RUST_BACKTRACE", "0").current_dir(&run.root);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (sender, lines) = channel();
        let output = process.stdout.take().expect("it is a pipe");
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // The receiver is dropped when the child is stopped.
            lines.filter_map(|line| Line::parse(&line)).try_for_each(|line| sender.send(line))
        });
        let errors = process.stderr.take().expect("it is a pipe");
        let errors = std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = errors.take(64 << 10).read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        });
        Ok(Self { process, lines, errors: Some(errors) })
    }

    /// Kills the child, and returns its standard error.
    fn stop(&mut self) -> String {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A line of a child: the outcome of an input.
struct Line {
    number: u64,
    /// `ok`, `refused` or `panic`; `ready` before the first input.
    outcome: String,
    excess_kib: u64,
    microseconds: u64,
    message: String,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(5, '\t');
        Some(Self {
            number: fields.next()?.parse().ok()?,
            outcome: fields.next()?.to_owned(),
            excess_kib: fields.next()?.parse().ok()?,
            microseconds: fields.next()?.parse().ok()?,
            message: fields.next()?.to_owned(),
        })
    }

    fn print(&self, to: &mut impl Write) -> io::Result<()> {
        let Self { number, outcome, excess_kib, microseconds, message } = self;
        let message = message.replace(['\n', '\t', '\r'], " ");
        // One write per line, so that a child that dies has reported everything before.
        to.write_all(format!("{number}\t{outcome}\t{excess_kib}\t{microseconds}\t{message}\n").as_bytes())?;
        to.flush()
    }

    fn broken(&self, limits: &Limits) -> Option<Kind> {
        match self {
            _ if self.outcome == "panic" => Some(Kind::Panic),
            _ if self.excess_kib > limits.excess_kib => Some(Kind::OverLimit),
            _ if u128::from(self.microseconds) > limits.time.as_micros() => Some(Kind::Hang),
            _ => None,
        }
    }

    fn what(&self) -> String {
        format!("{} ({} KiB above the base, {} us)", self.message, self.excess_kib, self.microseconds)
    }
}

/// Runs the child: tries inputs `from..to` and prints a line for each.
///
/// # Errors
/// The corpus cannot be read, there is no temporary directory, or the reader of the lines is gone.
pub fn run_child(root: &Path, parser: &Parser, seed: u64, from: u64, to: u64) -> io::Result<()> {
    static PANICKED: Mutex<String> = Mutex::new(String::new());
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |place| format!("{}:{}: ", place.file(), place.line()));
        let said = panic.payload_as_str().unwrap_or("no message");
        *PANICKED.lock().unwrap_or_else(PoisonError::into_inner) = format!("{place}{said}");
    }));
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let _ = setrlimit(Resource::Data, limit(MAX_DATA_BYTES));
    let _ = setrlimit(Resource::Core, limit(0));
    let inputs = corpus(root, parser)?;
    let mutator = Mutator::new(&inputs, parser, seed);
    let scratch = Scratch::new()?;
    let mut output = io::stdout().lock();
    let base_kib = resident_kib();
    let line = |number, outcome: &str, message: String, started: Instant| Line {
        number,
        outcome: outcome.to_owned(),
        excess_kib: peak_kib().zip(base_kib).map_or(0, |(peak, base)| peak.saturating_sub(base)),
        microseconds: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        message,
    };
    line(from, "ready", String::new(), Instant::now()).print(&mut output)?;
    for number in from..to {
        let input = mutator.input(number);
        forget_peak();
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| (parser.parse)(&input, &scratch)));
        let line = match outcome {
            Ok(Ok(())) => line(number, "ok", String::new(), started),
            Ok(Err(mut refusal)) => {
                refusal.truncate(refusal.floor_char_boundary(300));
                line(number, "refused", refusal, started)
            }
            Err(_) => {
                let said = PANICKED.lock().unwrap_or_else(PoisonError::into_inner).clone();
                line(number, "panic", said, started)
            }
        };
        line.print(&mut output)?;
    }
    Ok(())
}
