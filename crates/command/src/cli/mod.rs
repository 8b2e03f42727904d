//! The command line as typed: flags and subcommands, without their meaning.
//!
//! [`crate::config`] determines their meaning. `train` is the default subcommand, and `--learn_rate` is `--learn-rate`.

pub mod answer_flags;
pub mod chat_flags;
pub mod embed_flags;
pub mod export_flags;
pub mod flag_values;
pub mod job_flags;
pub mod key_flags;
pub mod lever_flags;
pub mod row_flags;
pub mod score_flags;
pub mod serve_flags;
mod usage;
pub mod view_flags;
pub mod vocabulary_flags;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use memory_policy::Bytes;
use toml::Value;

use crate::config::keys::KEYS;
use crate::config::values::Setting;
use crate::config::{Origin, Values};
use crate::failure::Outcome;
use answer_flags::{EvalArgs, GenerateArgs};
use chat_flags::ChatArgs;
use embed_flags::EmbedArgs;
use export_flags::{AverageArgs, ConvertBaseArgs, ExportArgs, MergeArgs};
use flag_values::{MasterWeights, Precision, assignment_text, truth, typed_path};
use job_flags::JobsArgs;
use key_flags::{OtherNames, Typed as TypedFlag};
use lever_flags::LeverFlags;
use row_flags::{ConvertArgs, InspectArgs, TrainTokenizerArgs};
use score_flags::ScoreArgs;
use serve_flags::{BenchServeArgs, ServeArgs};
use view_flags::{DoctorArgs, ProofArgs, ReportArgs, WatchArgs};
use vocabulary_flags::{AddTokensArgs, TrimVocabArgs};

const EXAMPLES: &str = "\
Examples:
  train_low_mem
      Train a tiny T5 on the embedded sample data, in about a minute.
  train_low_mem --model google/flan-t5-small --data tickets.csv --output runs/tickets
      Fine-tune a model that `hf download google/flan-t5-small` has fetched, on your own rows.
  train_low_mem generate runs/tickets 'My card was charged twice'
      Ask it.
  train_low_mem train-tokenizer --input rows.parquet --vocab-size 8000 --output tokenizer.json
  train_low_mem --preset t5-small --tokenizer tokenizer.json --data rows.parquet --output runs/a
      Pretrain a new model of this shape, with a tokenizer of your own.
  train_low_mem --output runs/a --keep-training
      Resume after a crash, a kill or Ctrl-C, to the same bits or with a line that says why not.
  train_low_mem --finetune --model runs/a --data tuning.parquet --output runs/b
      Train the decoder alone; without `--finetune` everything is trained.
  train_low_mem plan --config configs/chatlm-0.2b.toml --memory-budget 4GiB
      Print the memory bill and whether it fits, without allocating anything.

Files of a run:
  OUTPUT/resolved.toml  OUTPUT/metrics.jsonl  OUTPUT/checkpoints/  OUTPUT/model/ (Hugging Face)
  OUTPUT/report.html  OUTPUT/events.out.tfevents.0.train_low_mem (TensorBoard)

Exit codes:
  0 done, 1 internal error, 2 usage or config, 3 does not fit the budget,
  4 data or checkpoint unusable, 5 diverged, 6 and 7 findings of `doctor`,
  75 interrupted (resumable)
Signals (SIGTERM, SIGINT, SIGHUP, SIGUSR1):
  The first one saves a checkpoint and exits with 75. A second one exits at once with 128 + its
  number (130, 143, ..) and loses the steps since the last checkpoint.

`train_low_mem keys` lists every config key.";

const DOCTOR: &str = "\
Exit codes:
  0 nothing is wrong, 6 warnings (slower or less than the machine has), 7 training cannot work here, or the server
  takes no requests

For a bug report: train_low_mem doctor --json > doctor.json";

