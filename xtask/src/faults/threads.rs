//! Systems that allow few threads: from some number on none starts, as below `pids.max` or `ulimit -u`.

use super::Lab;
use super::scenario::Scenario;
use super::table::Table;

/// Threads that operations of a run are to run on.
const THREADS: usize = 4;
/// More than a run starts: nothing is refused with so many.
const ALL: u64 = 24;

/// A fresh run and a resumed one, with every number of threads from none on.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in ["fresh", "resumed"] {
        let scenario = Scenario::new(lab, name, true)?;
        few(lab, table, &scenario, 1)?;
    }
    Ok(())
}

/// One number of threads in `every`. Each try also shows that the bytes are those of a run on one thread.
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
