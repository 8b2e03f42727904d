//! The flags of `score`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::answer_flags::WeightFlags;
use crate::cli::flag_values::Precision;
use crate::cli::row_flags::TextFlags;

/// Flags of `score`.
#[derive(Args, Debug)]
pub struct ScoreArgs {
    /// Model: a directory, a run, or a hub id in the local cache: one that answers with a word, such as monoT5, or one of task.name=regression
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Adapter beside the model: a directory that PEFT or a run wrote. Without it, `--model` may name an adapter or its run
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// File of rows, each with a query and a text (.parquet, .jsonl, .json, .csv, .tsv)
    #[arg(long, value_name = "FILE")]
    pub pairs: PathBuf,
    /// Text that the model reads, with columns of the file in braces [default: that of the model's run, or `Query: {query} Document: {text}
    /// Relevant:`]
    #[arg(long, value_name = "TEXT")]
    pub template: Option<String>,
    /// Answer whose probability is the score, and the answer that it is compared with, each one token; or one token whose logit is the
    /// score, as RankT5 has it [default: those of the model's run, or true,false]
    #[arg(long, value_name = "YES,NO", value_delimiter = ',', num_args = 1)]
    pub answers: Vec<String>,
    /// Column of how relevant a text is, 0 for not at all: MRR@10 and NDCG@10 are then printed
    #[arg(long, value_name = "NAME", requires = "query_column")]
    pub label_column: Option<String>,
    /// Column that is equal in the rows of one query, which follow each other
    #[arg(long, value_name = "NAME", requires = "label_column")]
    pub query_column: Option<String>,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// File of the scores, one JSON object per row (.jsonl) [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Truncate texts to N tokens, EOS included
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_source_tokens: usize,
    /// Texts of full length in a batch. Of shorter texts, a batch has more
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_samples: usize,
    /// Precision of activations. Weights keep the precision in which they are stored
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Where weights lie
    #[command(flatten)]
    pub weights: WeightFlags,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Print one JSON object at the end; needs `--output`
    #[arg(long, requires = "output")]
    pub json: bool,
}
