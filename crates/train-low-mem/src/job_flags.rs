//! Flags of `jobs`.

use clap::{Args, Subcommand};

use crate::flag_values::typed_path;

/// Flags of `jobs`.
#[derive(Args, Clone, Debug)]
pub struct JobsArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Option<JobsCommand>,
}

/// What `jobs` does beside listing them.
#[derive(Subcommand, Clone, Debug)]
pub enum JobsCommand {
    /// Train the runs of a list, each as soon as its memory is free
    Run {
        /// The list (TOML); see docs/jobs.md
        #[arg(value_name = "FILE", value_parser = typed_path())]
        file: String,
    },
}
