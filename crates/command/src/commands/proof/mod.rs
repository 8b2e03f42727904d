//! `train_low_mem proof`: the promises of the program, tried on this machine, on one page that a stranger can check.
//!
//! The command starts the program itself, once for each run, within a hard limit of memory: a small T5 at an ample budget, the same at a
//! quarter of it, and once more at the quarter with a kill in between. It judges by what the runs left: their events, their files, and the
//! peak that the system counted. It has no way into a run, so it would notice a program that does not keep its promises.

mod page;
mod runs;
mod torch;

use std::path::Path;

use memory_policy::{Bytes, plural};
use serde_json::Value;

use crate::cli::view_flags::ProofArgs;
use crate::commands::doctor;
use crate::failure::{Exit, Failure, Outcome};
use crate::screen::report;
use crate::screen::stop::Stop;
use runs::{Ended, Lab, Names, Run};

/// Largest relative difference between the losses of two budgets: they differ by the order of sums alone.
const SAME_LOSS: f64 = 1e-5;

/// The measured peak, as a share of the predicted one. Above it the budget's safety margin is used up; below it the bill says little.
const PEAKS: [f64; 2] = [0.75, 1.05];

/// A promise, and what was found.
#[derive(Debug)]
struct Check {
    promise: &'static str,
    holds: bool,
    found: String,
}

impl Check {
    /// A promise that was tried, or could not be.
    fn new(promise: &'static str, tried: Result<(bool, String), String>) -> Self {
        let (holds, found) = tried.unwrap_or_else(|why| (false, why));
        report::note(&format!("{}: {promise}: {found}", if holds { "holds" } else { "DOES NOT HOLD" }));
        Self { promise, holds, found }
    }
}

