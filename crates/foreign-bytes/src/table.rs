//! Results of the tries, as a table and as JSON.

use std::path::PathBuf;

use serde_json::{Value, json};

/// The way in which a parser broke its promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The parser panicked.
    Panic,
    /// The process ended: an abort, a signal, a stack overflow.
    Died,
    /// The parser did not end in time.
    Hang,
    /// The parser held more memory than allowed.
    OverLimit,
    /// The command's exit code is not documented for bad input, or its message called the failure an internal error.
    ExitCode,
}

impl Kind {
    /// The kind's name in file names.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Panic => "panic",
            Kind::Died => "died",
            Kind::Hang => "hang",
            Kind::OverLimit => "over-limit",
            Kind::ExitCode => "exit-code",
        }
    }
}

/// An input that broke the promise.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The parser.
    pub parser: &'static str,
    /// The number of the input under its seed.
    pub number: u64,
    /// The kind of failure.
    pub kind: Kind,
    /// The message, or the amount of memory.
    pub what: String,
    /// The path of the saved input.
    pub saved: Option<PathBuf>,
}

/// All tries of one parser.
#[derive(Clone, Debug)]
pub struct Tally {
    /// The parser, or the command that was run.
    pub parser: String,
    /// Inputs tried.
    pub tries: u64,
    /// Inputs that were accepted.
    pub accepted: u64,
    /// The longest try in microseconds.
    pub slowest_us: u64,
    /// The most memory above the base, in KiB; 0 if the system does not report it.
    pub largest_excess_kib: u64,
    /// Wall time of all tries.
    pub seconds: f64,
    /// Inputs that broke the promise.
    pub findings: Vec<Finding>,
}

impl Tally {
    /// No tries yet.
    pub fn new(parser: &str) -> Self {
        let parser = parser.to_owned();
        Self { parser, tries: 0, accepted: 0, slowest_us: 0, largest_excess_kib: 0, seconds: 0., findings: Vec::new() }
    }

    /// The number of findings of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.findings.iter().filter(|finding| finding.kind == kind).count()
    }
}

const KINDS: [Kind; 5] = [Kind::Panic, Kind::Died, Kind::Hang, Kind::OverLimit, Kind::ExitCode];

/// The table for a terminal, with a last row of sums.
pub fn table(tallies: &[Tally]) -> String {
    let mut sum = Tally::new("all");
    for tally in tallies {
        sum.tries += tally.tries;
        sum.accepted += tally.accepted;
        sum.slowest_us = sum.slowest_us.max(tally.slowest_us);
        sum.largest_excess_kib = sum.largest_excess_kib.max(tally.largest_excess_kib);
        sum.seconds += tally.seconds;
        sum.findings.extend(tally.findings.iter().cloned());
    }
    let mut text = format!("{:24} {:>7} {:>8}", "parser", "tries", "accepted");
    text.extend(KINDS.map(|kind| format!(" {:>10}", kind.name())));
    text += "  slowest ms  most MiB above base\n";
    for tally in tallies.iter().chain([&sum]) {
        text += &format!("{:24} {:>7} {:>8}", tally.parser, tally.tries, tally.accepted);
        text.extend(KINDS.map(|kind| format!(" {:>10}", tally.count(kind))));
        let (ms, kib) = (tally.slowest_us as f64 / 1e3, tally.largest_excess_kib as f64 / 1024.);
        text += &format!("  {ms:>10.1} {kib:>20.1}\n");
    }
    text
}

/// The table as JSON: a list with an object for each parser.
pub fn report(tallies: &[Tally]) -> Value {
    let finding = |finding: &Finding| json!({ "number": finding.number, "kind": finding.kind.name(), "what": finding.what, "input": finding.saved });
    let row = |tally: &Tally| {
        json!({
            "parser": tally.parser,
            "tries": tally.tries,
            "accepted": tally.accepted,
            "panics": tally.count(Kind::Panic),
            "died": tally.count(Kind::Died),
            "hangs": tally.count(Kind::Hang),
            "over_limit": tally.count(Kind::OverLimit),
            "wrong_exit_codes": tally.count(Kind::ExitCode),
            "slowest_ms": tally.slowest_us as f64 / 1e3,
            "largest_excess_kib": tally.largest_excess_kib,
            "seconds": tally.seconds,
            "findings": tally.findings.iter().map(finding).collect::<Vec<_>>(),
        })
    };
    tallies.iter().map(row).collect()
}
