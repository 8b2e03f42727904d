//! The flags of commands that answer: the place of weights, the settings of answers, and the arguments of `eval` and `generate`.

use std::path::{Path, PathBuf};

use clap::Args;
use dataloader::Tokenizer;
use memory_policy::Budgets;
use row_files::Template;
use toml::Value;

use crate::cli::flag_values::{self, Precision, assignment_text, typed_path};
use crate::cli::row_flags::{ColumnFlags, QuotingRule, TextFlags};
use crate::config::generation::{Generation, apply_model_defaults};
use crate::config::{Origin, Values, paths};
use crate::failure::{Failure, Outcome};
use crate::model::model_directory;
use crate::screen::report;

/// The scores of `--best-of`.
pub const BEST_OF: [&str; 8] =
    ["log-probability", "chrf", "chrf++", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact-match"];

/// Flags that say where weights lie.
#[derive(Args, Debug)]
pub struct WeightFlags {
    /// Memory limit of the whole process. With a small one weights stay in the model's files, and as many
    /// blocks as fit are in memory
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// GPU memory limit, where a GPU computes
    #[arg(long, value_name = "SIZE")]
    pub device_memory_budget: Option<String>,
    /// Directory for a file of weights that cannot be used as they are stored. It has no name and is gone at the end
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub offload_dir: PathBuf,
    /// Print the memory bill and stop
    #[arg(long)]
    pub dry_run: bool,
}

impl WeightFlags {
    /// Refuses a directory for weights that is not there, also if this model needs none.
    pub fn check_offload_dir(&self) -> Outcome<()> {
        if self.offload_dir.is_dir() {
            return Ok(());
        }
        let directory = self.offload_dir.display();
        Err(Failure::usage(format!("`--offload-dir`: {directory}: no such directory"))
            .hint(format!("make it first, `mkdir -p {directory}`, or leave the flag out")))
    }

    /// The budgets of these flags.
    pub fn budgets(&self) -> Outcome<Budgets> {
        flag_values::budgets(self.memory_budget.as_deref(), self.device_memory_budget.as_deref())
    }
}

/// Flags of `chat` and `serve`: the models that answer, and where they compute.
#[derive(Args, Debug)]
pub struct ModelsFlags {
    /// Model: a Hugging Face directory, a run, an adapter, or a hub id in the local cache
    #[arg(value_name = "MODEL", required_unless_present = "model")]
    pub named: Option<PathBuf>,
    /// The model by a flag
    #[arg(long, value_name = "DIR", conflicts_with = "named")]
    pub model: Option<PathBuf>,
    /// Adapter beside the model, which answers by this name (repeatable)
    #[arg(long, value_name = "NAME=DIR")]
    pub adapter: Vec<String>,
    /// Where weights lie
    #[command(flatten)]
    pub weights: WeightFlags,
    /// Longest prompt in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_source_tokens: usize,
    /// Precision of activations. Weights keep the precision in which they are stored
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// How answers are made where nothing else is asked for
    #[command(flatten)]
    pub decoding: DecodingFlags,
}

/// How answers are made: the likeliest token each time, unless a flag says otherwise. Each is a key `generation.*`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Decoding")]
pub struct DecodingFlags {
    /// Beams for each prompt (1: no beam search)
    #[arg(long, value_name = "N")]
    pub num_beams: Option<String>,
    /// Beam search: divide an answer's log-probability by its length to this power
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub length_penalty: Option<String>,
    /// Beam search: when to stop (false, true or never, as in transformers)
    #[arg(long, value_name = "WHEN")]
    pub early_stopping: Option<String>,
    /// Draw tokens at random; implied by --temperature, --top-k and --top-p
    #[arg(long, visible_alias = "do-sample", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub sample: Option<String>,
    /// Sampling: divide the logits by X (0: no sampling)
    #[arg(long, value_name = "X")]
    pub temperature: Option<String>,
    /// Sampling: keep only the N most probable tokens (0: all) [default: 50]
    #[arg(long, value_name = "N")]
    pub top_k: Option<String>,
    /// Sampling: keep the most probable tokens until their probabilities add up to X (1: all) [default: 1]
    #[arg(long, value_name = "X")]
    pub top_p: Option<String>,
    /// Sampling: random seed
    #[arg(long, value_name = "N")]
    pub seed: Option<String>,
    /// Make tokens that have already occurred less probable (1: off)
    #[arg(long, value_name = "X")]
    pub repetition_penalty: Option<String>,
    /// Never repeat a sequence of N tokens (0: off)
    #[arg(long, visible_alias = "no-repeat-ngram-size", value_name = "N")]
    pub no_repeat_ngram: Option<String>,
    /// Shortest answer in tokens
    #[arg(long, value_name = "N")]
    pub min_new_tokens: Option<String>,
    /// Keep special tokens such as <extra_id_0> in answers, and in the texts that scores compare
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub keep_special_tokens: Option<String>,
}

impl DecodingFlags {
    /// The model's own default keys, overridden by the flags, and the model's longest answer in tokens, if it has such a setting.
    pub fn over(&self, model: &t5::Config) -> Outcome<(Values, Option<usize>)> {
        let mut values = Values::defaults();
        let (settings, file) = model.answer_settings();
        let defaults = apply_model_defaults(&mut values, settings, file)?;
        if !defaults.ignored.is_empty() {
            report::warn(&format!(
                "{file} of the model sets {}, which this program does not have: answers may differ from transformers'",
                defaults.ignored.join(", ")
            ));
        }
        self.apply(&mut values)?;
        Ok((values, defaults.max_new_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX))))
    }

    /// The flags that change nothing beside the others, each with the reason.
    pub fn unused(&self, values: &Values) -> Vec<String> {
        let generation = Generation::from_values(values);
        let (has_beams, is_sampled) = (generation.num_beams > 1, generation.sampling.is_some());
        let of_beams = "it is for beam search: `--num-beams N`";
        let flags = [
            ("--length-penalty", &self.length_penalty, has_beams, of_beams),
            ("--early-stopping", &self.early_stopping, has_beams, of_beams),
            ("--seed", &self.seed, is_sampled, "answers are not sampled; `--sample` draws them"),
        ];
        let unused = flags.into_iter().filter(|(_, given, has_effect, _)| given.is_some() && !has_effect);
        unused.map(|(flag, .., why)| format!("`{flag}` has no effect: {why}")).collect()
    }

    /// The tokenizer of a model that answers. It keeps special tokens if the flags ask for it.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn tokenizer(&self, directory: &Path, model: &t5::Config, values: &Values) -> Outcome<Tokenizer> {
        let mut tokenizer = model_directory::tokenizer(directory)?;
        model_directory::check_size(model, &tokenizer)
            .map_err(|failure| failure.hint("fetch the tokenizer that the model was published with"))?;
        if let Err(contradiction) = model_directory::check_end(directory, model, &tokenizer) {
            report::warn(&contradiction.message);
        }
        model_directory::warn_of_ends(directory, model, &tokenizer);
        if Generation::from_values(values).keeps_special_tokens {
            tokenizer.keep_special_tokens(model.frame());
        }
        Ok(tokenizer)
    }

    /// Applies the flags to the keys.
    pub fn apply(&self, values: &mut Values) -> Outcome<()> {
        let flags = [
            ("num-beams", &self.num_beams),
            ("length-penalty", &self.length_penalty),
            ("early-stopping", &self.early_stopping),
            ("sample", &self.sample),
            ("temperature", &self.temperature),
            ("top-k", &self.top_k),
            ("top-p", &self.top_p),
            ("seed", &self.seed),
            ("repetition-penalty", &self.repetition_penalty),
            ("no-repeat-ngram", &self.no_repeat_ngram),
            ("min-new-tokens", &self.min_new_tokens),
            ("keep-special-tokens", &self.keep_special_tokens),
        ];
        for (flag, text) in flags.into_iter().filter_map(|(flag, text)| Some((flag, text.as_ref()?))) {
            let value = text.parse().unwrap_or_else(|_| Value::String(text.clone()));
            let key = format!("generation.{}", flag.replace('-', "_"));
            values.set(&key, value, Origin::Flag(format!("--{flag}")))?;
        }
        Ok(())
    }
}