/// Trains T5 inside a memory budget, with the same losses at every budget.
#[derive(Debug, Parser)]
#[command(name = "train_low_mem", version, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
#[command(styles = Styles::styled().header(AnsiColor::Green.on_default().bold()).literal(AnsiColor::Cyan.on_default().bold()))]
pub struct Cli {
    /// The flags of `train`, the default subcommand.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Threads that compute [default: OMP_NUM_THREADS, or every processor]
    #[arg(long, short = 't', global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Another subcommand.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model (the default): pretrain, fine-tune or resume
    #[command(after_help = EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Print the memory bill and the plan without running
    Plan(Box<PlanArgs>),
    /// Score a model on rows: loss, perplexity, BLEU, chrF, ROUGE, exact match, labels
    Eval(Box<EvalArgs>),
    /// Generate text with a model: greedy, beam search or sampling
    Generate(Box<GenerateArgs>),
    /// Write a vector of each text with a model's encoder
    Embed(Box<EmbedArgs>),
    /// Score how well texts answer their queries, with a reranker
    Score(Box<ScoreArgs>),
    /// Talk to a model, or compare adapters, line by line
    Chat(Box<ChatArgs>),
    /// Answer over HTTP, as OpenAI's interface does: completions, chats, streams, metrics
    Serve(Box<ServeArgs>),
    /// Show the rows of files: columns, nulls, duplicates, lengths, samples
    Inspect(InspectArgs),
    /// Turn JSONL, JSON, CSV, TSV or parquet files into one parquet file of prompts and responses
    Convert(Box<ConvertArgs>),
    /// Merge a LoRA adapter of PEFT, or of a run, into its model
    Merge(MergeArgs),
    /// Average the weights of checkpoints or models
    Average(AverageArgs),
    /// Write a model as GGUF for llama.cpp, or for CTranslate2
    Export(ExportArgs),
    /// Quantise a model's weights, for adapters and answers in less memory
    ConvertBase(ConvertBaseArgs),
    /// Leave out the entries of a model's vocabulary that some rows do not need
    TrimVocab(TrimVocabArgs),
    /// Add tokens to a model's vocabulary, such as the characters that its tokenizer loses
    AddTokens(AddTokensArgs),
    /// Train a tokenizer.json from parquet, JSONL, JSON, CSV, TSV or text files
    TrainTokenizer(TrainTokenizerArgs),
    /// Measure time and peak memory of training steps on synthetic full-length samples
    Bench(BenchArgs),
    /// Try the promises of this program on this machine, and write a page with the numbers
    Proof(ProofArgs),
    /// Make an HTML page of a run, or of several side by side
    Report(ReportArgs),
    /// Examine this machine: processor, memory, disk, GPUs, and commands that install missing parts
    #[command(after_help = DOCTOR)]
    Doctor(DoctorArgs),
    /// Watch a run in the terminal, from its files: `q` leaves, and the run goes on
    Watch(WatchArgs),
    /// List the runs that wait or train on this machine, or train a list of runs
    Jobs(JobsArgs),
    /// List every config key with its default and meaning
    Keys,
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Flags of `train` and `plan`.
#[derive(Args, Clone, Debug, Default)]
pub struct TrainArgs {
    /// Pretrained weights to start from: a model directory, a run, or a hub id in the local cache
    #[arg(long, value_name = "DIR|ID", value_parser = typed_path())]
    pub model: Option<String>,
    /// Shape of a new model with random weights: a preset such as t5-small, or a config.json
    #[arg(long, value_name = "NAME", value_parser = typed_path())]
    pub preset: Option<String>,
    /// Training rows: parquet, JSONL, JSON, CSV or TSV files, directories or globs (repeatable)
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = typed_path())]
    pub data: Vec<String>,
    /// Validation rows, as --data (repeatable)
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = typed_path())]
    pub validation: Vec<String>,
    /// Tokenizer, for a new model: tokenizer.json, spiece.model, or a model that has one
    #[arg(long, value_name = "FILE|DIR", value_parser = typed_path())]
    pub tokenizer: Option<String>,
    /// Samples per optimizer step
    #[arg(long, value_name = "N")]
    pub batch_size: Option<String>,
    /// Learning rate (one-cycle: the first; the peak is schedule.div_factor times it)
    #[arg(long = "lr", visible_aliases = ["learn-rate", "learning-rate"], value_name = "X")]
    pub learn_rate: Option<String>,
    /// Passes over the data
    #[arg(long, value_name = "N")]
    pub epochs: Option<String>,
    /// Stop after N optimizer steps
    #[arg(long, value_name = "N")]
    pub max_steps: Option<String>,
    /// Seed of new weights, row order and dropout
    #[arg(long, value_name = "N")]
    pub seed: Option<String>,
    /// Output directory
    #[arg(long, short, value_name = "DIR", value_parser = typed_path())]
    pub output: Option<String>,
    /// Config file (TOML) [default: none; without data or model, a demo runs]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Train only the decoder of --model: encoder and shared embedding stay as they are. Leave it out to train everything
    #[arg(long, visible_alias = "is-finetune", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    pub finetune: Option<bool>,
    /// Train a LoRA adapter beside the frozen weights of --model; `lora.*` has its settings
    #[arg(long)]
    pub lora: bool,
    /// Resume from the newest valid checkpoint in the output directory
    #[arg(long, visible_alias = "is-keep-training", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    pub keep_training: Option<bool>,
    /// With --keep-training: resume from the checkpoint of this step; later ones are moved aside
    #[arg(long, value_name = "STEP")]
    pub resume_from: Option<u64>,
    /// Memory limit of the whole process: 512MiB, 4GiB, 4G
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// GPU memory limit
    #[arg(long, value_name = "SIZE")]
    pub device_memory_budget: Option<String>,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Set any config key, such as train.dropout=0.1 (repeatable); `train_low_mem keys` lists them
    #[arg(long, value_name = "KEY=VALUE", value_parser = assignment_text())]
    pub set: Vec<String>,
    /// Resume even if these changed: data, tokenizer, model, base (weights below an adapter), batch-size, seed
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub allow_changed: Vec<String>,
    /// Try one step, one save and one load, then clean up
    #[arg(long)]
    pub dry_run: bool,
    /// Wait until other runs leave the memory that the plan needs, and reserve it
    #[arg(long)]
    pub wait: bool,
    /// Plan for another machine: its snapshots as JSON, one for each plan (for tests)
    #[arg(long, value_name = "FILE", hide = true)]
    pub machine: Option<PathBuf>,
    /// The names of other trainers
    #[command(flatten)]
    pub other_names: OtherNames,
}

