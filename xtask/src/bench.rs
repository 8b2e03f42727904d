//! Benchmarks of the real command: `cargo xtask bench memory|limits|pressure|slope|levers|budgets`.
//!
//! Each runs `train_low_mem`, as built beside this program, in child processes, reads the operating
//! system's counters about them, and writes a table for people and one for programs.

mod budgets;
mod cases;
pub(crate) mod child;
mod data;
mod levers;
mod limits;
mod memory;
mod pressure;
mod slope;

use std::path::{Path, PathBuf};

const USAGE: &str = "\
usage: cargo xtask bench NAME [--filter TEXT] [--quick] [--rows FILE]

names:
  memory   predicted and measured peak over a table of cases: docs/memory-measured.{md,json}
  limits   whole runs inside a control group whose limit is the budget: docs/memory-limits.{md,json}
  pressure a run beside a process that takes the memory of its control group: docs/memory-pressure.{md,json}
  slope    whether the resident set grows over 3,000 steps: docs/memory-slope.{md,json}
  levers   what each lever saves and costs on this machine: docs/memory-levers.{md,json}
  budgets  how much of a budget is used, and what speed it buys: docs/memory-budgets.{md,json}";

/// What the flags say.
struct Options {
    /// Only cases whose name contains this.
    filter: String,
    /// Only the cases that take seconds.
    quick: bool,
    /// A parquet file with `prompt` and `response`, to train on instead of generated rows; `limits` only.
    rows: Option<PathBuf>,
    /// The command.
    program: PathBuf,
    /// Where temporary files go: below `target`, and removed when a case is done.
    scratch: PathBuf,
    /// Where the tables go.
    docs: PathBuf,
}

impl Options {
    /// Whether every case is asked for.
    fn is_whole(&self) -> bool {
        self.filter.is_empty() && !self.quick
    }
}

/// Runs one benchmark.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
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
        docs: root.join("docs"),
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
        other => Err(format!("unknown benchmark `{other}`\n{USAGE}")),
    };
    if options.is_whole() {
        let _ = std::fs::remove_dir_all(&options.scratch);
    }
    result
}

/// Writes `NAME.md` and `NAME.json` below `docs`; a part of the cases goes below `target` instead.
fn write_tables(options: &Options, name: &str, markdown: &str, json: &serde_json::Value) -> Result<(), String> {
    let directory = if options.is_whole() { &options.docs } else { &options.scratch };
    for (extension, text) in [("md", markdown.to_owned()), ("json", format!("{json:#}\n"))] {
        let path = directory.join(format!("{name}.{extension}"));
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// Mebibytes, for reading.
#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
