//! Flags of the commands that show runs and machines: `report`, `watch` and `doctor`.

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

/// Flags of `doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Directory whose disk is looked at: that of a run
    #[arg(long, short, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
    /// Leave out the disk's rate, which writes and reads 64 MiB
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
