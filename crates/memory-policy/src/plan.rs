//! A plan: the fastest of the offered choices that fits the budget, and why.
//!
//! [`plan`] is a pure function and the only place that weighs memory against time. It looks at every
//! pair of a step choice and a loader choice; of those whose predicted peak and headroom fit, it takes
//! the one with the smallest product of relative times, then the one that holds least, then the one
//! that was offered first.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::costs::sum;
use crate::{Bill, Bytes, CostRow, Costs, DatasetResidency, LoaderChoice, MemorySnapshot, StepChoice};

/// How much of what this process could hold it takes when no budget was given, in percent.
///
/// The rest is for everything else on the machine: it was measured as free at one instant only.
pub const DEFAULT_SHARE_PERCENT: u64 = 80;

/// Headroom, in percent of the predicted peak: how far the operating system's count may lie above
/// the prediction before the budget is broken.
const HEADROOM_PERCENT: u64 = 5;

/// The least headroom: thread stacks and the allocator's own pages do not shrink with the model.
const LEAST_HEADROOM: Bytes = Bytes::mib(8);

/// One part in this many of a step's own bytes may stay behind in the allocator after a step, at
/// worst; [`clear_cache_every_steps`] gives it back before that adds up to the slack of the plan.
const LEFT_BEHIND_PER_STEP: u64 = 64;

/// Freed memory goes back to the system at least this often, so that the machine sees what is free.
const MOST_STEPS_BETWEEN_CLEARINGS: u64 = 1_000;

/// What the process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// This much: `--memory-budget`. The promise that the whole process stays below it.
    Explicit(Bytes),
    /// [80 % of the ceiling](DEFAULT_SHARE_PERCENT): of what this process holds and may still take.
    ShareOfAvailable,
}

impl Budget {
    /// The budget in bytes, at this instant.
    pub fn resolve(self, now: &MemorySnapshot) -> Bytes {
        match self {
            Self::Explicit(bytes) => bytes,
            Self::ShareOfAvailable => now.ceiling().percent(DEFAULT_SHARE_PERCENT),
        }
    }

    /// Who set it, for the bill.
    pub(crate) fn source(self) -> String {
        match self {
            Self::Explicit(_) => "--memory-budget".to_string(),
            Self::ShareOfAvailable => format!("{DEFAULT_SHARE_PERCENT} % of what is available"),
        }
    }
}

/// What set the limit that a plan had to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The budget.
    Budget,
    /// The machine or a control group: less than the budget is there.
    Available,
}

/// What to do, in plain numbers, until the next plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Samples of one micro-batch.
    pub micro_batch_samples: usize,
    /// Blocks whose activations are computed again in the backward pass.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time in the loss.
    pub loss_chunk_rows: usize,
    /// What the dataset holds between reads.
    pub residency: DatasetResidency,
    /// Threads that decode and tokenize.
    pub decode_threads: usize,
    /// Optimizer batches that the loader may have ready.
    pub prefetch_batches: usize,
    /// Freed memory goes back to the system after every so many steps.
    pub clear_cache_every_steps: u64,
    /// The budget as resolved when the run was planned first.
    pub budget: Bytes,
    /// What set the limit that this plan had to fit: the budget, or less than it that was there.
    pub limited_by: Limit,
    /// What the process will hold at its peak, headroom not counted.
    pub predicted_peak: Bytes,
    /// Kept free beside the predicted peak.
    pub headroom: Bytes,
    /// Time of a step over the time of the fastest plan that was offered.
    pub relative_time: f64,
    /// What the predicted peak is made of.
    pub bill: Bill,
    /// Replans in a row in which a faster plan would have fitted; see [`crate::replan`].
    #[serde(skip)]
    pub(crate) calm_replans: u32,
    /// Whether [`crate::replan`] has reported that not even this smallest plan fits.
    #[serde(skip)]
    pub(crate) squeezed: bool,
}

impl Plan {
    /// The smallest budget that this plan fits: the predicted peak and its headroom.
    pub fn required(&self) -> Bytes {
        self.predicted_peak + self.headroom
    }
}

/// No offered choice fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DoesNotFit {
    /// What there was: the budget, or what is available where that is less.
    pub limit: Bytes,
    /// Which of the two it was.
    pub limited_by: Limit,
    /// The smallest budget for which one of the offered choices fits.
    pub smallest_budget: Bytes,
    /// The plan that `smallest_budget` would give.
    pub smallest_plan: Box<Plan>,
}

impl DoesNotFit {
    /// What the reader could do about it, for the `hint:` line.
    pub fn hint(&self) -> String {
        let enough = self.smallest_budget.round_up_to_mib().0 >> 20;
        match self.limited_by {
            Limit::Budget => {
                format!("the smallest budget that would do: --memory-budget {enough}MiB")
            }
            Limit::Available => format!(
                "free {} on this machine or raise its limit; `--memory-budget {enough}MiB` would do then",
                self.smallest_budget.saturating_sub(self.limit).round_up_to_mib()
            ),
        }
    }
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.limited_by {
            Limit::Budget => "memory budget",
            Limit::Available => "available memory",
        };
        write!(f, "{what}: expected at least {} for the smallest plan, got {}", self.smallest_budget, self.limit)
    }
}

impl std::error::Error for DoesNotFit {}

/// The fastest offered plan that fits both the budget and what this process could hold now.
///
/// # Errors
///
/// [`DoesNotFit`] when nothing does, with the smallest budget that would.
///
/// # Panics
///
/// When `costs` offers no step choice or no loader choice.
pub fn plan(now: &MemorySnapshot, costs: &Costs, budget: Budget) -> Result<Plan, DoesNotFit> {
    plan_within(now, costs, budget.resolve(now), &budget.source())
}

