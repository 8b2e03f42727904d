//! `data.*`: the files, where their texts are, and how long they may be.

use std::path::PathBuf;

use row_files::{Chosen, Share};

use super::{Values, number, paths, required, size};

/// `data.*`
#[derive(Clone, Debug)]
pub struct Data {
    /// Files and globs.
    pub train: Vec<String>,
    /// Files and globs; may be empty.
    pub validation: Vec<String>,
    /// Rows of `train` for validation.
    pub validation_split: Option<Share>,
    /// The columns that were named.
    pub chosen: Chosen,
    /// Whether the objective was named.
    pub objective_is_chosen: bool,
    /// Treatment of rows of text files that cannot be used.
    pub bad_rows: row_files::BadRows,
    /// Rows of `train` where only some of them were looked at, to plan.
    pub estimated_rows: Option<u64>,
    /// Source column of `text-to-text`.
    pub prompt_column: String,
    /// Target column of `text-to-text`.
    pub response_column: String,
    /// The column of `span-corruption`.
    pub text_column: String,
    /// Before every prompt; `None`: as the model has it.
    pub source_prefix: Option<String>,
    /// `None`: beside the model.
    pub tokenizer: Option<PathBuf>,
    /// The training task.
    pub objective: Objective,
    /// EOS included.
    pub max_source_tokens: usize,
    /// EOS included.
    pub max_target_tokens: usize,
    /// Shuffle whole files, or keep their order.
    pub shuffle: bool,
    /// Rows that move together.
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
    /// What the values mean.
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
            validation_split: values.number("data.validation_split").and_then(share),
            chosen: Chosen {
                prompt: values.text("data.prompt_column"),
                response: values.text("data.response_column"),
                text: values.text("data.text_column"),
                is_text: objective != Objective::TextToText,
            },
            objective_is_chosen: values.text("data.objective").is_some(),
            bad_rows: match values.text("data.bad_rows").as_deref() {
                Some("error") => row_files::BadRows::Error,
                Some("skip") => row_files::BadRows::Skip,
                _ => row_files::BadRows::Usual,
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

/// `data.validation_split`: below 1 a share, otherwise a count; 0 is none.
fn share(number: f64) -> Option<Share> {
    #[expect(clippy::cast_sign_loss, reason = "the table of keys has its range")]
    match number {
        0.0 => None,
        share if share < 1.0 => Some(Share::Of(share)),
        rows => Some(Share::Rows(rows as u64)),
    }
}