/// Flags of `plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The same flags as `train`.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Plan for N processes that train together on this host: the bill is that of the one that holds most
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub processes: u16,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Show the savings and costs of each lever's other values
    #[arg(long)]
    pub explain: bool,
    /// Write the bill as an HTML page: over the phases of the run and the events of a step
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// The other measurements of `bench`.
#[derive(Debug, Subcommand)]
pub enum OtherBench {
    /// Measure answers as `serve` makes them: tokens a second, time to the first token, peak memory
    Serve(BenchServeArgs),
}

/// Flags of `bench`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// Another thing to measure
    #[command(subcommand)]
    pub other: Option<OtherBench>,
    /// Preset name or config.json
    #[arg(long, value_name = "PRESET|FILE", required = true)]
    pub model: Option<String>,
    /// Samples per optimizer step
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch: usize,
    /// Tokens per source
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub source_tokens: usize,
    /// Tokens per target
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub target_tokens: usize,
    /// Precision of activations; --master-weights sets that of the weights
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Precision of the weights; any value but f32 needs --precision bf16
    #[arg(long, value_enum, default_value_t = MasterWeights::F32)]
    pub master_weights: MasterWeights,
    /// Precision of gradient sums over micro-batches
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub gradient_precision: Precision,
    /// Train a LoRA adapter of this rank on every linear layer of the blocks, with AdamW, beside frozen weights; with bf16 these are
    /// bf16
    #[arg(long, value_name = "RANK")]
    pub lora: Option<u32>,
    /// Bytes that the process may hold; the planner chooses the levers that no flag sets
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<Bytes>,
    /// GPU memory limit; the planner chooses the levers that no flag sets
    #[arg(long, value_name = "SIZE")]
    pub device_memory_budget: Option<Bytes>,
    /// Levers
    #[command(flatten)]
    pub levers: LeverFlags,
    /// Timed steps, after one warm-up step, or some more where micro-batches are recorded as graphs
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// Show time, arithmetic and allocations of each operation, and this machine's peak rate
    #[arg(long)]
    pub profile: bool,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The result of parsing the command line.
