//! `train_low_mem plan` as a function: from values to the text that the command prints.

use std::path::Path;

use memory_policy::MemorySnapshot;
use planner::{Plan, Planned, Wanted};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use t5_ops::{InstructionSet, Processor};

use crate::config::{Config, Values, resolve_precedence};
use crate::failure::{Failure, Outcome};
use crate::job::{self, RunJob};
use crate::pace::{PaceInputs, RunPace};
use crate::priced::Priced;
use crate::{explanation, model, options, remedies};

/// The values that a plan is made from.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Question {
    /// The text of a config file.
    pub config: String,
    /// Assignments as after `--set`; they override the config.
    pub set: Vec<String>,
    /// The text of the model's `config.json`.
    pub model: Option<String>,
    /// The preset to use without that text, unless `model.config` names one.
    pub preset: Option<String>,
    /// The memory of the machine and of the process, as the probe would measure it.
    pub machine: MemorySnapshot,
    /// The processor that the kernels would find.
    pub processor: Kernels,
    /// Whether to list the other values of each lever, too, which takes longer.
    pub explain: bool,
}

/// The properties of a processor that determine the bytes of operations.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernels {
    /// The instruction set, in the spelling of `LOW_MEM_T5_ISA`.
    pub instruction_set: String,
    /// Threads that operations run on.
    pub threads: usize,
    /// Bytes of the second-level cache that one thread has.
    pub second_level_bytes: usize,
}

impl Default for Kernels {
    fn default() -> Self {
        let Processor { instruction_set, threads, second_level_bytes } = t5_ops::processor();
        Self { instruction_set: instruction_set.name().to_owned(), threads, second_level_bytes }
    }
}

impl Kernels {
    /// The most threads that a question may have.
    const MAX_THREADS: usize = 4096;

    fn processor(&self) -> Outcome<Processor> {
        let Some(instruction_set) = InstructionSet::of_name(&self.instruction_set) else {
            let known = InstructionSet::ALL.map(InstructionSet::name).join(", ");
            return Err(Failure::usage(format!(
                "instruction set: expected one of {known}, got `{}`",
                self.instruction_set
            )));
        };
        if !(1..=Self::MAX_THREADS).contains(&self.threads) {
            return Err(Failure::usage(format!("threads: expected 1 to {}, got {}", Self::MAX_THREADS, self.threads)));
        }
        Ok(Processor { instruction_set, threads: self.threads, second_level_bytes: self.second_level_bytes })
    }
}

/// The answer.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PlanOutput {
    /// The command's exit code.
    pub exit: u8,
    /// The text that the command writes to standard error if a plan is refused.
    pub error: String,
    /// The standard output of `plan --json`.
    pub json: String,
    /// The standard output of `plan`, or of `plan --explain`.
    pub text: String,
}

/// Answers with the plan of a run whose rows are unknown, and with prices that were not measured.
pub fn answer(question: &Question) -> PlanOutput {
    let planned = question
        .processor
        .processor()
        .and_then(|processor| t5_ops::with_target_processor(processor, || planned(question)));
    match planned {
        Ok((planned, pace, steps)) => PlanOutput {
            json: format!("{:#}\n", json_of(&planned.plan, &pace, steps)),
            text: text_of(&planned, &pace, question.explain),
            ..PlanOutput::default()
        },
        Err(failure) => PlanOutput { exit: failure.exit as u8, error: format!("{failure}\n"), ..PlanOutput::default() },
    }
}

/// The plan, its pace and the run's steps, for `plan --json`.
pub fn json_of(plan: &Plan, pace: &RunPace, steps: Option<u64>) -> Value {
    let mut json = pace.plan_json(plan);
    json["total_steps"] = json!(steps);
    json
}

/// The bill and the plan in words; with `explain`, also every lever with its other values.
pub fn text_of(Planned { plan, costs }: &Planned, pace: &RunPace, explain: bool) -> String {
    let bill = if explain { plan.bill.in_full() } else { plan.bill.to_string() };
    let text = format!("{bill}{}\n{}", pace.in_words(), explanation::in_words(plan));
    match explain {
        true => format!("{text}\n{}", explanation::explanation(&memory_policy::explain(costs, plan), plan)),
        false => text,
    }
}

/// The choices that planning needs: without an explanation, only those that some budget would take.
pub fn wanted(explain: bool) -> Wanted<'static> {
    if explain { Wanted::All } else { Wanted::Undominated(None) }
}

/// Adds the memory by which another start of the command may measure a larger process. A plan made from this snapshot also fits the run
/// that starts later.
pub fn with_restart_margin(now: MemorySnapshot) -> MemorySnapshot {
    MemorySnapshot { rss: now.rss + memory_policy::RESTART_MARGIN, ..now }
}

/// Returns the plan of a job, or the failure with every remedy.
///
/// # Errors
/// Nothing fits, or the planner has an error.
pub fn plan(job: &RunJob<'_>, now: &MemorySnapshot, steps: Option<u64>) -> Outcome<Planned> {
    planner::plan(&job.job(), now).map_err(|error| match error {
        planner::Error::DoesNotFit(refusal) => remedies::failure(*refusal, job, now, steps),
        error => error.into(),
    })
}

fn planned(question: &Question) -> Outcome<(Planned, RunPace, Option<u64>)> {
    let mut values = Values::defaults();
    values.apply_file("the config", &question.config)?;
    question.set.iter().try_for_each(|assignment| values.apply_assignment(assignment))?;
    resolve_precedence(&mut values)?;
    let config = Config::resolve_without_data(values)?;
    let steps = config.train.max_steps;
    let model = model_of(question, &config)?;
    let options = options::trainer_options(&config, &model, steps.unwrap_or(u64::MAX));
    let priced = Priced::without_measuring(config.memory.prices, job::place(&config), options.precision.activations());
    let now = with_restart_margin(question.machine.clone());
    let job = RunJob {
        config: &config,
        model: &model,
        options: &options,
        data: None,
        lengths: &[],
        wanted: wanted(question.explain),
        prices: priced.prices,
        past: &[],
        shards: trainer::shards(config.parallel.virtual_shards, 1)?,
    };
    let planned = plan(&job, &now, steps)?;
    let of = PaceInputs { config: &config, options: &options, rows: None, steps, priced: &priced };
    let pace = RunPace::new(&of, &job.job(), &now, &planned.plan)?;
    Ok((planned, pace, steps))
}

fn model_of(question: &Question, config: &Config) -> Outcome<t5::Config> {
    let origin = config.model.init_from.as_deref();
    let given = match (&question.model, &question.preset, &config.model.config) {
        (Some(text), ..) => t5::Config::from_json(text, "config.json")?,
        (None, Some(name), _) | (None, None, Some(name)) => t5::Config::preset(name)
            .ok_or_else(|| Failure::usage(format!("`{name}` is not a preset: give its config.json")))?,
        (None, None, None) => return Err(Failure::usage("the model's config.json is not there")),
    };
    let model = if origin.is_some() { given } else { model::fitted(config, given)? };
    let model = model::adapted(config, model, origin, |_| Ok(None))?;
    model::check_trainable(&model, origin.map(Path::new))?;
    Ok(model)
}
