//! Flags of the commands that show runs and machines: `report`, `watch`, `doctor` and `proof`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use crate::cli::serve_flags::address;

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
    /// Ask only whether a server at this address takes requests, as a container's health check does
    #[arg(long, value_name = "ADDRESS", value_parser = address, conflicts_with_all = ["output", "quick"])]
    pub server: Option<SocketAddr>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Flags of `proof`.
#[derive(Args, Debug)]
pub struct ProofArgs {
    /// New or empty directory for the page, proof.md, and the runs
    #[arg(long, short, value_name = "DIR", default_value = "proof")]
    pub output: PathBuf,
    /// Steps of each run; losses are compared at each of them
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=10_000))]
    pub steps: u64,
    /// Seed of the moment of the kill [default: random, and shown]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Also train with PyTorch and transformers, one after the other, and compare losses, memory and time
    #[arg(long)]
    pub torch: bool,
    /// The Python that has PyTorch and transformers
    #[arg(long, value_name = "PROGRAM", default_value = "python3", requires = "torch")]
    pub python: PathBuf,
    /// Another build of this program, which is tried instead
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}
