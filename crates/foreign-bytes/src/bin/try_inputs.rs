//! `try_inputs`: runs every parser of foreign bytes on seeded, mutated inputs. `cargo xtask faults inputs` runs it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use foreign_bytes::{
    Limits, PARSERS, Parser, Run, Scratch, Tally, parser, report, run_child, table, try_command, try_parser,
};

const USAGE: &str = "\
usage: try_inputs [--quick] [--tries N] [--seed N] [--sample N] [--parser NAME]... [--findings DIR] [--report FILE]
       try_inputs --parse NAME FILE

  --tries N      inputs of each parser (default 2000)
  --sample N     of these, inputs that the real command reads (default 40; 0: none)
  --seed N       inputs follow from it (default 1)
  --quick        150 inputs of each parser, 1 of them through the command
  --parser NAME  this parser only
  --findings DIR where inputs are kept that broke something (default target/faults/inputs)
  --report FILE  the table as JSON
  --parse        one parser, one file, in this process";

struct Typed {
    tries: u64,
    sample: u64,
    seed: u64,
    limits: Limits,
    parsers: Vec<&'static Parser>,
    findings: PathBuf,
    report: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["--child", name, seed, from, to] => child(name, seed, from, to),
        ["--parse", name, file] => parse(name, file),
        _ => drive(&words),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The directory with the corpus: the current one, or the repository that this program was built from.
fn root() -> PathBuf {
    let here = std::env::current_dir().ok().filter(|here| here.join("fuzz/corpus").is_dir());
    here.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
}

fn named(name: &str) -> Result<&'static Parser, String> {
    let names = || PARSERS.iter().map(|parser| parser.name).collect::<Vec<_>>().join(", ");
    parser(name).ok_or_else(|| format!("no parser is called `{name}`; there are: {}", names()))
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a number, got `{text}`\n{USAGE}"))
}

fn child(name: &str, seed: &str, from: &str, to: &str) -> Result<(), String> {
    let (parser, seed) = (named(name)?, number(seed)?);
    run_child(&root(), parser, seed, number(from)?, number(to)?).map_err(|error| error.to_string())
}

fn parse(name: &str, file: &str) -> Result<(), String> {
    let parser = named(name)?;
    let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    let scratch = Scratch::new().map_err(|error| error.to_string())?;
    match (parser.parse)(&bytes, &scratch) {
        Ok(()) => println!("accepted"),
        Err(refusal) => println!("refused: {refusal}"),
    }
    Ok(())
}

fn typed(words: &[&str]) -> Result<Typed, String> {
    let mut typed = Typed {
        tries: 2000,
        sample: 40,
        seed: 1,
        limits: Limits::default(),
        parsers: Vec::new(),
        findings: root().join("target/faults/inputs"),
        report: None,
    };
    let mut rest = words.iter();
    while let Some(&word) = rest.next() {
        if word == "--quick" {
            (typed.tries, typed.sample) = (150, 1);
            continue;
        }
        let value = rest.next().ok_or_else(|| format!("`{word}` is unknown, or lacks its value\n{USAGE}"))?;
        match word {
            "--tries" => typed.tries = number(value)?,
            "--sample" => typed.sample = number(value)?,
            "--seed" => typed.seed = number(value)?,
            "--limit-ms" => typed.limits.time = std::time::Duration::from_millis(number(value)?),
            "--parser" => typed.parsers.push(named(value)?),
            "--findings" => typed.findings = value.into(),
            "--report" => typed.report = Some(value.into()),
            _ => return Err(format!("`{word}` is unknown\n{USAGE}")),
        }
    }
    if typed.parsers.is_empty() {
        typed.parsers = PARSERS.iter().collect();
    }
    Ok(typed)
}

fn drive(words: &[&str]) -> Result<(), String> {
    let typed = typed(words)?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let binary = program.with_file_name("train_low_mem");
    if typed.sample > 0 && !binary.is_file() {
        return Err(format!("{}: not built; `cargo build --release`, or --sample 0", binary.display()));
    }
    let Typed { seed, tries, limits, .. } = typed;
    let run = Run { root: root(), program, seed, tries, limits, findings: Some(typed.findings.clone()) };
    let rows = Mutex::new(Vec::new());
    let left = Mutex::new(typed.parsers.iter().enumerate());
    let failed = Mutex::new(None);
    let work = || {
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((at, parser)) = next else { return };
            match try_one(&run, parser, &binary, typed.sample) {
                Ok(tallies) => rows.lock().unwrap_or_else(PoisonError::into_inner).push((at, tallies)),
                Err(error) => {
                    let message = format!("{}: {error}", parser.name);
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    if let Some(message) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(message);
    }
    let mut rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
    rows.sort_by_key(|(at, _)| *at);
    let tallies: Vec<Tally> = rows.into_iter().flat_map(|(_, tallies)| tallies).collect();
    print!("{}", table(&tallies));
    let findings: Vec<_> = tallies.iter().flat_map(|tally| &tally.findings).collect();
    for finding in &findings {
        println!("{} {} {}: {}", finding.parser, finding.kind.name(), finding.number, finding.what);
    }
    if let Some(path) = &typed.report {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        }
        let text = format!("{:#}\n", report(&tallies));
        durable_files::write_atomic(path, text.as_bytes()).map_err(|error| error.to_string())?;
    }
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("{count} inputs broke a promise; they are kept in {}", typed.findings.display())),
    }
}

fn try_one(run: &Run, parser: &'static Parser, binary: &Path, sample: u64) -> std::io::Result<Vec<Tally>> {
    let mut tallies = vec![try_parser(run, parser)?];
    if sample > 0 {
        tallies.extend(try_command(run, parser, binary, sample)?);
    }
    Ok(tallies)
}
