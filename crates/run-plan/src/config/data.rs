//! `data.*`: the files, the columns of their texts, and the lengths of texts.

use std::path::{Path, PathBuf};

use trainer::contrastive::ContrastiveLoss;
use trainer::preference::PreferenceLoss;

use super::task::Task;
use super::{Values, paths, required, size, task_of};

/// `data.*`
#[derive(Clone, Debug)]
pub struct Data {
    /// Files and globs.
    pub train: Vec<String>,
    /// Files and globs; may be empty.
    pub validation: Vec<String>,
    /// Tasks that are mixed; `train` and `validation` are then the files of all of them.
    pub tasks: Tasks,
    /// Rows of `train` for validation: a share if below 1, otherwise a count.
    pub validation_split: Option<f64>,
    /// The columns that the config names.
    pub chosen: Columns,
    /// The encoding of text files by its name; `None`: UTF-8.
    pub encoding: Option<String>,
    /// Whether quotes enclose fields of CSV and TSV; `None`: only of CSV.
    pub has_quotes: Option<bool>,
    /// Treatment of unusable rows.
    pub bad_rows: BadRows,
    /// The prefix of every prompt; `None`: the model's own.
    pub source_prefix: Option<String>,
    /// The tokenizer's file; `None`: the one beside the model.
    pub tokenizer: Option<PathBuf>,
    /// The training task; `None`: determined from the files.
    pub objective: Option<Objective>,
    /// The denoisers of pretraining; none: span corruption with the two numbers below.
    pub denoisers: Vec<Denoiser>,
    /// Share of tokens that span corruption masks.
    pub noise_density: f64,
    /// Mean length of a masked span in tokens.
    pub mean_span_tokens: f64,
    /// EOS included.
    pub max_source_tokens: usize,
    /// EOS included.
    pub max_target_tokens: usize,
    /// `right` or `left`; `None`: the model's own.
    pub truncation_side: Option<String>,
    /// Shuffle whole files, or keep their order.
    pub shuffle: bool,
    /// Rows of a block, which shuffling moves together.
    pub block_rows: u64,
    /// Blocks shuffled among each other.
    pub window_blocks: u64,
}

impl Data {
    /// Whether rows for validation are named.
    pub fn has_validation(&self) -> bool {
        !self.validation.is_empty() || self.validation_split.is_some()
    }

    /// Whether there may be rows for validation: a directory or a glob of `train` may have some.
    pub fn may_have_validation(&self) -> bool {
        let is_file = |path: &String| !path.contains('*') && Path::new(path).extension().is_some();
        self.has_validation() || !self.train.iter().all(is_file)
    }
}

/// What the config says about columns; `None`: determined from the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Column of the prompts.
    pub prompt: Option<String>,
    /// Column of the responses.
    pub response: Option<String>,
    /// Column of the texts for span corruption.
    pub text: Option<String>,
    /// Template of the sources.
    pub source: Option<String>,
    /// Template of the targets.
    pub target: Option<String>,
    /// Language of the sources of a translation.
    pub source_lang: Option<String>,
    /// Language of its targets.
    pub target_lang: Option<String>,
    /// Whether each row has a single text rather than a pair.
    pub is_text: bool,
    /// Columns of chosen and rejected answers, if the loss is one of preferences. Of vectors, the second is that of the negative texts.
    pub preference: Option<[Option<String>; 2]>,
    /// Whether rows have one answer and a label.
    pub has_labels: bool,
    /// Column of the labels.
    pub label: Option<String>,
    /// The most texts of a list, if texts are ranked.
    pub ranked: Option<usize>,
    /// Column that says which rows are a list.
    pub query: Option<String>,
}

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct DataTask {
    /// Its name, which no other task has.
    pub name: String,
    /// Files and globs.
    pub train: Vec<String>,
    /// Files and globs; may be empty.
    pub validation: Vec<String>,
    /// The text before each source; `None`: that of `data.source_prefix`, or the model's own.
    pub source_prefix: Option<String>,
    /// A factor on its rate.
    pub weight: f64,
    /// The columns that it names; the others are those of `data`.
    pub columns: Columns,
}

/// A denoiser.
#[derive(Clone, Debug, PartialEq)]
pub struct Denoiser {
    /// What it does with a text.
    pub noise: Noise,
    /// The text before each source; may be empty.
    pub prefix: String,
    /// How often it is drawn, beside the others' weights.
    pub weight: f64,
}

