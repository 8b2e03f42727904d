//! `cargo xtask faults [PART...]`: injects faults into real runs of the command, and checks the promises of a run.
//!
//! A try is one run with one fault, and one resumed run without faults. `docs/faults.md` describes the faults and the
//! measurements. The library `crates/fault-points` makes the faults. It is loaded before the command, which needs no
//! changes for it.
//!
//! Invariants:
//! * A try has a name that reproduces it; `--resume` skips tries that were made before.
//! * A part that cannot run on this machine is reported in the table and in the file. It never counts as passed.

mod beyond;
mod damage;
mod disks;
mod groups;
mod inputs;
mod kills;
mod lab;
mod neighbours;
mod points;
mod power;
mod process;
mod promises;
mod quick;
mod scenario;
mod signals;
mod table;
mod threads;

use std::path::{Path, PathBuf};

use lab::Lab;
use table::Table;

const USAGE: &str = "\
usage: cargo xtask faults [PART...] [--seed N] [--tries N] [--jobs N] [--only TEXT] [--small]
                          [--resume FILE] [--out FILE.json] [--scratch DIR] [--program FILE]

parts, all but `quick` where none is named:
  points       SIGKILL and errors at every operation on a file
  kills        SIGKILL at random operations and moments, again and again until the run is done
  disks        full and read-only disks, limits on files, errors that stay, short reads and writes
  checkpoints  damaged checkpoints
  power        power cuts: what was not synced is not there
  memory       hard memory groups whose limit is the budget, also with rows that are meant to break it
  inputs       mutated files for every parser: parquet, safetensors, tokenizers, configs
  signals      SIGTERM, SIGINT and SIGHUP at random moments; `--only t5-small` or `chatlm-0.2b` tries these models, too
  threads      systems that allow few threads
  bills        memory that no bill has: the run says that its peak is above the prediction
  neighbours   another user, who plants links and pipes, exchanges directories and holds locks (as root)
  quick        a slice of all that takes less than two minutes: part of `.ci/run`

flags:
  --seed N     what is drawn at random begins here (default 1)
  --tries N    at most so many tries a row, spread evenly (default: all, or some hundreds that are drawn at random)
  --jobs N     tries at a time (default 2)
  --only TEXT  rows whose name contains TEXT
  --small      a smaller model than the preset `tiny`: the same operations, a quarter of the time
  --resume F   tries are written to F, and those that are there are not made again
  --out F      the table as JSON (default target/faults/PARTS.json)
  --scratch D  where runs write (default: memory, /dev/shm)
  --program F  the command (default: what was built beside this program)";

/// The parsed flags.
pub struct Options {
    parts: Vec<String>,
    seed: u64,
    tries: Option<usize>,
    jobs: usize,
    only: String,
    small: bool,
    resume: Option<PathBuf>,
    out: Option<PathBuf>,
    scratch: Option<PathBuf>,
    program: Option<PathBuf>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Options {
            parts: Vec::new(),
            seed: 1,
            tries: None,
            jobs: 2,
            only: String::new(),
            small: false,
            resume: None,
            out: None,
            scratch: None,
            program: None,
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument}: expected a value\n{USAGE}"));
            match argument.as_str() {
                "--seed" => options.seed = number(argument, value()?)?,
                "--tries" => options.tries = Some(number(argument, value()?)?),
                "--jobs" => options.jobs = number::<usize>(argument, value()?)?.max(1),
                "--only" => options.only = value()?.clone(),
                "--small" => options.small = true,
                "--resume" => options.resume = Some(value()?.into()),
                "--out" => options.out = Some(value()?.into()),
                // Tries have directories of their own.
                "--program" => {
                    options.program = Some(std::path::absolute(value()?).map_err(|error| error.to_string())?)
                }
                "--scratch" => options.scratch = Some(value()?.into()),
                flag if flag.starts_with('-') => return Err(format!("unknown flag `{flag}`\n{USAGE}")),
                part if PARTS.iter().any(|(name, _)| *name == part) => options.parts.push(part.to_string()),
                part => return Err(format!("unknown part `{part}`\n{USAGE}")),
            }
        }
        if options.parts.is_empty() {
            options.parts = PARTS.iter().map(|(name, _)| name.to_string()).filter(|name| name != "quick").collect();
        }
        Ok(options)
    }
}

fn number<T: std::str::FromStr>(flag: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{flag}: expected a number, got `{text}`"))
}

/// A part: makes its tries, and adds their rows.
type Part = fn(&Lab, &mut Table) -> Result<(), String>;

const PARTS: &[(&str, Part)] = &[
    ("points", points::run),
    ("kills", kills::run),
    ("disks", disks::run),
    ("checkpoints", damage::run),
    ("power", power::run),
    ("memory", groups::run),
    ("inputs", inputs::run),
    ("signals", signals::run),
    ("threads", threads::run),
    ("bills", beyond::run),
    ("neighbours", neighbours::run),
    ("quick", quick::run),
];

/// Runs the parts, prints the table and writes it.
///
/// # Errors
///
/// If any try broke a promise, or tries could not be made.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let command = format!("cargo xtask faults {}", arguments.join(" "));
    let lab = Lab::new(root, options)?;
    let mut table = Table::new(root, command.trim_end());
    let parts = lab.options.parts.clone();
    let result = parts.iter().try_for_each(|part| {
        let (_, run) = PARTS.iter().find(|(name, _)| name == part).expect("parts were checked");
        table.begin(part);
        run(&lab, &mut table)
    });
    print!("\n{}", table.text());
    let default = root.join("target/faults").join(format!("{}.json", parts.join("-")));
    let path = lab.options.out.clone().unwrap_or(default);
    table.write(&path)?;
    println!("wrote {}", path.display());
    result?;
    match table.failures() {
        0 => Ok(()),
        failures => Err(format!("{failures} tries broke a promise; they are named above, and in {}", path.display())),
    }
}
