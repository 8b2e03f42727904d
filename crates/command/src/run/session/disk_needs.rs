//! The disk space of a run's plans, for the ledger of runs.

use collective::Shards;
use memory_policy::MemorySnapshot;
use planner::{Plan, Wanted};
use run_plan::pace::{DiskNeed, PaceInputs};
use run_plan::priced::Priced;
use trainer::TrainerOptions;

use crate::config::Config;
use crate::failure::Outcome;
use crate::job::RunJob;

/// The facts that determine a plan's disk space.
pub(super) struct DiskNeeds {
    pub config: Config,
    pub model: t5::Config,
    pub options: TrainerOptions,
    pub priced: Priced,
    pub shards: Shards,
    /// Remaining steps.
    pub steps: Option<u64>,
}

impl DiskNeeds {
    /// The disk space of a plan.
    ///
    /// # Errors
    /// The planner refuses the options.
    pub fn for_plan(&self, now: &MemorySnapshot, plan: &Plan) -> Outcome<DiskNeed> {
        let Self { config, model, options, priced, shards, steps } = self;
        let wanted = Wanted::Undominated(None);
        let (prices, lengths) = (priced.prices, &[][..]);
        let job = RunJob { config, model, options, data: None, lengths, wanted, prices, past: &[], shards: *shards };
        let of = PaceInputs { config, options, rows: None, steps: *steps, priced };
        DiskNeed::estimate(&of, &job.job(), now, plan)
    }
}
