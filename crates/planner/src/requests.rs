//! The requests of a plan's step to a card.

use t5_ops::Calls;

use crate::Plan;
use crate::counted::StepCounter;
use crate::error::Result;
use crate::job::{Job, Work};

/// The requests of a plan's step to a card, if all samples are as long as the longest. `None` on the host, or if nothing is trained.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen.
pub fn device_calls(job: &Job<'_>, plan: &Plan) -> Result<Option<Calls>> {
    let Work::Training(training) = &job.work else { return Ok(None) };
    if plan.predicted_device_peak.0 == 0 {
        return Ok(None);
    }
    let counter = StepCounter::new(job.model, training.options, job.samples, job.longest, &training.processes)?;
    Ok(Some(counter.at(job.place, training.options).calls(&plan.step.levers, training.options)))
}
