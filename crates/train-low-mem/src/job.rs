//! The job that the planner is asked about: what the config asks for, of what was opened.

use candle_core::Device;
use collective::Shards;
use dataloader::DataLoader;
use memory_policy::{Budgets, Place};
use planner::{EvaluatedRows, Evaluation, Feed, Job, Plan, Prices, Processes, Rows, Training, Wanted, Work};
use serde_json::{Value, json};
use trainer::{Sharding, TrainerOptions};

use crate::config::Config;
use crate::open::{self, Opened};
use crate::{device, options};

/// The computation of a run.
#[derive(Clone, Copy)]
pub struct RunJob<'a> {
    /// The resolved config.
    pub config: &'a Config,
    /// The model, and how it trains.
    pub model: &'a t5::Config,
    /// How it trains.
    pub options: &'a TrainerOptions,
    /// Its data, where that is known.
    pub data: Option<(&'a Opened, &'a DataLoader)>,
    /// Where it computes.
    pub device: &'a Device,
    /// Which of the ways to carry out a step are wanted.
    pub wanted: Wanted<'a>,
    /// The time that levers cost.
    pub prices: Prices,
    /// How a batch is divided among processes.
    pub shards: Shards,
}

impl<'a> RunJob<'a> {
    /// As the planner takes it.
    pub fn job(&self) -> Job<'a> {
        let Self { config, model, options, .. } = *self;
        let data = &config.data;
        let evaluation = Evaluation { answer: options::answers(config).shape(), rows: self.evaluated_rows() };
        Job {
            model,
            work: Work::Training(Training {
                options,
                disk_writes: config.memory.disk_writes,
                evaluation: data.has_validation().then_some(evaluation),
                wanted: self.wanted,
                base: self.data.and_then(|(opened, _)| opened.stored),
                processes: self.processes(),
            }),
            samples: self.shards.most_positions(config.train.batch_size),
            longest: (data.max_source_tokens, data.max_target_tokens),
            place: place(config, self.device),
            budgets: budgets(config),
            pins: &config.memory.pins,
            feed: self.feed(),
            process_note: match self.data {
                Some(_) => "measured: program, tokenizer, footers",
                None => "measured; the tokenizer will add to it",
            },
            prices: self.prices,
        }
    }

    fn processes(&self) -> Processes {
        let Shards { processes, .. } = self.shards;
        let sums = (0..processes).map(|rank| self.shards.most_sums(rank)).max().unwrap_or(1);
        let sharding = self.config.parallel.sharding;
        let owners = if sharding == Sharding::None { 1 } else { processes };
        let buffers = collective::sums::buffers(self.shards);
        let closes_shards = self.config.parallel.virtual_shards.is_some();
        Processes { buffers, gradient_sums: sums, closes_shards, owners, sharding }
    }

    fn evaluated_rows(&self) -> Option<EvaluatedRows<'a>> {
        let (opened, _) = self.data?;
        let dataset = opened.validation.as_deref()?;
        let loader = open::loader_options(self.config, self.model);
        Some(EvaluatedRows { loader, tokenizer: &opened.tokenizer, dataset })
    }

    /// Whether the run reads some rows more than once.
    fn reads_rows_again(&self, rows: u64) -> bool {
        let train = &self.config.train;
        let wanted = train.max_steps.map_or(u64::MAX, |steps| steps.saturating_mul(train.batch_size as u64));
        train.epochs.map_or(wanted > rows, |epochs| epochs > 1)
    }

    fn feed(&self) -> Feed<'a> {
        let data = &self.config.data;
        match self.data {
            Some((opened, loader)) => Feed::Rows(Rows {
                dataset: &opened.train,
                loader,
                window_blocks: data.shuffle.then_some(data.window_blocks),
                is_read_again: self.reads_rows_again(opened.train.rows()),
            }),
            None => Feed::Unknown {
                samples: self.config.train.batch_size,
                tokens: data.max_source_tokens + data.max_target_tokens,
            },
        }
    }
}

/// The budgets that the config asks for.
pub fn budgets(config: &Config) -> Budgets {
    let memory = &config.memory;
    Budgets { process: planner::budget_of(memory.budget), device: planner::budget_of(memory.device_budget) }
}

/// Where a run's tensors lie: on the device that was opened, or that is named where a plan is made without one.
pub fn place(config: &Config, device: &Device) -> Place {
    if device::is_named(&config.run.device) { Place::Device } else { device::place(device) }
}

/// A plan for `metrics.jsonl` and `plan --json`.
pub fn plan_json(plan: &Plan) -> Value {
    let mut json = serde_json::to_value(plan).unwrap_or_else(|_| json!({}));
    json["budget_bytes"] = json!(plan.budget.0);
    json["predicted_peak_bytes"] = json!(plan.predicted_peak.0);
    json["smallest_budget_bytes"] = json!(plan.required().0);
    if plan.predicted_device_peak > memory_policy::Bytes::ZERO {
        json["predicted_device_peak_bytes"] = json!(plan.predicted_device_peak.0);
    }
    json
}