/// [`plan`] for a budget in bytes that was resolved before.
pub(crate) fn plan_within(
    now: &MemorySnapshot,
    costs: &Costs,
    budget: Bytes,
    source: &str,
) -> Result<Plan, DoesNotFit> {
    let (limit, limited_by) = limit_of(now, budget);
    let candidates = candidates(costs);
    let frame = |budget: Bytes| Bill {
        budget,
        budget_source: source.to_string(),
        available: now.ceiling(),
        available_set_by: now.usable_is_set_by().to_string(),
        ..Bill::default()
    };
    let fits = |candidate: &&Candidate<'_>| candidate.required() <= limit;
    match candidates.iter().filter(fits).min_by(|a, b| a.compare(b)) {
        Some(best) => Ok(best.plan(costs, frame(budget), limit, limited_by)),
        None => {
            let smallest = smallest(&candidates);
            let smallest_budget = smallest.required();
            let smallest_plan = smallest.plan(costs, frame(smallest_budget), smallest_budget, Limit::Budget);
            Err(DoesNotFit { limit, limited_by, smallest_budget, smallest_plan: Box::new(smallest_plan) })
        }
    }
}

/// What a plan has to fit: the budget, or the ceiling where that is lower.
pub(crate) fn limit_of(now: &MemorySnapshot, budget: Bytes) -> (Bytes, Limit) {
    let ceiling = now.ceiling();
    if ceiling < budget { (ceiling, Limit::Available) } else { (budget, Limit::Budget) }
}

/// What is kept free beside a predicted peak: 5 % of it, and at least 8 MiB.
///
/// A function of the prediction alone, so that the smallest budget is one and not a fixed point.
pub fn headroom(predicted_peak: Bytes) -> Bytes {
    predicted_peak.percent(HEADROOM_PERCENT).max(LEAST_HEADROOM)
}

/// Steps after which freed memory goes back to the system, from the slack that the plan leaves.
///
/// Clearing costs time and is needed only before what stays behind in the allocator eats the slack;
/// with much slack it is rare, without any it is every step.
fn clear_cache_every_steps(slack: Bytes, step: Bytes) -> u64 {
    let left_behind = (step.0 / LEFT_BEHIND_PER_STEP).max(1);
    (slack.0 / left_behind).clamp(1, MOST_STEPS_BETWEEN_CLEARINGS)
}

/// One pair of choices, with the numbers that decide.
struct Candidate<'a> {
    step: &'a StepChoice,
    loader: &'a LoaderChoice,
    predicted_peak: Bytes,
    relative_time: f64,
}

/// Every pair of a step choice and a loader choice.
fn candidates(costs: &Costs) -> Vec<Candidate<'_>> {
    assert!(!costs.steps.is_empty(), "costs offer no step choice");
    assert!(!costs.loaders.is_empty(), "costs offer no loader choice");
    let fixed = sum(&costs.fixed);
    let loaders: Vec<_> = costs.loaders.iter().map(|loader| (loader, sum(&loader.rows))).collect();
    let pairs = costs.steps.iter().flat_map(|step| {
        let step_bytes = fixed + sum(&step.rows);
        loaders.iter().map(move |&(loader, loader_bytes)| Candidate {
            step,
            loader,
            predicted_peak: step_bytes + loader_bytes,
            relative_time: step.relative_time * loader.relative_time,
        })
    });
    pairs.collect()
}

/// The pair that holds least; the fastest of them where several do.
fn smallest<'c, 'a>(candidates: &'c [Candidate<'a>]) -> &'c Candidate<'a> {
    let by_size = |a: &&Candidate<'_>, b: &&Candidate<'_>| {
        a.predicted_peak.cmp(&b.predicted_peak).then(a.relative_time.total_cmp(&b.relative_time))
    };
    candidates.iter().min_by(by_size).expect("there is at least one pair")
}

impl Candidate<'_> {
    fn required(&self) -> Bytes {
        self.predicted_peak + headroom(self.predicted_peak)
    }

    /// Faster first, then smaller. `min_by` keeps the first of equals: the order of the offer.
    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        let faster = self.relative_time.total_cmp(&other.relative_time);
        faster.then(self.predicted_peak.cmp(&other.predicted_peak))
    }

    /// This pair as a plan. `frame` is a bill that knows the budget and not yet what it is spent on.
    fn plan(&self, costs: &Costs, frame: Bill, limit: Bytes, limited_by: Limit) -> Plan {
        let Self { step, loader, predicted_peak, relative_time } = *self;
        let headroom = headroom(predicted_peak);
        let slack = limit.saturating_sub(predicted_peak);
        let rows: Vec<CostRow> = [&costs.fixed, &step.rows, &loader.rows].into_iter().flatten().cloned().collect();
        let bill = Bill {
            rows,
            headroom,
            headroom_note: match headroom {
                LEAST_HEADROOM => "at the least".to_string(),
                _ => format!("{HEADROOM_PERCENT} % of the predicted peak"),
            },
            predicted_peak,
            conclusion: format!(
                "{} samples a step in micro-batches of {}",
                costs.batch_samples, step.micro_batch_samples
            ),
            ..frame
        };
        Plan {
            micro_batch_samples: step.micro_batch_samples,
            recompute_blocks: step.recompute_blocks,
            loss_chunk_rows: step.loss_chunk_rows,
            residency: loader.residency,
            decode_threads: loader.decode_threads,
            prefetch_batches: loader.prefetch_batches,
            clear_cache_every_steps: clear_cache_every_steps(slack, sum(&step.rows)),
            budget: bill.budget,
            limited_by,
            predicted_peak,
            headroom,
            relative_time,
            bill,
            calm_replans: 0,
            squeezed: false,
        }
    }
}

#[cfg(test)]
mod tests;