/// Flags of `eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    /// Model: a Hugging Face directory, a run, or a hub id in the local cache
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Parquet, JSONL, JSON, CSV or TSV files, plain, .gz or .zst; directories or globs [default: the validation files of each task,
    /// if the model's run or the config has a mixture]
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = typed_path())]
    pub data: Vec<String>,
    /// Searches of an encoder
    #[command(flatten)]
    pub search: SearchFlags,
    /// Config file with the columns and token limits
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Columns
    #[command(flatten)]
    pub columns: ColumnFlags,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Evaluate the first N rows (0: all)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub samples: u64,
    /// Generate answers for the first N of them, to score them (0: all)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub generate_samples: u64,
    /// Scores of the answers, separated by commas: bleu, chrf, chrf++, rouge (or rouge1, rouge2, rougeL, rougeLsum),
    /// exact-match, accuracy, micro-f1, macro-f1, matthews, pearson, spearman, span-f1 [default: bleu,exact-match, or a classifier's]
    #[arg(long, value_name = "NAMES")]
    pub metrics: Vec<String>,
    /// Write prompt, reference, answer and scores of each row to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub predictions: Option<PathBuf>,
    /// Rows in a batch
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_samples: usize,
    /// Generated answers to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub show: usize,
    /// Show N wrong answers, instead of the first answers
    #[arg(long, value_name = "N")]
    pub show_wrong: Option<usize>,
    /// sacreBLEU's tokenizer: auto (by the language of the references), 13a, zh, char or none
    #[arg(long, value_name = "NAME")]
    pub bleu_tokenizer: Option<String>,
    /// Stem words for ROUGE
    #[arg(long)]
    pub rouge_stemmer: bool,
    /// Stop an answer after N tokens [default: the limit of targets]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<String>,
    /// Precision of activations [default: that of the config, or f32]. Weights keep the precision in which they are stored
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    /// Override a config key of `data`, `train`, `generation` or `memory` (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = assignment_text())]
    pub set: Vec<String>,
    /// Adapter beside the model: a directory that PEFT or a run wrote. Without it, `--model` may name an adapter or its run
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Where weights lie
    #[command(flatten)]
    pub weights: WeightFlags,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How answers are made
    #[command(flatten)]
    pub decoding: DecodingFlags,
}

