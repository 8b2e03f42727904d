//! A plan's step as a list of moments: the rows of the bill during each event.
//!
//! The largest moment is the training phase of the bill. Memory outside the step is constant, and the same tally counts the rows of
//! tensors.

use memory_policy::{CostRow, TRAINING};
use serde::Serialize;
use t5::step::count::StepCount;

use crate::Plan;
use crate::counted::StepCounter;
use crate::error::Result;
use crate::job::{Job, Work};
use crate::names::{ACTIVATIONS, BOUNDARIES, GRADIENTS, LOSS, PARAMETERS, WORKSPACE};

/// The moments of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Timeline {
    /// Names of the rows. Constant rows come first.
    pub rows: Vec<String>,
    /// The moments, in order.
    pub moments: Vec<Moment>,
}

/// The most that is held during one event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// The part of the step: `decoder backward`.
    pub pass: &'static str,
    /// The event: `block 3`.
    pub what: String,
    /// Bytes of each row.
    pub bytes: Vec<u64>,
}

/// The timeline of a plan's steps; `None` if nothing is trained, or if tensors are on a device.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen.
pub fn timeline(job: &Job<'_>, plan: &Plan) -> Result<Option<Timeline>> {
    let Work::Training(training) = &job.work else { return Ok(None) };
    let phase = plan.bill.phase_rows.iter().find(|phase| phase.name == TRAINING);
    let Some(phase) = phase.filter(|_| plan.predicted_device_peak.0 == 0) else { return Ok(None) };
    let counter = StepCounter::new(job.model, training.options, job.samples, job.longest, &training.processes)?;
    let counter = counter.beside(training.frozen.map(|of| of.model), training.options)?.at(job.place, training.options);
    let levers = &plan.step.levers;
    let saved = if levers.layer_major.is_some() { BOUNDARIES } else { ACTIVATIONS };
    let of_step = [PARAMETERS, GRADIENTS, saved, LOSS, WORKSPACE];
    let stays: Vec<&CostRow> = phase.rows.iter().filter(|row| !of_step.contains(&row.name)).collect();
    let in_bill = |name| phase.rows.iter().filter(|row| row.name == name).map(|row| row.bytes.0).sum::<u64>();
    let (parameters, gradients) = (in_bill(PARAMETERS), in_bill(GRADIENTS));
    let moments = counter.timeline(levers).into_iter().map(|moment| {
        let held: StepCount = moment.held;
        let gradients = if levers.layer_major.is_some() { held.gradients } else { gradients };
        let of_moment = [held.parameters.unwrap_or(parameters), gradients, held.activations, held.loss, held.workspace];
        let bytes = stays.iter().map(|row| row.bytes.0).chain(of_moment).collect();
        Moment { pass: moment.pass, what: moment.what, bytes }
    });
    let moments = moments.collect();
    let rows = stays.iter().map(|row| row.name.as_str()).chain(of_step.iter().map(|name| name.as_str()));
    Ok(Some(Timeline { rows: rows.map(str::to_owned).collect(), moments }))
}

#[cfg(test)]
mod tests {
    use memory_policy::{Budget, Bytes, MemorySnapshot};
    use trainer::TrainerOptions;

    use super::*;
    use crate::feed::Feed;
    use crate::job::Training;
    use crate::lever::Pins;
    use crate::testing;

    #[test]
    fn the_largest_moment_of_a_step_is_the_training_phase_of_the_bill() {
        let model = t5::Config::preset("t5-small").expect("a preset");
        let options = TrainerOptions { total_steps: 100, ..TrainerOptions::default() };
        let pins = Pins::default();
        let now = MemorySnapshot { rss: Bytes::mib(20), ..testing::machine() };
        let job_in = |budget| Job {
            longest: (128, 64),
            budgets: Budget::Explicit(budget).into(),
            feed: Feed::Unknown { samples: 8, tokens: 192 },
            ..testing::job(&model, Training { disk_writes: 1 << 42, ..testing::training(&options) }, &pins)
        };
        // Each processor packs its operands in its own way, so each has its own smallest budget.
        let Err(crate::Error::DoesNotFit(refusal)) = crate::plan(&job_in(Bytes::mib(1)), &now) else {
            panic!("nothing fits a mebibyte")
        };
        let smallest = refusal.smallest_budget;
        for budget in [Bytes::gib(4), Bytes::mib(700), Bytes::mib(450), Bytes::mib(200), smallest] {
            let job = job_in(budget);
            let plan = crate::plan(&job, &now).expect("it fits").plan;
            let timeline = timeline(&job, &plan).expect("it is counted").expect("a step on the host");
            let largest = timeline.moments.iter().map(|moment| moment.bytes.iter().sum::<u64>()).max();
            let phase = plan.bill.phases.iter().find(|phase| phase.name == TRAINING).expect("training");
            assert_eq!(largest, Some(phase.bytes.0), "{budget}: {}", plan.bill.conclusion);
            assert!(timeline.moments.len() > 24, "{budget}: {} moments", timeline.moments.len());
        }
    }
}
