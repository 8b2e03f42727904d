//! The flags of `chat`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::answer_flags::ModelsFlags;

/// Flags of `chat`.
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// The models
    #[command(flatten)]
    pub models: ModelsFlags,
    /// Longest answer in tokens, which `/set max_new_tokens` cannot exceed [default: that of generation_config.json, or 256]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Most beams
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub max_beams: usize,
    /// File that keeps the lines that were typed [default: they are forgotten]
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
}
