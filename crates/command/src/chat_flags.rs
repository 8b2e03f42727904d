//! The flags of `chat`.

use std::path::PathBuf;

use clap::Args;

use crate::answer_flags::DecodingFlags;
use crate::flag_values::Precision;

/// Flags of `chat`.
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// Model: a Hugging Face directory, a run, an adapter, or a hub id in the local cache
    #[arg(value_name = "MODEL", required_unless_present = "model")]
    pub named: Option<PathBuf>,
    /// The model by a flag
    #[arg(long, value_name = "DIR", conflicts_with = "named")]
    pub model: Option<PathBuf>,
    /// Adapter beside the model, to talk to or to compare (repeatable)
    #[arg(long, value_name = "NAME=DIR")]
    pub adapter: Vec<String>,
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
    /// Refuse prompts of more than N tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_source_tokens: usize,
    /// Longest answer in tokens, which `/set max_new_tokens` cannot exceed [default: that of generation_config.json, or 256]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Most beams
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub max_beams: usize,
    /// File that keeps the lines that were typed [default: they are forgotten]
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Precision of activations. Weights keep the precision in which they are stored
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Device: cpu, cuda, cuda:N or metal; auto is the faster one of the CPU and a card
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// How answers are made until `/set` changes it
    #[command(flatten)]
    pub decoding: DecodingFlags,
}
