//! Flags of the commands that show runs: `report` and `watch`.

use std::path::PathBuf;

use clap::Args;

/// Flags of `report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Output directories of runs, at most 12; several are shown side by side
    #[arg(value_name = "RUN", required = true, num_args = 1..)]
    pub runs: Vec<PathBuf>,
    /// The page [default: report.html in the run's directory for one run, else in the current directory]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Flags of `watch`.
#[derive(Args, Debug)]
pub struct WatchArgs {
    /// Output directory of the run, which need not have started
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
}
