//! A part of the matrix that takes less than two minutes on two shared cores, run by `.ci/run`.
//!
//! Every rename, removal, sync, new directory and lock gets a fault, and every n-th other operation. First, the harness has
//! to find a planted loss: a check that cannot fail proves nothing.

use super::Lab;
use super::damage;
use super::disks;
use super::inputs;
use super::neighbours;
use super::points;
use super::power;
use super::promises;
use super::scenario::{self, Point, Scenario};
use super::table::Table;
use super::threads;

/// A kill is tried before every turning point, and before every n-th of all operations.
const KILL_EVERY: usize = 16;
/// Every n-th of all operations fails.
const FAIL_EVERY: usize = 12;
/// Power is cut before every n-th operation that changes the disk.
const CUT_EVERY: usize = 12;
/// Damages of each kind.
const DAMAGES: usize = 5;
/// Every n-th limit on the number of threads is tried.
const THREADS_EVERY: usize = 4;

/// Runs this part of the matrix.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    inputs::quick(lab, table)?;
    neighbours::run(lab, table)?;
    for name in scenario::NAMES {
        let scenario = Scenario::new(lab, name, true)?;
        if name == "fresh" {
            find_a_planted_loss(lab, &scenario)?;
            disks::parts_of_calls(lab, table, &scenario)?;
            power::cuts(lab, table, &scenario, CUT_EVERY)?;
            threads::few(lab, table, &scenario, THREADS_EVERY)?;
        }
        let chosen = |every: usize, turning: bool| -> Vec<&Point> {
            let points = scenario.points.iter().enumerate();
            points
                .filter(|(at, point)| turning && point.is_turning() || at % every == 0)
                .map(|(_, point)| point)
                .collect()
        };
        points::kills(lab, table, &scenario, &chosen(KILL_EVERY, true))?;
        points::errors(lab, table, &scenario, &chosen(FAIL_EVERY, false), "EIO", 5)?;
    }
    damage::some(lab, table, DAMAGES)
}

/// The library lies about a rename: a save is acknowledged but does not exist. The check has to report it.
fn find_a_planted_loss(lab: &Lab, scenario: &Scenario) -> Result<(), String> {
    let directory = lab.directory("planted")?;
    let lie = "calls=rename,renameat,renameat2\nonly=/checkpoints/step-\nfrom=1\nto=end\ndo=lie\n";
    let stop = format!("under={}\n{lie}", directory.display());
    let ran = scenario::run(lab, &scenario.arguments, &directory, Some(&lab.faults(stop)))?;
    let broken = promises::nothing_lost(&directory.join(super::lab::RUN), promises::acknowledged(&ran.out));
    if broken.is_empty() { Err("the harness did not see a planted loss".to_string()) } else { Ok(()) }
}
