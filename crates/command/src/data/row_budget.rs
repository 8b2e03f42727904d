//! What a budget leaves for rows, for commands that make no plan.

use memory_policy::{Bytes, Probe, SystemProbe};
use row_files::ReadOptions;

use crate::cli::flag_values;
use crate::failure::{Exit, Failure, Outcome};

/// The bytes that the budget of a command leaves beside what the process holds already.
///
/// # Errors
/// They are fewer than `least`, or the process held more than the budget already.
pub fn left(command: &str, budget: Option<&str>, least: u64) -> Outcome<u64> {
    let now = SystemProbe::new().snapshot()?;
    let budget = flag_values::budget(budget)?.resolve(&now);
    let needed = now.peak_rss.0.max(now.rss.0 + least);
    if budget.0 < needed {
        // A MiB more, because a process does not hold the same pages twice.
        let enough = needed.div_ceil(1 << 20) + 1;
        let message = format!("`{command}` needs at least {}; --memory-budget is {budget}", Bytes(needed));
        return Err(Failure::new(Exit::DoesNotFit, message).hint(format!("use `--memory-budget {enough}MiB` or more")));
    }
    Ok(budget.0 - now.rss.0)
}

/// The bytes with which short rows of any kind of file can be read.
pub const LEAST: u64 = 10 << 20;

/// How a command reads rows within its budget. Longer rows are errors of these rows.
///
/// # Errors
/// Not even short rows fit.
pub fn options(command: &str, budget: Option<&str>, options: ReadOptions) -> Outcome<ReadOptions> {
    Ok(options.within(left(command, budget, LEAST)?, 0, 0))
}
