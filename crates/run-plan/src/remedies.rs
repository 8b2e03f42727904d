//! Remedies for a refusal: each setting that might need less memory is tried, and listed with the memory that the run would then need.

use memory_policy::{Budget, Budgets, Bytes, Limit, MemorySnapshot, MemorySpace};
use planner::{Costs, DoesNotFit, Wanted};
use toml::Value;
use trainer::TrainerOptions;

use crate::config::{Config, Origin};
use crate::failure::{Failure, Outcome};
use crate::job::RunJob;
use crate::options;

/// The least saving, in percent, for a remedy to be listed.
const MIN_SAVED_PERCENT: u64 = 3;
/// More bytes than any run writes. The remedy states the real number.
const ALL_WRITES: u64 = 1 << 60;

/// The failure for a refusal, with every remedy. `steps` are the run's steps, if known.
pub fn failure(refusal: DoesNotFit, job: &RunJob<'_>, now: &MemorySnapshot, steps: Option<u64>) -> Failure {
    let (needed, limit, margin) = (refusal.smallest_budget, refusal.limit, refusal.restart_margin);
    let place = match refusal.limited_by {
        Limit::DeviceBudget | Limit::DeviceAvailable => MemorySpace::Device,
        Limit::Budget | Limit::Available => MemorySpace::Host,
    };
    let mut failure = Failure::from(refusal);
    // A remedy that cannot be computed is not listed.
    let at = At { now, place };
    let remedies = [on_disk(job, at, steps), rounded(job, at, steps), smaller_batch(job, at, steps)];
    for Remedy { needs, words } in remedies.into_iter().filter_map(|remedy| remedy.ok().flatten()) {
        if needs <= needed.percent(100 - MIN_SAVED_PERCENT) {
            let enough = (needs + margin).round_up_to_mib();
            let fits = if enough <= limit { "which fits" } else { "still too much" };
            failure = failure.hint(format!("{words} needs {enough}, {fits}"));
        }
    }
    failure
}

/// The machine, and the place that is short of memory.
#[derive(Clone, Copy)]
struct At<'a> {
    now: &'a MemorySnapshot,
    place: MemorySpace,
}

/// A remedy.
struct Remedy {
    /// The smallest budget of that place with this remedy.
    needs: Bytes,
    words: String,
}

/// Tensors on disk, with any number of written bytes.
fn on_disk(job: &RunJob<'_>, at: At<'_>, steps: Option<u64>) -> Outcome<Option<Remedy>> {
    let variant = Variant::new(job, &[("memory.disk_writes", Value::from(ALL_WRITES.to_string()))], steps.or(Some(1)))?;
    let job_on_disk = variant.job(job).job();
    let now = at.now;
    let costs = planner::costs(&job_on_disk, now)?;
    let Some(smallest) = smallest(&costs, job_on_disk.budgets, at) else { return Ok(None) };
    // The plan that the run would follow, if it fits.
    let plan = memory_policy::plan(now, &costs, job_on_disk.budgets).unwrap_or(*smallest.smallest_plan);
    let a_step = planner::pace(&job_on_disk, now, &plan, &[])?.step_written_bytes;
    let allowed = job.config.memory.disk_writes;
    let words = match steps {
        Some(steps) => {
            let all = Bytes(a_step.saturating_mul(steps));
            let tib = all.0.div_ceil(1 << 40);
            if all.0 <= allowed {
                return Ok(None);
            }
            format!("`--set memory.disk_writes={tib}TiB` ({all} in the whole run, {} a step)", Bytes(a_step))
        }
        None => format!(
            "a run of known length (your data, or `--max-steps {}`) may keep tensors on disk; it",
            allowed.checked_div(a_step).unwrap_or(u64::MAX).clamp(1, 1000)
        ),
    };
    Ok(Some(Remedy { needs: smallest.smallest_budget, words }))
}

/// Weights in bf16.
fn rounded(job: &RunJob<'_>, at: At<'_>, steps: Option<u64>) -> Outcome<Option<Remedy>> {
    if job.config.train.master_weights != trainer::MasterWeights::F32 {
        return Ok(None);
    }
    let settings = [("train.precision", "bf16"), ("train.master_weights", "stochastic-rounding")];
    let settings = settings.map(|(key, value)| (key, Value::from(value)));
    let variant = Variant::new(job, &settings, steps)?;
    let words = "`--set train.precision=bf16 --set train.master_weights=stochastic-rounding`".to_string();
    variant.remedy(job, at, words)
}

/// A quarter of the samples: another batch, and so other mathematics.
fn smaller_batch(job: &RunJob<'_>, at: At<'_>, steps: Option<u64>) -> Outcome<Option<Remedy>> {
    let samples = job.config.train.batch_size / 4;
    if samples == 0 {
        return Ok(None);
    }
    let (count, auto) = (Value::from(i64::try_from(samples).unwrap_or(1)), || Value::from("auto"));
    let settings = [
        ("train.batch_size", count),
        ("train.batch_size_per_device", auto()),
        ("train.gradient_accumulation_steps", auto()),
    ];
    let variant = Variant::new(job, &settings, steps)?;
    let words = format!("`--set train.batch_size={samples}`");
    variant.remedy(job, at, words)
}

/// A job with other settings.
struct Variant {
    config: Config,
    options: TrainerOptions,
}

impl Variant {
    fn new(job: &RunJob<'_>, settings: &[(&'static str, Value)], steps: Option<u64>) -> Outcome<Self> {
        let mut values = job.config.values.clone();
        for (key, value) in settings {
            values.set(key, value.clone(), Origin::Run("a way out"))?;
        }
        let config = Config::resolve_without_data(values)?;
        let options = options::trainer_options(&config, job.model, steps.unwrap_or(u64::MAX));
        Ok(Self { config, options })
    }

    fn job<'a>(&'a self, job: &RunJob<'a>) -> RunJob<'a> {
        RunJob { config: &self.config, options: &self.options, wanted: Wanted::Undominated(None), ..*job }
    }

    /// The remedy with these settings.
    fn remedy(&self, job: &RunJob<'_>, at: At<'_>, words: String) -> Outcome<Option<Remedy>> {
        let job = self.job(job).job();
        let refusal = smallest(&planner::costs(&job, at.now)?, job.budgets, at);
        Ok(refusal.map(|refusal| Remedy { needs: refusal.smallest_budget, words }))
    }
}

/// The refusal of a budget that nothing fits. It has the smallest budget that works.
fn smallest(costs: &Costs, budgets: Budgets, At { now, place }: At<'_>) -> Option<DoesNotFit> {
    let nothing = Budget::Explicit(Bytes(1));
    let budgets = match place {
        MemorySpace::Host => Budgets { process: nothing, ..budgets },
        MemorySpace::Device => Budgets { device: nothing, ..budgets },
    };
    memory_policy::plan(now, costs, budgets).err()
}