/// How a source and a target are made of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Noise {
    /// Spans of this mean length are cut out, with this share of the tokens.
    SpanCorruption {
        /// The share of the tokens.
        noise_density: f64,
        /// The mean length.
        mean_span_tokens: f64,
    },
    /// The target continues the source. `None`: from any place.
    PrefixLm {
        /// The share of the text that is the target.
        noise_density: Option<f64>,
    },
}

/// How many samples tasks give, beside each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixing {
    /// As many as they have rows.
    Proportional,
    /// All the same.
    Equal,
    /// Their rows to the power of one over this temperature.
    Temperature(f64),
}

/// The tasks and their mixing; none: the rows of `data.train` are one task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tasks {
    /// The tasks in their order.
    pub tasks: Vec<DataTask>,
    /// The rates.
    pub mixing: Option<Mixing>,
    /// The most rows of a task that count for its rate.
    pub limit: Option<u64>,
}

/// Treatment of unusable rows in text files: malformed rows, and rows without text in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadRows {
    /// Malformed rows are an error; rows without text are skipped.
    Usual,
    /// Both are an error.
    Error,
    /// Both are skipped.
    Skip,
}

/// The training task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Prompt in, response out.
    TextToText,
    /// A text that is corrupted, and restored.
    Denoising,
}

impl Data {
    /// The settings in these values.
    pub fn from_values(values: &Values) -> Self {
        let objective = values.text("data.objective").map(|name| match name.as_str() {
            "text-to-text" => Objective::TextToText,
            _ => Objective::Denoising,
        });
        // With denoisers, the task need not be named.
        let objective = objective.or((!values.tables("data.denoisers").is_empty()).then_some(Objective::Denoising));
        let [prompt, text] = ["data.prompt_column", "data.text_column"].map(|key| values.text(key));
        let response = values.text("data.response_column");
        // With a response, the text is its prompt: `--text_column article --summary_column highlights` of transformers' scripts.
        let (prompt, text) = match (objective, &response) {
            (Some(Objective::Denoising), _) | (_, None) => (prompt, text),
            _ => (prompt.or(text), None),
        };
        let preference = values.text("preference.loss").and_then(|name| PreferenceLoss::named(&name));
        Self {
            train: values.list("data.train").unwrap_or_default(),
            validation: values.list("data.validation").unwrap_or_default(),
            tasks: Tasks::default(),
            validation_split: values.number("data.validation_split").filter(|rows| *rows > 0.0),
            chosen: Columns {
                prompt,
                response,
                text,
                source: values.text("data.source_template"),
                target: values.text("data.target_template"),
                source_lang: values.text("data.source_lang"),
                target_lang: values.text("data.target_lang"),
                is_text: objective == Some(Objective::Denoising),
                has_labels: preference.is_some_and(PreferenceLoss::has_labels) || has_scores(values),
                label: values.text("data.label_column"),
                query: values.text("data.query_column"),
                ranked: (task_of(values) == Some(Task::Ranking)).then(|| size(values, "ranking.list_size")),
                preference: match (task_of(values), preference.filter(|loss| !loss.has_labels())) {
                    (Some(Task::Embedding), _) => {
                        values.text("data.negative_column").map(|negative| [None, Some(negative)])
                    }
                    (_, loss) => {
                        loss.map(|_| ["data.chosen_column", "data.rejected_column"].map(|key| values.text(key)))
                    }
                },
            },
            encoding: values.text("data.encoding"),
            has_quotes: values.text("data.quoting").map(|quoting| quoting == "all"),
            bad_rows: match values.text("data.bad_rows").as_deref() {
                Some("error") => BadRows::Error,
                Some("skip") => BadRows::Skip,
                _ => BadRows::Usual,
            },
            source_prefix: values.text("data.source_prefix"),
            tokenizer: values.text("data.tokenizer").as_deref().map(paths::from_text),
            objective,
            denoisers: Vec::new(),
            noise_density: values.required_number("data.noise_density"),
            mean_span_tokens: values.required_number("data.mean_span_tokens"),
            max_source_tokens: size(values, "data.max_source_tokens"),
            max_target_tokens: size(values, "data.max_target_tokens"),
            truncation_side: values.text("data.truncation_side"),
            shuffle: values.switch("data.shuffle"),
            block_rows: required(values, "data.block_rows"),
            window_blocks: required(values, "data.window_blocks"),
        }
    }
}

/// Whether rows of embeddings have a score beside both texts.
fn has_scores(values: &Values) -> bool {
    let loss = values.text("embedding.loss").and_then(|name| ContrastiveLoss::named(&name));
    task_of(values) == Some(Task::Embedding) && loss.is_some_and(ContrastiveLoss::has_scores)
}
