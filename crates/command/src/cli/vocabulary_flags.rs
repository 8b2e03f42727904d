//! The flags of `trim-vocab` and `add-tokens`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::export_flags::ResultFlags;
use crate::cli::flag_values::typed_path;
use crate::cli::row_flags::{ColumnFlags, TextFlags};

/// Flags of `trim-vocab`.
#[derive(Args, Debug)]
pub struct TrimVocabArgs {
    /// The model: a directory, a run or a model of the hub
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// Rows whose tokens stay: parquet, JSONL, JSON, CSV or TSV files, directories or globs (repeatable)
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "keep_scripts", value_parser = typed_path())]
    pub keep_used: Vec<String>,
    /// Scripts whose entries stay, such as Latin,Han, with digits and punctuation
    #[arg(long, value_name = "SCRIPT", value_delimiter = ',', num_args = 1..)]
    pub keep_scripts: Vec<String>,
    /// Keep at most N entries in all: the most used ones of those that the rows use, then those of the scripts in their order
    #[arg(long, value_name = "N")]
    pub keep_top: Option<usize>,
    /// Columns
    #[command(flatten)]
    pub columns: ColumnFlags,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Memory limit of the process while rows are read; a row that does not fit is an error
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Put this text before every source, as `data.source_prefix` does [default: the model's own]
    #[arg(long, value_name = "TEXT")]
    pub source_prefix: Option<String>,
    /// Directory of the trimmed model
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// The result
    #[command(flatten)]
    pub result: ResultFlags,
}

/// Flags of `add-tokens`.
#[derive(Args, Debug)]
pub struct AddTokensArgs {
    /// The model: a directory, a run or a model of the hub
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// Tokens, or files with one on each line; \n, \t, \r and \\ stand for characters
    #[arg(long, value_name = "FILE|TOKEN", num_args = 1.., required_unless_present = "missing_in")]
    pub tokens: Vec<String>,
    /// Rows: every character of them that the tokenizer loses becomes a token (repeatable)
    #[arg(long, value_name = "FILE", num_args = 1.., value_parser = typed_path())]
    pub missing_in: Vec<String>,
    /// Columns
    #[command(flatten)]
    pub columns: ColumnFlags,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Memory limit of the process while rows are read; a row that does not fit is an error
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Directory of the new model
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// The result
    #[command(flatten)]
    pub result: ResultFlags,
}
