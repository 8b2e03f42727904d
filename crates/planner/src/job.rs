//! The job: what is computed, over what, within which budget; and from it the costs of everything that could be chosen.

use memory_policy::{Budget, Budgets, Bytes, CostRow, MemorySnapshot, Place};

use crate::error::Result;
use crate::feeding::{self, Feed};
use crate::files::memory_for_files;
use crate::inference::{self, Inference};
use crate::levers::Pins;
use crate::names::{PROCESS, SMALL_BLOCKS};
use crate::prices::Prices;
use crate::training::{self, Training};
use crate::{Costs, Plan};

/// The job to plan.
pub struct Job<'a> {
    /// The model that computes.
    pub model: &'a t5::Config,
    /// The work.
    pub work: Work<'a>,
    /// Samples of an optimizer step; in inference, samples at a time, at most.
    pub samples: usize,
    /// The longest source and target in tokens.
    pub longest: (usize, usize),
    /// Where tensors lie.
    pub place: Place,
    /// The budgets.
    pub budgets: Budgets,
    /// The pins.
    pub pins: &'a Pins,
    /// The loader and dataset of a step.
    pub feed: Feed<'a>,
    /// The process's own memory, for people.
    pub process_note: &'a str,
    /// The time that levers cost on this machine.
    pub prices: Prices,
}

/// The computation.
#[derive(Clone)]
pub enum Work<'a> {
    /// Optimizer steps.
    Training(Training<'a>),
    /// Losses and answers.
    Inference(Inference<'a>),
}

/// Which of the ways to carry out a step are wanted.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// All, to be explained.
    All,
    /// Those that some budget would take, and this plan's: little memory, for who plans within a budget that holds already.
    Undominated(Option<&'a Plan>),
}

/// A plan, and what it was chosen from.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// The choices.
    pub costs: Costs,
}

/// What the allocator keeps of blocks that are no pages of their own, in the threads' heaps, beyond what the
/// rehearsal left there: an estimate.
const SMALL_BLOCKS_BYTES: u64 = 1 << 20;

/// The choices of a job, with their costs.
///
/// # Errors
/// Errors of the trainer; weights in files of the host while tensors are on a device.
pub fn costs(job: &Job<'_>, now: &MemorySnapshot) -> Result<Costs> {
    let (held, steps) = match &job.work {
        Work::Training(training) => {
            let memory_for_files = memory_for_files(now, job.budgets.process.resolve(now));
            training::offer(job, training, memory_for_files)?
        }
        Work::Inference(inference) => inference::offer(job, inference)?,
    };
    let mut fixed = vec![CostRow::new(PROCESS, now.rss.0, job.process_note)];
    let reads_text = !matches!((&job.feed, &job.work), (Feed::Given, Work::Training(_)));
    if reads_text {
        fixed.push(CostRow::new(SMALL_BLOCKS, SMALL_BLOCKS_BYTES, "threads' heaps, an estimate"));
    }
    fixed.extend(held);
    let loaders = feeding::choices(&job.feed, job.pins);
    Ok(Costs { task: format!("{} samples a step", job.samples), fixed, steps, loaders })
}

/// The fastest plan that fits, and what it was chosen from.
///
/// # Errors
/// As [`costs`]; [`crate::Error::DoesNotFit`] where nothing fits the budget.
pub fn plan(job: &Job<'_>, now: &MemorySnapshot) -> Result<Planned> {
    let costs = costs(job, now)?;
    let plan = memory_policy::plan(now, &costs, job.budgets)?;
    Ok(Planned { plan, costs })
}

/// So many bytes, or a share of what is available.
pub fn budget_of(bytes: Option<u64>) -> Budget {
    bytes.map_or(Budget::ShareOfAvailable, |bytes| Budget::Explicit(Bytes(bytes)))
}
