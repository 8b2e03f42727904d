//! Faults at every file operation: `SIGKILL` before and within the N-th operation, and each error at the N-th operation.
//!
//! A kill after one operation leaves the same disk as a kill before the next. Only after the last operation is a kill tried
//! separately.

use super::Lab;
use super::scenario::{self, Point, Scenario};
use super::table::Table;

/// Errors, with their numbers on Linux.
pub const ERRORS: [(&str, i64); 9] = [
    ("EIO", 5),
    ("ENOSPC", 28),
    ("EACCES", 13),
    ("EMFILE", 24),
    ("ESTALE", 116),
    ("EINTR", 4),
    ("EDQUOT", 122),
    ("EROFS", 30),
    ("EXDEV", 18),
];

/// Every scenario, every operation, every fault.
pub fn run(lab: &Lab, table: &mut Table) -> Result<(), String> {
    for name in scenario::NAMES {
        let rows = rows(name);
        if rows.iter().all(|row| !lab.is_asked_for(row)) {
            continue;
        }
        let scenario = Scenario::new(lab, name, lab.options.small)?;
        let points: Vec<&Point> = scenario.points.iter().collect();
        kills(lab, table, &scenario, &points)?;
        for (error, number) in ERRORS {
            errors(lab, table, &scenario, &points, error, number)?;
        }
    }
    Ok(())
}

fn rows(scenario: &str) -> Vec<String> {
    let kills = ["before", "in", "after"].map(|moment| killed(moment, scenario));
    kills.into_iter().chain(ERRORS.iter().map(|(error, _)| failed(error, scenario))).collect()
}

fn killed(moment: &str, scenario: &str) -> String {
    format!("SIGKILL {moment} an operation, {scenario}")
}

fn failed(error: &str, scenario: &str) -> String {
    format!("{error} at an operation, {scenario}")
}

/// Kills before each of these operations, in each write among them, and after the last one.
pub fn kills(lab: &Lab, table: &mut Table, scenario: &Scenario, points: &[&Point]) -> Result<(), String> {
    let writes: Vec<&Point> = points.iter().copied().filter(|point| point.is_write()).collect();
    let last: Vec<&Point> = points.iter().copied().skip(points.len().saturating_sub(1)).collect();
    for (moment, points) in [("before", points), ("in", &writes), ("after", &last)] {
        inject(lab, table, scenario, points, &killed(moment, scenario.name), &format!("kill-{moment}"))?;
    }
    Ok(())
}

/// Lets each of these operations fail.
pub fn errors(
    lab: &Lab,
    table: &mut Table,
    scenario: &Scenario,
    points: &[&Point],
    error: &str,
    number: i64,
) -> Result<(), String> {
    inject(lab, table, scenario, points, &failed(error, scenario.name), &format!("errno:{number}"))
}

fn inject(
    lab: &Lab,
    table: &mut Table,
    scenario: &Scenario,
    points: &[&Point],
    row: &str,
    action: &str,
) -> Result<(), String> {
    let tries: Vec<(String, u64)> = points.iter().map(|point| (point.name(), point.number)).collect();
    let notes = vec![format!("{} operations in all", scenario.points.len())];
    lab.try_all(table, row, &tries, notes, |number, directory| {
        scenario.try_once(lab, directory, &format!("from={number}\ndo={action}"))
    })
}