/// All that the page shows.
#[derive(Debug)]
struct Proof {
    seed: u64,
    steps: u64,
    limited_by: String,
    machine: Vec<(&'static str, String)>,
    runs: Vec<Run>,
    checks: Vec<Check>,
    beside: Option<torch::Beside>,
}

/// Tries every promise, and writes the page.
///
/// # Errors
/// A promise does not hold (exit code 1); the directory is in use; with `--torch`, Python or a library is missing.
pub fn proof(flags: &ProofArgs) -> Outcome<()> {
    let stop = Stop::on_signals()?;
    stop.can_stop_gracefully();
    let python = flags.torch.then(|| torch::find(&flags.python)).transpose()?;
    let lab = Lab::new(flags, &stop)?;
    let mut proof = tried(&lab)?;
    if let Some(python) = &python {
        let beside = torch::beside(&lab, python, proof.runs[1].budget)?;
        proof.checks.push(beside.check());
        proof.beside = Some(beside);
    }
    let path = flags.output.join("proof.md");
    durable_files::write_atomic(&path, page::write(&proof).as_bytes())?;
    let failed = proof.checks.iter().filter(|check| !check.holds).count() as u64;
    let all = plural(proof.checks.len() as u64, "promise");
    if failed == 0 {
        return report::result(&format!("{all} hold; the page is {}\n", path.display()));
    }
    Err(Failure::new(Exit::Internal, format!("{failed} of {all} did not hold; the page is {}", path.display()))
        .hint(format!("please report it with the page; the logs of the runs are in {}/*.log", flags.output.display())))
}

fn tried(lab: &Lab<'_>) -> Outcome<Proof> {
    let fastest = lab.least_budget_of_fastest()?;
    // A process takes some pages more or fewer from run to run, and the fastest plan must fit beside them.
    let [ample, quarter] = [fastest + (4 << 20), fastest.div_ceil(4)].map(|bytes| Bytes(bytes).round_up_to_mib());
    report::note(&format!("a T5 with 7.9 M parameters, {} at {ample} and at {quarter}", plural(lab.steps, "step")));
    lab.keep_order(quarter)?;
    let mut limited_by = String::new();
    let mut run = |name: Names, budget: Bytes| -> Outcome<Run> {
        let enclosure = lab.enclosure(budget, name);
        limited_by = enclosure.in_words();
        lab.run(name, budget, &enclosure)
    };
    let mut runs = vec![run(Names::Ample, ample)?, run(Names::Quarter, quarter)?];
    let same = Check::new("a quarter of the memory gives the same losses", same_losses(&runs[0], &runs[1]));
    let (killed, how) = killed_and_resumed(lab, quarter, runs[1].seconds / lab.steps as f64)?;
    let resumed = killed.expect_done().and_then(|()| same_bytes(lab, &how));
    runs.push(killed);
    let resumed = Check::new("a killed run resumes to the same bytes", resumed);
    let bill = Check::new("memory stays within the bill and the budget", within_bill(&runs));
    let machine = doctor::machine();
    let checks = vec![same, resumed, bill];
    Ok(Proof { seed: lab.seed, steps: lab.steps, limited_by, machine, runs, checks, beside: None })
}

/// Compares the steps of two runs: rows exactly, losses up to the order of sums.
fn same_losses(ample: &Run, quarter: &Run) -> Result<(bool, String), String> {
    ample.expect_done()?;
    quarter.expect_done()?;
    let mut largest = (0.0, 0);
    for (step, (a, b)) in ample.steps.iter().zip(&quarter.steps).enumerate() {
        if a["rows"] != b["rows"] {
            return Err(format!("step {} has other rows", step + 1));
        }
        let [a, b] = [a, b].map(|step| step["loss"].as_f64().unwrap_or(f64::NAN));
        let difference = ((a - b) / a).abs();
        // A difference that is no number is the largest.
        if difference.is_nan() || difference > largest.0 {
            largest = (if difference.is_nan() { f64::INFINITY } else { difference }, step + 1);
        }
    }
    let (difference, step) = largest;
    let words = match difference == 0.0 {
        true => format!("equal in every digit at all {}", plural(ample.steps.len() as u64, "step")),
        false => format!("largest difference {difference:.1e} (step {step}), allowed {SAME_LOSS:e}"),
    };
    Ok((difference <= SAME_LOSS, words))
}

/// Starts the run at the quarter once more, kills it at a random moment, and resumes it. Also returns when it was killed.
fn killed_and_resumed(lab: &Lab<'_>, budget: Bytes, step_seconds: f64) -> Outcome<(Run, String)> {
    let enclosure = lab.enclosure(budget, Names::Killed);
    // Between the first checkpoint and the last step, and somewhere within a step.
    let mut random = lab.random();
    let after = lab.save_every() + random.next() % (lab.steps - lab.save_every());
    #[expect(clippy::cast_precision_loss, reason = "a share of a step")]
    let delay = step_seconds.min(10.0) * (random.next() % 1000) as f64 / 2000.0;
    let killed = lab.run_until(Names::Killed, budget, &enclosure, Some((after, delay)))?;
    let how = match killed.ended {
        Ended::Killed => format!("killed {:.0} ms after step {after}", delay * 1000.0),
        // The resumed run then has nothing to do, and the bytes say so.
        _ => "it had ended before it could be killed".to_owned(),
    };
    let mut resumed = lab.run(Names::Resumed, budget, &enclosure)?;
    resumed.peak = resumed.peak.max(killed.peak);
    resumed.seconds += killed.seconds;
    if killed.ended != Ended::Killed {
        resumed.ended = killed.ended;
    }
    Ok((resumed, how))
}

/// Compares the model and the last checkpoint of the resumed run with those of the run that nothing interrupted.
fn same_bytes(lab: &Lab<'_>, how: &str) -> Result<(bool, String), String> {
    let last = format!("checkpoints/step-{:08}", lab.steps);
    let files = ["model/model.safetensors".to_owned(), format!("{last}/model.safetensors")];
    let mut compared = 0;
    for file in files.into_iter().chain([format!("{last}/optimizer.safetensors")]) {
        let [whole, resumed] = [Names::Quarter, Names::Resumed].map(|name| lab.directory(name).join(&file));
        let (whole, resumed) = (read(&whole)?, read(&resumed)?);
        if whole != resumed {
            let different =
                whole.iter().zip(&resumed).filter(|(a, b)| a != b).count() + whole.len().abs_diff(resumed.len());
            return Ok((false, format!("{how}; {} of {file} differ", plural(different as u64, "byte"))));
        }
        compared += whole.len() as u64;
    }
    Ok((true, format!("{how}; weights and optimizer state are equal ({})", Bytes(compared))))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    regular_file::read(path, 1 << 30).map_err(|error| format!("{}: {error}", path.display()))
}

/// Compares the peaks that the system counted with the predicted ones.
fn within_bill(runs: &[Run]) -> Result<(bool, String), String> {
    runs.iter().try_for_each(Run::expect_done)?;
    #[expect(clippy::cast_precision_loss, reason = "bytes of a process")]
    let share = |run: &Run| run.peak.0 as f64 / run.predicted.0 as f64;
    let is_within = |run: &Run| run.peak <= run.budget && (PEAKS[0]..=PEAKS[1]).contains(&share(run));
    let words = runs.iter().map(|run| {
        let (peak, predicted) = (run.peak, run.predicted);
        format!("{}: {peak} of {predicted} predicted ({:.0} %)", run.name.title(), 100.0 * share(run))
    });
    Ok((runs.iter().all(is_within), words.collect::<Vec<_>>().join("; ")))
}

/// A number of an event.
fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or(f64::NAN)
}
