//! Benchmarks of the real command: `cargo xtask bench memory|limits|pressure|slope|levers|budgets|pace|readme`.
//!
//! Each benchmark runs `train_low_mem`, as built beside this program, in child processes and reads the operating
//! system's counters for them. It writes one table for readers and one for programs to `bench`.

mod budgets;
mod cases;
pub(crate) mod child;
mod data;
mod levers;
mod limits;
mod memory;
mod pace;
mod pressure;
mod readme;
pub mod record;
mod slope;

use std::path::{Path, PathBuf};

const USAGE: &str = "\
usage: cargo xtask bench NAME [--filter TEXT] [--quick] [--rows FILE]

names:
  memory    compare predicted and measured peaks over a table of cases
  limits    train inside control groups whose limit is the budget
  pressure  train beside a process that takes the memory of the control group
  slope     look for growth of the resident set over 3,000 steps
  levers    measure how much memory each lever saves and how much time it costs
  budgets   measure how much of a budget is used, and how fast a step is within it
  pace      compare the planned time of a step with the measured one
  readme    measure the README's table of steps beside PyTorch's, and write it there

A whole benchmark rewrites the section of this processor in bench/NAME.md and NAME.json. With --filter or --quick it writes below target.\
";

/// The parsed flags.
struct Options {
    /// Only cases whose name contains this.
    filter: String,
    /// Only the cases that take seconds.
    quick: bool,
    /// A parquet file with `prompt` and `response`, to train on instead of generated rows; `limits` only.
    rows: Option<PathBuf>,
    /// The command under test.
    program: PathBuf,
    /// Directory for temporary files: below `target`, and removed after each case.
    scratch: PathBuf,
    /// Directory for the pages of whole benchmarks.
    pages: PathBuf,
    /// The origin of the result.
    origin: record::Origin,
}

impl Options {
    /// Whether every case was requested.
    fn is_whole(&self) -> bool {
        self.filter.is_empty() && !self.quick
    }
}

/// Runs one benchmark.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let command = command(arguments);
    let mut arguments = arguments.iter();
    let name = arguments.next().ok_or(USAGE)?;
    if name == "take-memory" {
        return pressure::take(arguments.as_slice());
    }
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut options = Options {
        filter: String::new(),
        quick: false,
        rows: None,
        program: here.with_file_name("train_low_mem"),
        scratch: here.with_file_name(format!("bench-scratch-{}", std::process::id())),
        pages: root.join("bench"),
        origin: record::Origin::here(root, name, command),
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--filter" => options.filter = arguments.next().ok_or("--filter: expected a text")?.clone(),
            "--quick" => options.quick = true,
            "--rows" => options.rows = Some(arguments.next().ok_or("--rows: expected a file")?.into()),
            other => return Err(format!("unknown flag `{other}`\n{USAGE}")),
        }
    }
    if !options.program.is_file() {
        return Err(format!("{}: not built; `cargo build --release --workspace`", options.program.display()));
    }
    std::fs::create_dir_all(&options.scratch).map_err(|error| format!("{}: {error}", options.scratch.display()))?;
    let result = match name.as_str() {
        "memory" => memory::run(&options),
        "limits" => limits::run(&options),
        "levers" => levers::run(&options),
        "pressure" => pressure::run(&options),
        "slope" => slope::run(&options),
        "budgets" => budgets::run(&options),
        "pace" => pace::run(&options),
        "readme" => readme::run(root, &options),
        other => Err(format!("unknown benchmark `{other}`\n{USAGE}")),
    };
    if options.is_whole() {
        let _ = std::fs::remove_dir_all(&options.scratch);
    }
    result
}

/// The command line, with paths reduced to file names.
fn command(arguments: &[String]) -> String {
    let file_name = |argument: &String| Path::new(argument).file_name()?.to_str().map(str::to_owned);
    let words = arguments.iter().map(|argument| file_name(argument).unwrap_or_else(|| argument.clone()));
    format!("cargo xtask bench {}", words.collect::<Vec<_>>().join(" "))
}

/// Writes the tables of a whole benchmark to `bench`, and the tables of a partial one below `target`.
fn write_tables(options: &Options, markdown: &str, json: &serde_json::Value) -> Result<(), String> {
    let directory = if options.is_whole() { &options.pages } else { &options.scratch };
    for path in options.origin.write(directory, markdown, json)? {
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// Mebibytes, for the tables.
#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
