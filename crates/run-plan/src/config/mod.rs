//! The config: the given settings, resolved into numbers.
//!
//! [`Values`] holds the given values: defaults, file, flags, each with its origin. [`Config`] holds their meaning, checked across keys.
//! Only decisions that need data, model or memory are still open. Paths are relative to the directory where the command runs, as on the
//! command line; see [`paths`] for paths that are not UTF-8.
//!
//! ```text
//! let mut values = Values::defaults();
//! values.apply_file("my.toml", &text)?;
//! values.apply_assignment("train.max_steps=10")?;
//! let config = Config::resolve(values)?;
//! ```

pub mod aliases;
mod batch_size;
pub mod class_weights;
mod data;
mod denoisers;
pub mod distill;
pub mod embedding;
pub mod evaluating;
mod frozen;
pub mod generation;
pub mod groups;
pub mod keys;
pub mod lora;
mod loss;
mod memory;
pub mod optimizer;
pub mod parallel;
pub mod paths;
mod precedence;
pub mod preference;
pub mod ranking;
pub mod surroundings;
pub mod task;
pub mod tasks;
pub mod unused;
pub mod values;
mod written;

use std::path::PathBuf;

pub use data::{BadRows, Columns, Data, DataTask, Denoiser, Mixing, Noise, Objective, Tasks};
pub use frozen::Frozen;
pub use generation::Generation;
pub use memory::{Memory, PricesFrom};
pub use optimizer::Optimizer;
pub use precedence::resolve_precedence;
use trainer::{GradientPrecision, MasterWeights};
pub use values::{Origin, Values};

use crate::failure::{Failure, Outcome};

/// The losses beside the plain cross-entropy, in the order in which they are checked.
static LOSSES: [&loss::Loss; 4] = [&preference::LOSS, &distill::LOSS, &embedding::LOSS, &ranking::LOSS];

/// The resolved config. Field names are the keys' names.
#[derive(Clone, Debug)]
pub struct Config {
    /// `run.*`
    pub run: Run,
    /// `model.*`
    pub model: Model,
    /// `data.*`
    pub data: Data,
    /// `train.*`
    pub train: Train,
    /// `lora.*`, if an adapter is trained.
    pub lora: Option<lora::Adapter>,
    /// `parallel.*`
    pub parallel: parallel::Division,
    /// `optimizer.*`
    pub optimizer: Optimizer,
    /// `task.name`; `None`: that of the model.
    pub task: Option<task::Task>,
    /// `embedding.*`: the loss of vectors, if they are trained.
    pub embedding: Option<trainer::contrastive::Contrastive>,
    /// `ranking.*`: the loss of lists of texts, if they are ranked.
    pub ranking: Option<ranking::RankingSettings>,
    /// `preference.*`: the loss of pairs of answers, if there is one.
    pub preference: Option<trainer::preference::Preference>,
    /// `distill.*`: the share of a teacher in the loss, if there is one.
    pub distillation: Option<trainer::distillation::Distillation>,
    /// `preference.reference` or `distill.teacher`: a model beside the trained one that is only read.
    pub frozen: Option<Frozen>,
    /// `schedule.*`
    pub schedule: Schedule,
    /// `generation.*`
    pub generation: Generation,
    /// `checkpoint.*`
    pub checkpoint: Checkpoint,
    /// `memory.*`
    pub memory: Memory,
    /// The given values, with origins; `resolved.toml` is written from them.
    pub values: Values,
}

/// `run.*`
#[derive(Clone, Debug)]
pub struct Run {
    /// The directory of everything that the run writes.
    pub output_dir: PathBuf,
    /// Seed of weights, order and dropout.
    pub seed: u64,
    /// `auto`, `cpu`, `cuda`, `cuda:N`; `metal` is refused when it is opened.
    pub device: String,
    /// Steps between plain lines; `None`: at intervals of time.
    pub log_every_steps: Option<u64>,
    /// Start from `model.init_from`, freeze encoder and shared embedding.
    pub finetune: bool,
    /// Whether nothing, including the available memory, may change the bits of a run.
    pub deterministic: bool,
    /// Parts that may differ from the checkpoint's.
    pub allow_changes: Vec<String>,
}

