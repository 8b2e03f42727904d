//! `data.*`: the files, the columns of their texts, and the lengths of texts.

use std::path::PathBuf;

use super::{Values, number, paths, required, size};

/// `data.*`
#[derive(Clone, Debug)]
pub struct Data {
    /// Files and globs.
    pub train: Vec<String>,
    /// Files and globs; may be empty.
    pub validation: Vec<String>,
    /// Rows of `train` for validation: a share if below 1, otherwise a count.
    pub validation_split: Option<f64>,
    /// The columns that the config names.
    pub chosen: Columns,
    /// Whether the config names the objective.
    pub objective_is_chosen: bool,
    /// Treatment of unusable rows in text files.
    pub bad_rows: BadRows,
    /// Estimated rows of `train`, if planning has sampled only some of them.
    pub estimated_rows: Option<u64>,
    /// Source column of `text-to-text`.
    pub prompt_column: String,
    /// Target column of `text-to-text`.
    pub response_column: String,
    /// The column of `span-corruption`.
    pub text_column: String,
    /// The prefix of every prompt; `None`: the model's own.
    pub source_prefix: Option<String>,
    /// The tokenizer's file; `None`: the one beside the model.
    pub tokenizer: Option<PathBuf>,
    /// The training task.
    pub objective: Objective,
    /// EOS included.
    pub max_source_tokens: usize,
    /// EOS included.
    pub max_target_tokens: usize,
    /// Shuffle whole files, or keep their order.
    pub shuffle: bool,
    /// Rows of a block, which shuffling moves together.
    pub block_rows: u64,
    /// Blocks shuffled among each other.
    pub window_blocks: u64,
    /// Skip and count bad rows, or stop.
    pub skip_bad_rows: bool,
}

impl Data {
    /// Whether there are rows for validation.
    pub fn has_validation(&self) -> bool {
        !self.validation.is_empty() || self.validation_split.is_some()
    }
}

/// Names of columns; `None`: determined from the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Column of the prompts.
    pub prompt: Option<String>,
    /// Column of the responses.
    pub response: Option<String>,
    /// Column of the texts for span corruption.
    pub text: Option<String>,
    /// Whether each row has a single text rather than a pair.
    pub is_text: bool,
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Prompt in, response out.
    TextToText,
    /// The T5 paper's denoising.
    SpanCorruption {
        /// Share of tokens that is masked.
        noise_density: f64,
        /// Mean length of a masked span in tokens.
        mean_span_tokens: f64,
    },
}

impl Data {
    /// The settings in these values.
    pub fn of(values: &Values) -> Self {
        let objective = match values.text("data.objective").as_deref() {
            Some("span-corruption") => Objective::SpanCorruption {
                noise_density: number(values, "data.noise_density"),
                mean_span_tokens: number(values, "data.mean_span_tokens"),
            },
            _ => Objective::TextToText,
        };
        Self {
            train: values.list("data.train").unwrap_or_default(),
            validation: values.list("data.validation").unwrap_or_default(),
            validation_split: values.number("data.validation_split").filter(|rows| *rows > 0.0),
            chosen: Columns {
                prompt: values.text("data.prompt_column"),
                response: values.text("data.response_column"),
                text: values.text("data.text_column"),
                is_text: objective != Objective::TextToText,
            },
            objective_is_chosen: values.text("data.objective").is_some(),
            bad_rows: match values.text("data.bad_rows").as_deref() {
                Some("error") => BadRows::Error,
                Some("skip") => BadRows::Skip,
                _ => BadRows::Usual,
            },
            estimated_rows: None,
            prompt_column: values.text("data.prompt_column").unwrap_or_else(|| "prompt".to_string()),
            response_column: values.text("data.response_column").unwrap_or_else(|| "response".to_string()),
            text_column: values.text("data.text_column").unwrap_or_else(|| "text".to_string()),
            source_prefix: values.text("data.source_prefix"),
            tokenizer: values.text("data.tokenizer").as_deref().map(paths::from_text),
            objective,
            max_source_tokens: size(values, "data.max_source_tokens"),
            max_target_tokens: size(values, "data.max_target_tokens"),
            shuffle: values.switch("data.shuffle"),
            block_rows: required(values, "data.block_rows"),
            window_blocks: required(values, "data.window_blocks"),
            skip_bad_rows: values.text("data.bad_rows").as_deref() != Some("error"),
        }
    }
}
