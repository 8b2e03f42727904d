//! Runs a sample of the inputs through the real command. Exit codes must be documented ones, and no message may call a
//! failure an internal error.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use crate::driver::save;
use crate::{Finding, Kind, Mutator, Parser, Run, Scratch, Tally, corpus};

/// Exit codes that are documented for bad input: done, usage or config, does not fit, unusable.
const DOCUMENTED: [i32; 4] = [0, 2, 3, 4];

/// Additional time for a command, compared with a parser: it starts, inspects the machine and plans.
const START_SECONDS: u64 = 10;

/// Runs the command `binary` on `sample` of the inputs of a parser, the corpus first. `None` if the command has no
/// argument for such a file.
///
/// # Errors
/// The command cannot be started, or files cannot be written.
pub fn try_command(run: &Run, parser: &'static Parser, binary: &Path, sample: u64) -> io::Result<Option<Tally>> {
    let Some(arguments) = parser.command else { return Ok(None) };
    let mut tally = Tally::new(&format!("{} (command)", parser.name));
    let began = std::time::Instant::now();
    let inputs = corpus(&run.root, parser)?;
    let mutator = Mutator::new(&inputs, parser, run.seed);
    let step = (run.tries / sample.max(1)).max(1);
    for number in (0..run.tries).step_by(step as usize).take(sample as usize) {
        let input = mutator.input(number);
        let scratch = Scratch::new()?;
        let file = scratch.write("input", &input);
        let empty = scratch.path("output");
        std::fs::create_dir(&empty)?;
        let started = std::time::Instant::now();
        let (code, said) = run_command(run, binary, &arguments(&file, &empty))?;
        tally.tries += 1;
        tally.accepted += u64::from(code == Some(0));
        tally.slowest_us = tally.slowest_us.max(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX));
        let kind = match code {
            _ if said == TOO_LONG => Kind::Hang,
            None => Kind::Died,
            Some(code) if DOCUMENTED.contains(&code) && !said.contains("internal error") => continue,
            Some(_) => Kind::ExitCode,
        };
        let what = format!("exit code {code:?}: {}", said.lines().last().unwrap_or_default());
        let saved = save(run, &format!("{}-command", parser.name), kind, number, &input)?;
        tally.findings.push(Finding { parser: parser.name, number, kind, what, saved });
    }
    tally.seconds = began.elapsed().as_secs_f64();
    Ok(Some(tally))
}

const TOO_LONG: &str = "took too long";

/// Returns the exit code and the text of standard error.
fn run_command(run: &Run, binary: &Path, arguments: &[String]) -> io::Result<(Option<i32>, String)> {
    let mut command = Command::new(binary);
    command.env("LOW_MEM_T5_PRICES", "built-in");
    command.args(arguments).current_dir(&run.root).stdin(Stdio::null()).stdout(Stdio::null());
    let mut process = command.stderr(Stdio::piped()).spawn()?;
    let errors = process.stderr.take().expect("it is a pipe");
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        let mut said = Vec::new();
        let _ = errors.take(64 << 10).read_to_end(&mut said);
        sender.send(String::from_utf8_lossy(&said).into_owned())
    });
    let limit = run.limits.time + std::time::Duration::from_secs(START_SECONDS);
    // The pipe closes with the process.
    let said = ended.recv_timeout(limit).unwrap_or_else(|_| {
        let _ = process.kill();
        TOO_LONG.to_owned()
    });
    Ok((process.wait()?.code(), said))
}
