//! The project's automation, in Rust: `cargo xtask COMMAND`.
//!
//! Invariant: nothing here is needed to build, test or use the trainer; each command can be run again at any time and
//! gives the same files.

mod bench;
mod calendar;
mod faults;
mod kernels;
mod page;
mod plans;
mod release;
mod sample_data;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

/// One line per command, shown when the command is missing or unknown.
const USAGE: &str = "\
usage: cargo xtask COMMAND

commands:
  bench         measure memory and time of the command: memory, limits, pressure, slope, levers, budgets
  faults        faults in runs of the command, and whether it keeps its promises; docs/faults.md
  kernels       compile the kernels for NVIDIA's cards: registers, spills, occupancy, rooflines; docs/gpu-testing.md
  notices       write the notices and the bill of materials of the program for a target
  page          build target/page/will-it-fit.html: the planner for a browser, in one file
  plans         the planner's tests for every processor that the program knows, or for a sample
  release       build what users install (static programs, wheel, image), and try it
  sample-data   write data/sample-{train,validation}.parquet and data/sample-tokenizer.json
  tidy          check the rules of ARCHITECTURE.md and STYLE.md that a machine can check
  wheel         make a wheel with a program that was built before, for machines with as new a C library";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result: Result<(), String> = match arguments.first().map(String::as_str) {
        Some("bench") => bench::run(root(), &arguments[1..]),
        Some("faults") => faults::run(root(), &arguments[1..]),
        Some("kernels") => kernels::run(root(), &arguments[1..]),
        Some("notices") => release::notices_of(root(), &arguments[1..]),
        Some("page") => page::run(root(), &arguments[1..]),
        Some("plans") => plans::run(root(), &arguments[1..]),
        Some("release") => release::run(root(), &arguments[1..]),
        Some("sample-data") => sample_data::run(&root().join("data")),
        Some("wheel") => release::wheel_of(root(), &arguments[1..]),
        Some("tidy") => tidy::run(root()),
        Some(other) => Err(format!("unknown command `{other}`\n{USAGE}")),
        None => Err(USAGE.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's directory.
fn root() -> &'static Path {
    let manifest: &'static str = env!("CARGO_MANIFEST_DIR");
    Path::new(manifest).parent().expect("xtask lies inside the workspace")
}