#[derive(Debug)]
pub enum Typed {
    /// A command to run.
    Command(Box<Cli>),
    /// The text for `--help` or `--version`.
    Help(clap::Error),
}

/// Reads the command line.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Outcome<Typed> {
    let mut is_flag = true;
    let arguments = arguments.into_iter().map(|argument| {
        // After `--` come values.
        is_flag &= argument != "--";
        if is_flag { hyphenated(argument) } else { argument }
    });
    let arguments: Vec<OsString> = arguments.collect();
    let read = |arguments: &[OsString]| {
        let matches = Cli::command().try_get_matches_from(arguments);
        matches.and_then(|matches| Cli::from_arg_matches(&matches))
    };
    let wrong_values = |arguments: &[OsString]| {
        let train = match read(arguments).ok()? {
            Cli { command: None, train, .. } => train,
            Cli { command: Some(Command::Train(train)), .. } => *train,
            Cli { command: Some(Command::Plan(plan)), .. } => plan.train,
            _ => return None,
        };
        train.apply(&mut Values::defaults()).err()
    };
    match read(&arguments) {
        Ok(cli) => Ok(Typed::Command(Box::new(cli))),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp
                    | ErrorKind::DisplayVersion
                    | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            ) =>
        {
            Ok(Typed::Help(error))
        }
        Err(error) => Err(usage::failures(&error, Cli::command(), &arguments, &wrong_values)),
    }
}

/// `--learn_rate=0.1` becomes `--learn-rate=0.1`; the text after `=` stays unchanged.
fn hyphenated(argument: OsString) -> OsString {
    let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) else {
        return argument;
    };
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    value.map_or(name.clone(), |value| format!("{name}={value}")).into()
}

impl TrainArgs {
    /// Whether the output directory was given.
    pub fn names_output(&self) -> bool {
        let is_set = |assignment: &String| assignment.trim_start().starts_with("run.output_dir");
        self.output.is_some()
            || self.set.iter().any(is_set)
            || self.other_names.given().any(|flag| flag.sets("run.output_dir"))
    }

    /// Applies the flags to the config's values: named flags first, then `--set`, which takes precedence.
    pub fn apply(&self, values: &mut Values) -> Outcome<()> {
        self.apply_named(values)?;
        key_flags::apply_assignments(&self.set, values)
    }

    /// A warning for each flag whose value is lost, because `--set` sets its key as well.
    pub fn lost(&self) -> Outcome<Vec<String>> {
        let mut named = Values::defaults();
        self.apply_named(&mut named)?;
        let mut all = named.clone();
        key_flags::apply_assignments(&self.set, &mut all)?;
        let lost = KEYS.iter().filter_map(|key| match &named.setting(key.name) {
            // It has no value of its own.
            Setting { origin: Origin::Flag(flag), .. } if flag == "--lora" => None,
            Setting { origin: Origin::Flag(flag), value } if *value != all.setting(key.name).value => {
                Some(format!("`--set {}` takes the place of `{flag} {value}`", key.name))
            }
            _ => None,
        });
        Ok(lost.collect())
    }