/// `model.*`
#[derive(Clone, Debug)]
pub struct Model {
    /// A preset's name or a `config.json`.
    pub config: Option<String>,
    /// A Hugging Face directory.
    pub init_from: Option<PathBuf>,
    /// Rows of the embedding; `None`: from tokenizer or file.
    pub vocab_size: Option<u64>,
    /// The precision of the base's codes below an adapter.
    pub base_precision: Option<t5::Precision>,
    /// Keys that override the model's `config.json`.
    pub overrides: toml::Table,
}

/// `train.*`
#[derive(Clone, Debug)]
pub struct Train {
    /// Samples per optimizer step.
    pub batch_size: usize,
    /// Passes over the data; `None`: enough for `max_steps`.
    pub epochs: Option<u64>,
    /// Optimizer steps, at most.
    pub max_steps: Option<u64>,
    /// Dropout; `None`: the model's.
    pub dropout: Option<f64>,
    /// Activations in bfloat16.
    pub bf16: bool,
    /// Precision of the weights.
    pub master_weights: MasterWeights,
    /// Precision of gradient sums.
    pub gradient_precision: GradientPrecision,
    /// Parts that do not train.
    pub freeze: Vec<String>,
    /// The largest norm of gradients; 0: no clipping.
    pub grad_clip_norm: f64,
    /// Factor of `(log Z)²` in what is minimised.
    pub z_loss: f64,
    /// torch's `label_smoothing`.
    pub label_smoothing: f64,
    /// Skipped steps in a row that end the run.
    pub max_non_finite_steps: u64,
    /// Steps between evaluations; 0: only at start and end.
    pub eval_every_steps: u64,
    /// Rows that are evaluated; 0: all.
    pub eval_samples: u64,
    /// Rows that are answered in an evaluation; 0: all.
    pub eval_generate_samples: u64,
    /// Longest generation in tokens.
    pub eval_max_new_tokens: usize,
    /// Evaluations without an improvement after which the run ends; `None`: never.
    pub early_stopping_patience: Option<u64>,
    /// An evaluation is better only if it exceeds the best one by more than this.
    pub early_stopping_min_delta: f64,
    /// The metrics of answers that are shown.
    pub eval_metrics: Vec<text_metrics::Metric>,
    /// Whether ROUGE stems words.
    pub rouge_stemmer: bool,
    /// The tokenizer of BLEU, by sacreBLEU's name.
    pub bleu_tokenizer: String,
    /// Generations shown after each evaluation.
    pub sample_generations: usize,
}

/// `schedule.*`
#[derive(Clone, Debug)]
pub struct Schedule {
    /// `constant`, `one-cycle`, `linear`, `cosine`, `inverse-sqrt`.
    pub name: String,
    /// `None`: the schedule's own.
    pub warmup_steps: Option<u64>,
    /// The share of all steps in which the rate rises.
    pub warmup_ratio: Option<f64>,
    /// One-cycle: peak learning rate over the first.
    pub div_factor: f64,
    /// One-cycle: first learning rate over the last.
    pub final_div_factor: f64,
}

/// `checkpoint.*`
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Steps between checkpoints; `None`: not by steps.
    pub every_steps: Option<u64>,
    /// Minutes between checkpoints; `None`: not by time.
    pub every_minutes: Option<f64>,
    /// Newest checkpoints that are kept.
    pub keep_last: usize,
    /// Best checkpoints that are kept beside them.
    pub keep_best: usize,
    /// The value that selects the best checkpoint.
    pub best_metric: String,
    /// Whether `OUTPUT/model` is the best model, not the final one.
    pub model_is_best: bool,
}

