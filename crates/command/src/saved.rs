//! The binary's part of a checkpoint: position in the data, identity of the run, and the facts that decided its bits.

use dataloader::Position;
use planner::Plan;
use serde_json::Value;
use trainer::checkpoint::Found;

use crate::best::Stalled;
use crate::bits::Kernels;
use crate::failure::{Failure, Outcome};

/// Numbers that a checkpoint keeps for the report at the end.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct History {
    /// The evaluation before the first step.
    pub first_evaluation: Option<Value>,
    /// The newest evaluation.
    pub last_evaluation: Option<Value>,
    /// Rows left out so far.
    pub bad_rows: u64,
    /// Rows used and left out so far.
    #[serde(default)]
    pub read_rows: u64,
    /// Sources and targets that were cut at their most tokens so far.
    #[serde(default)]
    pub cut: (u64, u64),
    /// Whether the share of rows left out was warned of.
    #[serde(default)]
    pub warned_of_bad_rows: bool,
    /// The first of them.
    pub first_bad_row: Option<String>,
    /// A source of the validation rows, for trying the model.
    pub example_prompt: Option<String>,
    /// Evaluations without a better one.
    #[serde(default)]
    pub stalled: Stalled,
    /// Steps skipped because loss or gradient was not finite.
    pub skipped_steps: u64,
}

/// The binary's part of a checkpoint.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Saved {
    /// Where in the data the next step begins.
    pub position: Position,
    /// Identity of the run, which a resume compares; see [`crate::identity`].
    pub identity: Value,
    /// Numbers for the report at the end.
    pub history: History,
    /// The plan of the last step: going on keeps how a batch was cut where memory allows it.
    pub plan: Plan,
    /// The kernels: with the plan they decide every bit. Checkpoints before 2026-11-23 lack them.
    #[serde(default)]
    pub kernels: Option<Kernels>,
    /// The text of `resolved.toml`.
    pub config: String,
}

/// This program's part of a checkpoint.
pub fn saved_state(found: &Found) -> Outcome<Saved> {
    serde_json::from_value(found.state.caller.clone()).map_err(|error| {
        Failure::unusable(format!("{}: trainer_state.json: {error}", found.path.display())).hint(
            "this program did not write the checkpoint; start a new run with `--set model.init_from=` its directory",
        )
    })
}
