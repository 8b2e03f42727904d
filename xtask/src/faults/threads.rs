//! Systems that allow few threads: beyond some number no thread starts, as with `pids.max` or `ulimit -u`.

use super::Lab;
use super::scenario::Scenario;
use super::table::Table;

/// Threads that a run's operations should use.
const THREADS: usize = 4;
/// More threads than a run starts: this limit refuses none.
const ALL: u64 = 24;

/// A fresh and a resumed run, with every limit on the number of threads from 0 up.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in ["fresh", "resumed"] {
        let scenario = Scenario::new(lab, name, true)?;
        few(lab, table, &scenario, 1)?;
    }
    Ok(())
}

/// One limit in `every`. Each try also shows that the bytes equal those of a run on one thread.
pub fn few(lab: &Lab, table: &mut Table, scenario: &Scenario, every: usize) -> Result<(), String> {
    let tries: Vec<(String, u64)> = (0..=ALL).step_by(every).map(|most| (format!("{most} threads"), most)).collect();
    let row = format!("few threads can start, {}", scenario.name);
    lab.try_all(table, &row, &tries, Vec::new(), |&most, directory| {
        let faults = lab.faults(format!("threads={most}")).on_threads(THREADS);
        let (ran, mut broken) = scenario.try_under(lab, directory, &faults, false)?;
        if most == ALL && (ran.code != Some(0) || ran.err.contains("threads")) {
            broken.push(format!("with {ALL} threads: {}: {}", ran.ending(), ran.err));
        }
        Ok(broken)
    })
}
