//! The flags of `embed`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::answer_flags::WeightFlags;
use crate::cli::flag_values::Precision;
use crate::cli::row_flags::TextFlags;

/// Flags of `embed`.
#[derive(Args, Debug)]
pub struct EmbedArgs {
    /// Model: a directory of an encoder or of a whole T5, a run, or a hub id in the local cache
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Adapter (PEFT format), or the run that made it; the part beside the encoder is read
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// File with one text per line, rows (.parquet, .jsonl, .json, .csv, .tsv) or sequences (.fasta, .fa, .faa); `-` reads lines from standard
    /// input
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Column of the texts, where the input has rows
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_column: String,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Text before each text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub source_prefix: String,
    /// How the vectors of a text's tokens become one [default: the model's own (modules.json), or mean]
    #[arg(long, value_enum)]
    pub pooling: Option<Pooling>,
    /// Divide each vector by its length, even if the model's modules.json does not say so
    #[arg(long)]
    pub normalize: bool,
    /// File of the vectors, in the order of the texts: .npy, .parquet or .jsonl
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
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
    /// Print one JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// `--pooling`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pooling {
    /// Their mean
    Mean,
    /// The first token's
    Cls,
    /// The largest of each value
    Max,
    /// The last token's
    Last,
}

impl From<Pooling> for t5::Pooling {
    fn from(pooling: Pooling) -> Self {
        match pooling {
            Pooling::Mean => t5::Pooling::Mean,
            Pooling::Cls => t5::Pooling::Cls,
            Pooling::Max => t5::Pooling::Max,
            Pooling::Last => t5::Pooling::Last,
        }
    }
}