    /// Applies the named flags.
    fn apply_named(&self, values: &mut Values) -> Outcome<()> {
        let flags = [
            TypedFlag::new("--model", "model.init_from", &self.model),
            TypedFlag::new("--preset", "model.config", &self.preset),
            TypedFlag::new("--data", "data.train", &self.data),
            TypedFlag::new("--validation", "data.validation", &self.validation),
            TypedFlag::new("--tokenizer", "data.tokenizer", &self.tokenizer),
            TypedFlag::new("--batch-size", "train.batch_size", &self.batch_size),
            TypedFlag::new("--lr", "optimizer.learning_rate", &self.learn_rate),
            TypedFlag::new("--epochs", "train.epochs", &self.epochs),
            TypedFlag::new("--max-steps", "train.max_steps", &self.max_steps),
            TypedFlag::new("--seed", "run.seed", &self.seed),
            TypedFlag::new("--output", "run.output_dir", &self.output),
            TypedFlag::new("--memory-budget", "memory.budget", &self.memory_budget),
            TypedFlag::new("--device-memory-budget", "memory.device_budget", &self.device_memory_budget),
            TypedFlag::new("--device", "run.device", &self.device),
        ];
        key_flags::apply(flags.into_iter().flatten().chain(self.other_names.given()), values)?;
        if let Some(finetune) = self.finetune {
            values.set("run.finetune", Value::Boolean(finetune), Origin::Flag("--finetune".to_string()))?;
        }
        if self.lora && values.integer("lora.rank").is_none() {
            values.set("lora.rank", Value::Integer(16), Origin::Flag("--lora".to_string()))?;
        }
        if !self.allow_changed.is_empty() {
            values.set(
                "run.allow_changes",
                Value::from(self.allow_changed.clone()),
                Origin::Flag("--allow-changed".to_string()),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> Outcome<Cli> {
        match parse(format!("train_low_mem {line}").split_whitespace().map(OsString::from))? {
            Typed::Command(cli) => Ok(*cli),
            Typed::Help(text) => panic!("{line} printed help:\n{text}"),
        }
    }

    #[test]
    fn clap_finds_no_contradiction_in_the_definitions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_spelling_of_the_interface_is_accepted() {
        for line in [
            "--finetune",
            "--is-finetune",
            "--is_finetune",
            "--is-finetune=True",
            "--is_finetune=true",
            "--finetune=1",
            "train --finetune",
        ] {
            let cli = typed(line).unwrap_or_else(|failure| panic!("{line}: {failure}"));
            let train = match cli.command {
                Some(Command::Train(train)) => *train,
                _ => cli.train,
            };
            assert_eq!(train.finetune, Some(true), "{line}");
        }
        assert_eq!(typed("--is-keep-training=False").unwrap().train.keep_training, Some(false));
        for line in ["--learn_rate 0.1", "--learn-rate=0.1", "--learn_rate=0.1"] {
            assert_eq!(typed(line).unwrap().train.learn_rate.as_deref(), Some("0.1"), "{line}");
        }
        assert_eq!(typed("--set train.max_steps=3 --set a_b=c_d").unwrap().train.set, ["train.max_steps=3", "a_b=c_d"]);
    }

    #[test]
    fn flags_reach_their_keys_and_set_comes_last() {
        let cli =
            typed("--epochs 3 --learn-rate 1e-4 --memory-budget 4GiB --output runs/a --set train.epochs=5").unwrap();
        let mut values = Values::defaults();
        cli.train.apply(&mut values).unwrap();
        assert_eq!(values.integer("train.epochs"), Some(5));
        assert_eq!(values.number("optimizer.learning_rate"), Some(1e-4));
        assert_eq!(values.origin("memory.budget"), &Origin::Flag("--memory-budget".to_string()));
    }

    #[test]
    fn the_names_of_other_trainers_set_the_same_keys() {
        for (line, key, expected) in [
            ("--per_device_train_batch_size 8", "train.batch_size_per_device", Value::from(8)),
            ("--lr_scheduler_type inverse_sqrt", "schedule.name", Value::from("inverse-sqrt")),
            ("--num-train-epochs=3.0", "train.epochs", Value::from(3)),
            ("--model_name_or_path t5-small", "model.init_from", Value::from("t5-small")),
            ("--model t5-small", "model.init_from", Value::from("t5-small")),
            ("--preset t5-small", "model.config", Value::from("t5-small")),
            ("--use_dora", "lora.dora", Value::from(true)),
            ("--use_dora False", "lora.dora", Value::from(false)),
            ("--metric_for_best_model eval_rouge1", "checkpoint.best_metric", Value::from("rouge1")),
            ("--lora_target_modules q v", "lora.targets", Value::from(vec!["q", "v"])),
            ("--data a --data b c --train_file d", "data.train", Value::from(vec!["a", "b", "c", "d"])),
            ("--data 2024", "data.train", Value::from(vec!["2024"])),
            ("--prompt_column 7", "data.prompt_column", Value::from("7")),
            ("--text_column document --summary_column summary", "data.response_column", Value::from("summary")),
            ("--text_column document", "data.text_column", Value::from("document")),
        ] {
            for line in [line.to_string(), format!("plan {line}")] {
                let cli = typed(&line).unwrap_or_else(|failure| panic!("{line}: {failure}"));
                let flags = match cli.command {
                    Some(Command::Plan(plan)) => plan.train,
                    _ => cli.train,
                };
                let mut values = Values::defaults();
                flags.apply(&mut values).unwrap_or_else(|failure| panic!("{line}: {failure}"));
                assert_eq!(values.setting(key).value, expected, "{line}");
            }
        }
    }

    #[test]
    fn strings_are_kept_byte_for_byte() {
        let texts = ["summarize: ", " \u{a0}x\t", "\"quoted\"", "1e5", "true", "{a}", "'", "a = b", "2024-01-01"];
        for text in texts {
            for flag in ["--source_prefix", "--source-prefix"] {
                let line = ["train_low_mem", flag, text].map(OsString::from);
                let Ok(Typed::Command(cli)) = parse(line) else { panic!("{flag} {text}") };
                let mut values = Values::defaults();
                cli.train.apply(&mut values).unwrap();
                assert_eq!(values.text("data.source_prefix").as_deref(), Some(text), "{flag}");
            }
        }
        let Ok(Typed::Command(cli)) = parse(["x", "generate", "--model", "m", "--", "--my_text"].map(OsString::from))
        else {
            panic!("a prompt after --")
        };
        let Some(Command::Generate(flags)) = cli.command else { panic!("generate") };
        assert_eq!(flags.prompts, ["--my_text"]);
    }

    #[test]
    fn a_wrong_flag_is_an_error_with_a_hint() {
        for (line, message, hint) in [
            ("--lean-rate 3", "--lean-rate", "--learn-rate"),
            ("trian", "trian", "train"),
            ("eval --data x", "--model", "see `train_low_mem eval --help`"),
            ("generate --model x", "--prompt", "see `train_low_mem generate --help`"),
            ("--resume", "--resume", "--keep-training"),
            ("serve x --listen nowhere", "such as 8080", "see `train_low_mem serve --help`"),
            ("--set a=1 b=2", "b=2", "`--set` of its own"),
            ("--lr 1e-3 rows/b.jsonl", "unexpected argument `rows/b.jsonl`", "`--data rows/b.jsonl`"),
            ("--epochs 2 --epochs 3", "cannot be used multiple times", "--help"),
            ("--gpu-plan 2,2", "--gpu-plan", "jobs run"),
            ("--verbose", "--verbose", "see `train_low_mem --help`"),
            ("predict --model x", "predict", "generate"),
            ("eval --model x --data y --max-source-length 9", "--max-source-length", "data.max_source_tokens=.."),
            ("--is-finetune=maybe", "expected true or false", "--help"),
            ("bench --model t5-small --recompute some", "expected none, full or a number", "--help"),
        ] {
            let failure = typed(line).expect_err("a wrong flag");
            assert!(failure.message.contains(message), "{line}\n{failure}");
            assert!(failure.hints[0].contains(hint), "{line}\n{failure}");
        }
        for (line, message) in [
            ("--lr 1e-3x", "--lr: `optimizer.learning_rate`: expected a number"),
            ("--num_train_epochs x", "--num-train-epochs: `train.epochs`: expected a whole number"),
            ("--lr 1 --set optimizer.learning_rate=2 --set optimizer.learning_rate=3", "is set twice"),
            ("--batch-size 8 --train_batch_size 9", "--batch-size and --train-batch-size both set `train.batch_size`"),
            ("--output=", "--output: `run.output_dir`: expected a string that is not empty"),
            ("--set data.train=a --set data.train=b", "`data.train` is set twice"),
        ] {
            let failure = typed(line).unwrap().train.apply(&mut Values::defaults()).expect_err(line);
            assert!(failure.message.contains(message) && !failure.hints.is_empty(), "{line}\n{failure}");
        }
        let several = typed("--do_train --epochs=x --bf16 True --seed y").unwrap_err().to_string();
        for words in ["`--do-train`, `--bf16`\n--epochs: ", "--seed: `run.seed`", "`--bf16`: use `--set"] {
            assert!(several.contains(words), "{several}");
        }
        let mut values = Values::defaults();
        let failure = typed("--epochs three").unwrap().train.apply(&mut values).unwrap_err();
        assert!(failure.message.starts_with("--epochs: `train.epochs`: expected a whole number"), "{failure}");
    }
}
