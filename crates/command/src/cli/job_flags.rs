//! Flags of `jobs`.

use clap::{Args, Subcommand};

use crate::cli::flag_values::typed_path;

/// Flags of `jobs`.
#[derive(Args, Clone, Debug)]
pub struct JobsArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Option<JobsCommand>,
}

/// A run that is added to a list.
#[derive(Args, Clone, Debug)]
pub struct AddArgs {
    /// The list (TOML); made where there is none
    #[arg(value_name = "FILE", value_parser = typed_path())]
    pub file: String,
    /// Output directory of the run
    #[arg(long, value_name = "DIR", value_parser = typed_path())]
    pub output: String,
    /// Config file of the run
    #[arg(long, value_name = "FILE", value_parser = typed_path())]
    pub config: Option<String>,
    /// A setting of the run (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Values of a key, as TOML: a run for each (repeatable)
    #[arg(long, value_name = "KEY=[VALUE, ..]")]
    pub sweep: Vec<String>,
    /// Runs of higher priority start first
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub priority: i64,
    /// More flags of `train`
    #[arg(last = true, value_name = "FLAGS")]
    pub flags: Vec<String>,
}

/// The actions of `jobs` other than listing runs.
#[derive(Subcommand, Clone, Debug)]
pub enum JobsCommand {
    /// Add a run to a list; a `jobs run` in progress starts it
    Add(AddArgs),
    /// Train the runs of a list, each as soon as its memory is free
    Run {
        /// The list (TOML); see docs/runs.md
        #[arg(value_name = "FILE", value_parser = typed_path())]
        file: String,
    },
}
