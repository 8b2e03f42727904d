//! From a job to its plan: the costs of all choices, and the fastest choice that fits.

use memory_policy::{Bytes, CostRow, MemorySnapshot, MemorySpace, undominated};

use crate::error::Result;
use crate::files::memory_for_files;
use crate::job::{Job, Training, Wanted, Work};
use crate::names::{PROCESS, SMALL_BLOCKS};
use crate::{Costs, Plan, StepChoice, feed, inference, place, training};

/// A plan, and the choices that it was taken from.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// The choices.
    pub costs: Costs,
}

/// Small blocks that the allocator keeps in the threads' heaps, beyond those that the rehearsal left there: an estimate.
const SMALL_BLOCKS_BYTES: u64 = 1 << 20;
/// Small blocks and the stack of each thread beyond [`FEW_THREADS`]: 0.25 to 0.3 MiB were measured with 16 and 32 threads.
const BYTES_OF_A_THREAD: u64 = 320 << 10;
const FEW_THREADS: usize = 2;
/// Small blocks of code that no rehearsal runs, in every phase. In evaluations and answers up to 0.1 MiB beyond the estimate were measured.
const BYTES_OF_OTHER_CODE: u64 = 256 << 10;

fn small_blocks(threads: usize) -> u64 {
    SMALL_BLOCKS_BYTES + threads.saturating_sub(FEW_THREADS) as u64 * BYTES_OF_A_THREAD
}

/// Bytes of the choices that a run keeps so that it can plan again between two steps.
fn kept_choices(training: &Training<'_>, steps: &[StepChoice]) -> u64 {
    let own_bytes = |steps: &[StepChoice]| steps.iter().map(StepChoice::own_bytes).sum();
    match training.wanted {
        // These choices are made for an explanation, so they include dominated choices, which a run does not keep.
        Wanted::All => own_bytes(&undominated(steps.iter().cloned(), |_| false)),
        Wanted::Undominated(_) => own_bytes(steps),
    }
}

/// The choices of a job, with their costs.
///
/// # Errors
/// Errors of the trainer; [`crate::Error::OnADeviceAlone`] if the job asks for a setting that the place of its tensors cannot carry out.
pub fn costs(job: &Job<'_>, now: &MemorySnapshot) -> Result<Costs> {
    #[cfg(test)]
    crate::testing::state_processor();
    place::check(job)?;
    let (held, mut steps) = match &job.work {
        Work::Training(training) => {
            let memory_for_files = memory_for_files(now, job.budgets.process.resolve(now));
            training::offer(job, training, memory_for_files)?
        }
        Work::Inference(inference) => {
            (inference.beside.clone(), inference::offer(job, inference, memory_for_reading(job, now))?)
        }
    };
    let mut fixed = vec![CostRow::new(PROCESS, now.rss.0, job.process_note)];
    let choices = match &job.work {
        Work::Training(training) => kept_choices(training, &steps),
        Work::Inference(_) => 0,
    };
    let small = small_blocks(t5_ops::processor().threads) + BYTES_OF_OTHER_CODE + choices;
    fixed.push(CostRow::new(SMALL_BLOCKS, small, "estimate: overhead of the allocator"));
    fixed.extend(held);
    let has_nccl = matches!(&job.work, Work::Training(training) if training.processes.between_cards.is_some());
    fixed.extend(place::context(job.place, has_nccl, now));
    fixed.extend(place::kernels_on_host(job.place, now));
    if job.place == MemorySpace::Device {
        steps.iter_mut().for_each(|choice| place::add_pool(choice, &fixed, now));
    }
    let loaders = feed::choices(&job.feed, job.pins);
    let task = match &job.work {
        Work::Training(_) => format!("{} samples a step", job.samples),
        Work::Inference(inference) if inference.has_targets => "evaluation".to_owned(),
        Work::Inference(_) => "generation".to_owned(),
    };
    Ok(Costs { task, fixed, past: job.past.clone(), steps, loaders })
}

/// Bytes of files that the system may keep in memory while they are read.
pub(crate) fn memory_for_reading(job: &Job<'_>, now: &MemorySnapshot) -> Bytes {
    now.ceiling().saturating_sub(job.budgets.process.resolve(now))
}

/// The fastest plan that fits, and the choices that it was taken from.
///
/// # Errors
/// As [`costs`]; [`crate::Error::DoesNotFit`] if no choice fits the budget.
pub fn plan(job: &Job<'_>, now: &MemorySnapshot) -> Result<Planned> {
    let costs = costs(job, now)?;
    let plan = memory_policy::plan(now, &costs, job.budgets)?;
    Ok(Planned { plan, costs })
}
