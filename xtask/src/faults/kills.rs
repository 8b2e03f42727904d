//! `SIGKILL` at random, repeatedly until the run is done: at file operations, and at random times.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Lab;
use super::lab::{Outcome, RUN};
use super::process;
use super::promises;
use super::scenario::{self, Scenario};
use super::table::Table;
use crate::sample_data::random::Random;

/// Scenarios that are killed.
const SCENARIOS: [&str; 2] = ["fresh", "on disk"];
/// The most kills of one run before it may run to its end.
const MAX_KILLS: usize = 4;
/// Default number of runs per row; each is killed at least once.
const TRIES: usize = 250;

/// Both kinds of kills, for each scenario.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in SCENARIOS {
        let rows = ["operations", "moments"].map(|at| format!("SIGKILL at random {at}, {name}"));
        if rows.iter().all(|row| !lab.is_asked_for(row)) {
            continue;
        }
        let scenario = Scenario::new(lab, name, lab.options.small)?;
        let [operations, moments] = &rows;
        at_operations(lab, table, &scenario, operations)?;
        at_moments(lab, table, &scenario, moments)?;
    }
    Ok(())
}

/// Tries with the seed in their names.
fn tries(lab: &Lab) -> Vec<(String, u64)> {
    let first = lab.options.seed;
    let count = lab.options.tries.unwrap_or(TRIES) as u64;
    (first..first + count).map(|seed| (format!("--seed {seed} --tries 1"), seed)).collect()
}

fn at_operations(lab: &Lab, table: &mut Table, scenario: &Scenario, row: &str) -> Result<(), String> {
    let kills = AtomicUsize::new(0);
    let last = u32::try_from(scenario.points.len()).unwrap_or(u32::MAX);
    lab.try_counted(table, row, &tries(lab), (&kills, "kills"), |&seed, directory| {
        let mut random = Random::named(&format!("{row} {seed}"));
        killed_often(lab, scenario, directory, &kills, |arguments| {
            let moment = random.pick(&["before", "in", "after"]).to_string();
            let faults = format!("{}\nfrom={}\ndo=kill-{moment}", scenario::counted(directory), 1 + random.below(last));
            scenario::run(lab, arguments, directory, Some(&lab.faults(faults)))
        })
    })
}

fn at_moments(lab: &Lab, table: &mut Table, scenario: &Scenario, row: &str) -> Result<(), String> {
    // Up to the duration of a run on this machine.
    let directory = lab.directory("timed")?;
    scenario.prepare(&directory)?;
    let began = Instant::now();
    scenario::run(lab, &scenario.arguments, &directory, None)?;
    let longest = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
    let kills = AtomicUsize::new(0);
    lab.try_counted(table, row, &tries(lab), (&kills, "kills"), |&seed, directory| {
        let mut random = Random::named(&format!("{row} {seed}"));
        killed_often(lab, scenario, directory, &kills, |arguments| {
            let mut running = process::start(&lab.program, arguments, directory, None)?;
            if !running.wait_until(Duration::from_micros(random.below(longest).into())) {
                running.kill()?;
            }
            running.end()
        })
    })
}

/// Starts the run, and resumes it after each kill; the last resume is not killed.
fn killed_often(
    lab: &Lab,
    scenario: &Scenario,
    directory: &Path,
    kills: &AtomicUsize,
    mut start: impl FnMut(&[String]) -> Result<process::Ran, String>,
) -> Outcome {
    scenario.prepare(directory)?;
    let run = directory.join(RUN);
    let (mut broken, mut newest, mut arguments) = (Vec::new(), None, scenario.arguments.as_slice());
    for _ in 0..MAX_KILLS {
        let ran = start(arguments)?;
        kills.fetch_add(usize::from(ran.signal.is_some()), Ordering::Relaxed);
        newest = newest.max(promises::acknowledged(&ran.out));
        broken.extend(promises::ended_well(&ran, true));
        broken.extend(promises::nothing_lost(&run, newest));
        if ran.code == Some(0) {
            break;
        }
        arguments = scenario.resume_arguments(directory);
    }
    let resumed = scenario::run(lab, scenario.resume_arguments(directory), directory, None)?;
    broken.extend(scenario.whole.resumed(&resumed, directory));
    Ok(broken)
}
