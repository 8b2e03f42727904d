//! The planner's job: the settings of the config, with the opened data.

use collective::Shards;
use cuda_device::nccl::HAS_NCCL;
use memory_policy::{Budgets, CostRow, MemorySpace};
use planner::{EvaluatedRows, Evaluation, Feed, Frozen, Job, Plan, Prices, Processes, Training, Wanted, Work};
use serde_json::{Value, json};
use t5::StoredWeights;
use trainer::{Sharding, TrainerOptions};

use crate::config::Config;
use crate::options;

/// The computation of a run.
#[derive(Clone, Copy)]
pub struct RunJob<'a> {
    /// The resolved config.
    pub config: &'a Config,
    /// The model.
    pub model: &'a t5::Config,
    /// The trainer's options.
    pub options: &'a TrainerOptions,
    /// The data, if known.
    pub data: Option<&'a RunData<'a>>,
    /// Source and target tokens of some of its rows, if known.
    pub lengths: &'a [(usize, usize)],
    /// The choices that the caller wants.
    pub wanted: Wanted<'a>,
    /// The prices of levers.
    pub prices: Prices,
    /// Memory at the process's peak so far.
    pub past: &'a [CostRow],
    /// How a batch is divided among processes.
    pub shards: Shards,
}

/// The rows that a run has opened, and its base.
#[derive(Clone)]
pub struct RunData<'a> {
    /// The rows that it trains on.
    pub feed: Feed<'a>,
    /// The rows of its evaluations.
    pub evaluated: Option<EvaluatedRows<'a>>,
    /// The files of a base that is frozen beside an adapter.
    pub stored: Option<StoredWeights>,
    /// The model beside the trained one that is only read.
    pub frozen: Option<Frozen<'a>>,
}

impl<'a> RunJob<'a> {
    /// The job as the planner takes it.
    pub fn job(&self) -> Job<'a> {
        let Self { config, model, options, .. } = *self;
        let data = &config.data;
        let rows = self.data.and_then(|data| data.evaluated.clone());
        let is_evaluated = data.has_validation() || rows.is_some();
        let evaluation = Evaluation {
            answer: options::answers(config).shape(),
            counts: options::evaluated(config, rows.as_ref().map(EvaluatedRows::count)),
            rows,
        };
        Job {
            model,
            work: Work::Training(Training {
                options,
                disk_writes: config.memory.disk_writes,
                evaluation: is_evaluated.then_some(evaluation),
                saves: true,
                wanted: self.wanted,
                base: self.data.and_then(|data| data.stored),
                frozen: self.data.and_then(|data| data.frozen),
                processes: self.processes(),
                lengths: self.lengths,
            }),
            samples: config.samples_of_a_row() * self.shards.most_positions(config.train.batch_size),
            longest: model.head.lengths(data.max_source_tokens, data.max_target_tokens),
            place: place(config),
            budgets: budgets(config),
            pins: &config.memory.pins,
            feed: self.feed(),
            process_note: match self.data {
                Some(_) => "measured: program, tokenizer, data index",
                None => "measured; the tokenizer will add to it",
            },
            prices: self.prices,
            past: self.past.to_vec(),
        }
    }

    fn processes(&self) -> Processes {
        let Shards { processes, .. } = self.shards;
        let of_each =
            |of: fn(Shards, usize) -> usize| (0..processes).map(|rank| of(self.shards, rank)).max().unwrap_or(1);
        let max_shards = of_each(|shards, rank| shards.owned_by(rank).len());
        let sent_sums = of_each(|shards, rank| shards.extents(rank).len());
        let sharding = self.config.parallel.sharding;
        let owners = if sharding == Sharding::None { 1 } else { processes };
        let are_on_cards = place(self.config) == MemorySpace::Device;
        let are_connected = HAS_NCCL && are_on_cards && processes > 1 && !self.config.parallel.shares_cards;
        // Saved tensors go through the host's memory.
        let buffers = match are_connected {
            true => collective::PIECE_BYTES as u64,
            false => collective::sums::buffers(self.shards, are_on_cards),
        };
        let closes_shards = self.config.parallel.virtual_shards.is_some();
        let gradient_sums = of_each(|shards, rank| shards.max_sums(rank));
        let network = self.config.parallel.network.unwrap_or_default();
        Processes {
            number: processes,
            max_shards,
            sent_sums,
            buffers,
            between_cards: are_connected.then(|| trainer::costs::between_cards(self.shards, closes_shards)),
            gradient_sums,
            closes_shards,
            owners,
            sharding,
            network,
        }
    }

    fn feed(&self) -> Feed<'a> {
        let data = &self.config.data;
        self.data.map_or_else(
            || Feed::Unknown {
                samples: self.config.samples_of_a_row() * self.config.train.batch_size,
                tokens: data.max_source_tokens + data.max_target_tokens,
            },
            |data| data.feed,
        )
    }
}

/// The budgets that the config asks for.
pub fn budgets(config: &Config) -> Budgets {
    let memory = &config.memory;
    Budgets { process: planner::budget_of(memory.budget), device: planner::budget_of(memory.device_budget) }
}

/// The place of a run's tensors: the device that is named, or else the host's memory.
pub fn place(config: &Config) -> MemorySpace {
    if is_named(&config.run.device) { MemorySpace::Device } else { MemorySpace::Host }
}

/// Whether this name is a device other than the CPU.
pub fn is_named(name: &str) -> bool {
    !matches!(name, "cpu" | "auto")
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