impl Config {
    /// The key or flag that gave the files of `data.train`: the key itself, or `--data` of `eval`.
    pub fn label_of_rows(&self) -> &'static str {
        if !self.data.tasks.tasks.is_empty() {
            return "data.tasks";
        }
        match self.values.origin("data.train") {
            Origin::Flag(flag) if flag == "--data" => "--data",
            _ => "data.train",
        }
    }

    /// The samples of a step that a row gives: two where one answer is preferred to another, and each text where texts have
    /// vectors or are ranked.
    pub fn samples_of_a_row(&self) -> usize {
        if let Some(of) = &self.embedding {
            return of.texts_of_a_row();
        }
        if let Some(of) = &self.ranking {
            return of.list_size;
        }
        if self.preference.is_some_and(|of| !of.loss.has_labels()) { 2 } else { 1 }
    }

    /// Resolves values into a config, or names the keys that contradict each other.
    pub fn resolve(values: Values) -> Outcome<Self> {
        let lacks_model = values.switch("run.finetune") && values.text("model.init_from").is_none();
        let has_rows = values.list("data.train").is_some_and(|files| !files.is_empty());
        if !has_rows && values.tables("data.tasks").is_empty() && !lacks_model {
            return Err(Failure::usage("`data.train` is empty: there is nothing to train on")
                .hint("name your rows: `--data rows.parquet`")
                .hint("with no data, model or `--config`, a demo runs on its own rows"));
        }
        let config = Self::resolve_without_data(values)?;
        match &config.lora {
            Some(_) if config.model.init_from.is_none() => Err(lora::without_base()),
            _ => Ok(config),
        }
    }

    /// As [`Config::resolve`], but `data.train` may be empty.
    pub fn resolve_without_data(values: Values) -> Outcome<Self> {
        let run = Run {
            output_dir: paths::from_text(&values.text("run.output_dir").unwrap_or_default()),
            seed: required(&values, "run.seed"),
            device: device(&values)?,
            log_every_steps: values.integer("run.log_every_steps"),
            finetune: values.switch("run.finetune"),
            deterministic: values.switch("run.deterministic"),
            allow_changes: values.list("run.allow_changes").unwrap_or_default(),
        };
        let model = Model {
            config: values.text("model.config"),
            init_from: values.text("model.init_from").as_deref().map(paths::from_text),
            vocab_size: values.integer("model.vocab_size"),
            base_precision: values.text("model.base_precision").as_deref().and_then(t5::Precision::of_name),
            overrides: values.table("model.overrides"),
        };
        let data = denoisers::with_denoisers(Data::from_values(&values), &values)?;
        let data = tasks::with_tasks(data, &values)?;
        let train = train(&values, &run, &data)?;
        let lora = lora::Adapter::from_values(&values)?;
        let optimizer = Optimizer::from_values(&values, lora.is_some())?;
        let preference = preference::from_values(&values);
        let embedding = embedding::from_values(&values)?;
        let ranking = ranking::from_values(&values)?;
        let schedule = Schedule {
            name: values.text("schedule.name").unwrap_or_default(),
            warmup_steps: values.integer("schedule.warmup_steps"),
            warmup_ratio: values.number("schedule.warmup_ratio"),
            div_factor: values.required_number("schedule.div_factor"),
            final_div_factor: values.required_number("schedule.final_div_factor"),
        };
        let checkpoint = Checkpoint {
            every_steps: values.integer("checkpoint.every_steps"),
            every_minutes: values.number("checkpoint.every_minutes"),
            keep_last: size(&values, "checkpoint.keep_last"),
            keep_best: size(&values, "checkpoint.keep_best"),
            best_metric: values.text("checkpoint.best_metric").unwrap_or_default(),
            model_is_best: values.text("checkpoint.model").as_deref() == Some("best"),
        };
        let generation = Generation::from_values(&values);
        let (mut memory, parallel) = (Memory::from_values(&values), parallel::Division::from_values(&values));
        if parallel.virtual_shards.is_some() && memory.prices == PricesFrom::Measured {
            // Measured prices depend on the number of threads. So does the way a batch is cut then, and that changes bits.
            memory.prices = PricesFrom::BuiltIn;
        }
        let config = Self {
            run,
            model,
            data,
            train,
            lora,
            parallel,
            preference,
            distillation: distill::from_values(&values),
            frozen: Frozen::from_values(&values),
            embedding,
            ranking,
            task: task_of(&values),
            optimizer,
            schedule,
            generation,
            checkpoint,
            memory,
            values,
        };
        config.check_across_keys()?;
        Ok(config)
    }

    /// Rules about keys of the model.
    fn check_model(&self) -> Outcome<()> {
        let values = &self.values;
        if self.run.finetune && self.model.init_from.is_none() {
            return Err(Failure::usage(format!(
                "{}: fine-tuning needs `model.init_from`, which is not set",
                values.origin("run.finetune")
            ))
            .hint("use `--model DIR` with a Hugging Face directory, such as OUTPUT/model of an earlier run"));
        }
        if self.model.config.is_none() && self.model.init_from.is_none() {
            return Err(Failure::usage("no model: neither `model.config` nor `model.init_from` is set")
                .hint("use `--model DIR` to start from a model, or `--preset t5-small` to start from scratch"));
        }
        let of_a_shape = ["model.config", "model.vocab_size", "model.overrides"];
        let is_other = |key: &&str| values.setting(key).value != keys::default(key);
        if let (Some(directory), Some(key)) = (&self.model.init_from, of_a_shape.into_iter().find(is_other)) {
            return Err(Failure::usage(format!(
                "`{key}` ({}) is for new models, and `model.init_from` ({}) names weights with a shape of their own: {}",
                values.origin(key),
                values.origin("model.init_from"),
                directory.display()
            ))
            .hint(format!("for those weights leave out `{key}`; for new weights leave out `model.init_from`")));
        }
        if let (Some(precision), None) = (self.model.base_precision, &self.lora) {
            return Err(Failure::usage(format!(
                "`model.base_precision` ({}) is for the frozen weights below an adapter, and weights in {} cannot be trained",
                values.origin("model.base_precision"),
                precision.name()
            ))
            .hint("`--lora` trains an adapter beside them"));
        }
        Ok(())
    }

    /// Rules about keys of the schedule.
    fn check_schedule(&self) -> Outcome<()> {
        let values = &self.values;
        if self.schedule.warmup_steps.is_some() && self.schedule.warmup_ratio.is_some() {
            return Err(Failure::usage(format!(
                "`schedule.warmup_steps` ({}) and `schedule.warmup_ratio` ({}) are both set",
                values.origin("schedule.warmup_steps"),
                values.origin("schedule.warmup_ratio")
            ))
            .hint("set one of them"));
        }
        let warms_up = self.schedule.warmup_steps.is_some_and(|steps| steps > 0)
            || self.schedule.warmup_ratio.is_some_and(|ratio| ratio > 0.0);
        let is_scheduled = self.schedule.name != "constant" || warms_up;
        if self.optimizer.learning_rate.is_none() && is_scheduled {
            return Err(Failure::usage(format!(
                "`optimizer.relative_step` sets the learning rate and cannot be combined with `schedule.name = \"{}\"` or a warm-up",
                self.schedule.name
            ))
            .hint("use `--set optimizer.relative_step=false`, or `--set schedule.name=constant --set schedule.warmup_steps=0`"));
        }
        Ok(())
    }

    /// Rules about several keys.
    fn check_across_keys(&self) -> Outcome<()> {
        let values = &self.values;
        self.check_model()?;
        self.check_schedule()?;
        if self.train.master_weights != MasterWeights::F32 && !self.train.bf16 {
            return Err(Failure::usage(format!(
                "`train.master_weights` ({}) keeps weights in bf16 and needs `train.precision = \"bf16\"`",
                values.origin("train.master_weights")
            ))
            .hint("use `--set train.precision=bf16`"));
        }
        self.memory.check(values)?;
        if self.train.epochs.is_none() && self.train.max_steps.is_none() {
            return Err(Failure::usage(format!(
                "the run would never end: `train.epochs` ({}) and `train.max_steps` are both \"none\"",
                values.origin("train.epochs")
            ))
            .hint("use `--epochs N` or `--max-steps N`"));
        }
        if self.data.validation_split.is_some() && !self.data.validation.is_empty() {
            return Err(Failure::usage(format!(
                "`data.validation_split` ({}) and `data.validation` ({}) are both set",
                values.origin("data.validation_split"),
                values.origin("data.validation")
            ))
            .hint("set one of them: rows of `data.train`, or files of their own"));
        }
        evaluating::check(self, self.data.may_have_validation())?;
        parallel::check(self)?;
        LOSSES.iter().try_for_each(|loss| loss.check(self))
    }
}