/// Flags of `eval` for searches in a corpus.
#[derive(Args, Debug)]
pub struct SearchFlags {
    /// Texts that queries search, by the vectors of an encoder: rows with `_id`, `text` and perhaps `title`, as BEIR has them
    // Each flag by its name: completions cannot be written for a conflict with a group.
    #[arg(long, value_name = "FILE", requires_all = ["queries", "qrels"], conflicts_with_all = [
        "data", "config", "samples", "generate_samples", "metrics", "predictions", "show", "show_wrong", "bleu_tokenizer",
        "rouge_stemmer", "prompt_column", "response_column", "source_template", "target_template", "source_lang", "target_lang",
        "text_column", "max_new_tokens", "num_beams", "length_penalty", "early_stopping", "sample", "temperature", "top_k",
        "top_p", "seed", "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "keep_special_tokens",
    ])]
    pub corpus: Option<PathBuf>,
    /// Queries: rows with `_id` and `text`
    #[arg(long, value_name = "FILE", requires = "corpus")]
    pub queries: Option<PathBuf>,
    /// How relevant texts are for queries: lines of a query's name, a text's name and a number
    #[arg(long, value_name = "FILE", requires = "corpus")]
    pub qrels: Option<PathBuf>,
    /// Text before each query
    #[arg(long, value_name = "TEXT", default_value = "", requires = "corpus")]
    pub query_prefix: String,
    /// Text before each text of the corpus
    #[arg(long, value_name = "TEXT", default_value = "", requires = "corpus")]
    pub passage_prefix: String,
}