/// The task in these values; `None`: that of the model.
fn task_of(values: &Values) -> Option<task::Task> {
    task::Task::named(&values.text("task.name")?)
}

fn required(values: &Values, name: &str) -> u64 {
    values.integer(name).unwrap_or_else(|| panic!("`{name}` has no word that stands for no value"))
}

fn size(values: &Values, name: &str) -> usize {
    usize::try_from(required(values, name)).unwrap_or(usize::MAX)
}

fn pin(values: &Values, name: &str) -> Option<usize> {
    values.integer(name).map(|value| usize::try_from(value).unwrap_or(usize::MAX))
}

fn device(values: &Values) -> Outcome<String> {
    let device = values.text("run.device").unwrap_or_else(|| "auto".to_string());
    let numbered = device.strip_prefix("cuda:").is_some_and(|index| index.parse::<usize>().is_ok());
    if numbered || ["auto", "cpu", "cuda", "metal"].contains(&device.as_str()) {
        return Ok(device);
    }
    Err(Failure::usage(format!(
        "{}: `run.device`: expected auto, cpu, cuda or cuda:N, got `{device}`",
        values.origin("run.device")
    ))
    .hint("`--device cpu` works everywhere"))
}

fn train(values: &Values, run: &Run, data: &Data) -> Outcome<Train> {
    let finetune_freezes: &[&str] = if run.finetune { &["encoder", "shared"] } else { &[] };
    Ok(Train {
        batch_size: batch_size::from_values(values)?,
        epochs: values.integer("train.epochs"),
        max_steps: values.integer("train.max_steps"),
        dropout: values.number("train.dropout"),
        bf16: values.text("train.precision").as_deref() == Some("bf16"),
        master_weights: match values.text("train.master_weights").as_deref() {
            Some("stochastic-rounding") => MasterWeights::StochasticRounding,
            Some("nearest-rounding") => MasterWeights::NearestRounding,
            _ => MasterWeights::F32,
        },
        gradient_precision: match values.text("train.gradient_precision").as_deref() {
            Some("bf16") => GradientPrecision::Bf16,
            _ => GradientPrecision::F32,
        },
        freeze: values
            .list("train.freeze")
            .unwrap_or_else(|| finetune_freezes.iter().map(ToString::to_string).collect()),
        grad_clip_norm: values.required_number("train.grad_clip_norm"),
        z_loss: values.required_number("train.z_loss"),
        label_smoothing: values.required_number("train.label_smoothing"),
        max_non_finite_steps: required(values, "train.max_non_finite_steps"),
        eval_every_steps: required(values, "train.eval_every_steps"),
        eval_samples: required(values, "train.eval_samples"),
        eval_generate_samples: required(values, "train.eval_generate_samples"),
        eval_max_new_tokens: pin(values, "train.eval_max_new_tokens").unwrap_or(data.max_target_tokens),
        early_stopping_patience: values.integer("train.early_stopping_patience"),
        early_stopping_min_delta: values.required_number("train.early_stopping_min_delta"),
        eval_metrics: evaluating::metrics(values),
        rouge_stemmer: values.switch("train.rouge_stemmer"),
        bleu_tokenizer: values.text("train.bleu_tokenizer").unwrap_or_default(),
        sample_generations: size(values, "train.sample_generations"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(assignments: &[&str]) -> Outcome<Config> {
        let mut values = Values::defaults();
        for assignment in ["data.train=a.parquet", "model.config=t5-small"].iter().chain(assignments) {
            values.apply_assignment(assignment)?;
        }
        Config::resolve(values)
    }

    #[test]
    fn the_batch_size_is_one_number_however_it_is_said() {
        for (assignments, expected) in [
            (&[][..], 32),
            (&["train.batch_size=24"], 24),
            (&["train.batch_size_per_device=16", "train.gradient_accumulation_steps=8"], 128),
            (&["train.batch_size_per_device=16"], 16),
            (&["train.batch_size=128", "train.batch_size_per_device=16", "train.gradient_accumulation_steps=8"], 128),
            (&["train.batch_size=128", "train.gradient_accumulation_steps=1"], 128),
        ] {
            assert_eq!(resolve(assignments).unwrap().train.batch_size, expected, "{assignments:?}");
        }
        for assignments in [
            &["train.gradient_accumulation_steps=8"][..],
            &["train.batch_size=100", "train.batch_size_per_device=16", "train.gradient_accumulation_steps=8"],
            &["train.batch_size=128", "train.gradient_accumulation_steps=8"],
        ] {
            assert_eq!(resolve(assignments).unwrap_err().exit, crate::failure::Exit::Usage, "{assignments:?}");
        }
    }

    #[test]
    fn keys_that_contradict_each_other_are_named() {
        for (assignments, expected) in [
            (&["optimizer.relative_step=true", "optimizer.learning_rate=0.1"][..], "contradict"),
            (&["optimizer.warmup_init=true"], "optimizer.relative_step"),
            (&["optimizer.name=lion", "optimizer.scale_parameter=true"], "Adafactor's and AdamW's"),
            (&["optimizer.name=adamw", "optimizer.relative_step=true"], "optimizer.relative_step"),
            (&["schedule.warmup_steps=3", "schedule.warmup_ratio=0.1"], "schedule.warmup_ratio"),
            (&["optimizer.beta2=0.9"], "AdamW's"),
            (&["optimizer.name=lion", "optimizer.state_precision=int8"], "AdamW's"),
            (&["optimizer.relative_step=true", "schedule.name=cosine"], "schedule.name"),
            (&["data.train=[]"], "`data.train` is empty"),
            (&["model.config=none"], "neither `model.config` nor `model.init_from`"),
            (&["run.finetune=true"], "needs `model.init_from`"),
            (&["model.init_from=m"], "`model.config` (--set) is for new models"),
            (&["model.config=none", "model.init_from=m", "model.overrides={ num_layers = 1 }"], "`model.overrides`"),
            (&["model.base_precision=nf4"], "`model.base_precision`"),
            (&["train.epochs=none"], "never end"),
            (&["checkpoint.model=best"], "data.validation"),
            (&["train.master_weights=stochastic-rounding"], "train.precision"),
            (
                &["memory.accumulation=micro-batch-major", "memory.activation_offload=disk"],
                "`memory.activation_offload`",
            ),
            (&["run.device=gpu"], "expected auto, cpu, cuda or cuda:N, got `gpu`"),
        ] {
            let failure = resolve(assignments).expect_err("a contradiction");
            assert!(failure.message.contains(expected), "{assignments:?}\n{failure}");
            assert!(!failure.hints.is_empty(), "{failure}");
        }
    }

    #[test]
    fn finetune_freezes_encoder_and_shared_unless_told_otherwise() {
        let finetune = ["run.finetune=true", "model.init_from=m", "model.config=none"];
        assert_eq!(resolve(&finetune).unwrap().train.freeze, ["encoder", "shared"]);
        assert!(resolve(&[&finetune[..], &["train.freeze=[]"]].concat()).unwrap().train.freeze.is_empty());
        assert!(resolve(&[]).unwrap().train.freeze.is_empty());
    }
}