/// Flags of `generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// Prompts; without --model, the first word is the model
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// Model: a Hugging Face directory, a run, or a hub id in the local cache
    #[arg(long, value_name = "DIR", required_unless_present = "prompts")]
    pub model: Option<PathBuf>,
    /// Prompt (repeatable)
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["input", "prompts"])]
    pub prompt: Vec<String>,
    /// File with one prompt per line, or rows (.parquet, .jsonl, .json, .csv, .tsv); `-` reads lines from standard input
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Column of the prompts, where the input has rows [default: that of the model's run, or prompt]
    #[arg(long, value_name = "NAME")]
    pub prompt_column: Option<String>,
    /// Prompt from several columns, such as "{subject}\n{body}" [default: that of the model's run]
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_column")]
    pub source_template: Option<String>,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Stop an answer after N tokens [default: that of generation_config.json, or 256]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// End an answer with the token that completes this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Answers to each prompt, of beams or drawn
    #[arg(long, visible_alias = "answers", value_name = "N", default_value_t = 1)]
    pub num_return_sequences: usize,
    /// Write a row of JSON for each answer to this file: {"prompt":..,"response":..,"score":..}. The same command goes on
    /// with what a killed one has written
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with_all = ["json", "stream"])]
    pub output: Option<PathBuf>,
    /// With --output: keep the best answer to each prompt, by its score beside the row's response, or by log-probability
    #[arg(long, value_name = "SCORE", requires = "output", value_parser = clap::builder::PossibleValuesParser::new(BEST_OF))]
    pub best_of: Option<String>,
    /// Column of the rows' own responses, for --best-of [default: that of the model's run, or response]
    #[arg(long, value_name = "NAME", requires = "best_of")]
    pub response_column: Option<String>,
    /// Print an answer as it is made, one prompt at a time
    #[arg(long, conflicts_with_all = ["json", "num_beams", "num_return_sequences"])]
    pub stream: bool,
    /// Truncate prompts to N tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_source_tokens: usize,
    /// Prompts in a batch
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_samples: usize,
    /// Precision of activations. Weights keep the precision in which they are stored
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Adapter beside the model: a directory that PEFT or a run wrote. Without it, `--model` may name an adapter or its run
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Where weights lie
    #[command(flatten)]
    pub weights: WeightFlags,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Print one JSON object per line: {"prompt":..,"response":..}, with scores and further answers where there are any
    #[arg(long)]
    pub json: bool,
    /// With --json: the mean log-probability of an answer's tokens, also where no beam search found it
    #[arg(long, requires = "json")]
    pub scores: bool,
    /// How answers are made
    #[command(flatten)]
    pub decoding: DecodingFlags,
}

impl GenerateArgs {
    /// How the flags make prompts of rows.
    ///
    /// # Errors
    /// A template that cannot be read.
    pub fn source(&self) -> Outcome<Option<Template>> {
        let column = || self.prompt_column.as_deref().map(Template::of_column);
        let parse = |text: &String| {
            let failed = |reason| Failure::usage(format!("`--source-template`: {reason}"));
            Template::parse(text).map_err(failed)
        };
        Ok(self.source_template.as_ref().map(parse).transpose()?.or_else(column))
    }

    /// The same flags with a model: `generate RUN TEXT` names it first, as `chat RUN` does.
    ///
    /// # Errors
    /// No prompt is left, or a flag is for a file that is not named.
    pub fn with_model(mut self) -> Outcome<Self> {
        let of_input = [
            ("--prompt-column", self.prompt_column.is_some()),
            ("--source-template", self.source_template.is_some()),
            ("--encoding", self.text.encoding.is_some()),
            ("--quoting", self.text.quoting != QuotingRule::Auto),
        ];
        if let Some((flag, _)) = of_input.into_iter().find(|(_, given)| *given && self.input.is_none()) {
            return Err(Failure::usage(format!("`{flag}` is for rows of a file, and no file is named"))
                .hint("name it with `--input FILE`, or leave the flag out"));
        }
        if self.model.is_none() && !self.prompts.is_empty() {
            let model = self.prompts.remove(0);
            if self.prompts.is_empty() && self.prompt.is_empty() && self.input.is_none() {
                return Err(Failure::usage(format!("`generate {model}`: expected a model and a prompt"))
                    .hint("use `train_low_mem generate --model DIR --prompt TEXT`"));
            }
            self.model = Some(paths::from_text(&model));
        }
        Ok(self)
    }
}
