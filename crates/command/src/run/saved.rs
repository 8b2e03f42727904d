//! The command's part of a checkpoint: position in the data, identity of the run, and the facts that determine its bits.

use dataloader::Position;
use planner::Plan;
use serde_json::Value;
use trainer::checkpoint::Found;

use crate::failure::{Failure, Outcome};
use crate::run::bits::Kernels;
use crate::scores::best::EarlyStoppingState;

/// Numbers that a checkpoint keeps for the report at the end.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct History {
    /// The evaluation before the first step.
    pub first_evaluation: Option<Value>,
    /// The newest evaluation.
    pub last_evaluation: Option<Value>,
    /// The evaluation of the checkpoint that became the model of a finished run.
    #[serde(default)]
    pub kept_evaluation: Option<Value>,
    /// Rows skipped so far.
    pub bad_rows: u64,
    /// Rows used and skipped so far.
    #[serde(default)]
    pub read_rows: u64,
    /// Sources and targets that were cut so far.
    #[serde(default)]
    pub cut: (u64, u64),
    /// Sources and targets so far with characters that the tokenizer loses.
    #[serde(default)]
    pub lossy: [u64; 2],
    /// Whether the run has warned of the share of skipped rows.
    #[serde(default)]
    pub warned_of_bad_rows: bool,
    /// The first skipped row.
    pub first_bad_row: Option<String>,
    /// A source of the validation rows, as an example prompt.
    pub example_prompt: Option<String>,
    /// Evaluations without an improvement.
    #[serde(default)]
    pub stalled: EarlyStoppingState,
    /// Steps skipped because loss or gradient was not finite.
    pub skipped_steps: u64,
}

/// The command's part of a checkpoint.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Saved {
    /// The position in the data where the next step begins.
    pub position: Position,
    /// Identity of the run, which a resume compares; see [`crate::run::identity`].
    pub identity: Value,
    /// Numbers for the report at the end.
    pub history: History,
    /// The plan of the last step. A resumed run keeps the cut of a batch if memory allows it.
    pub plan: Plan,
    /// The kernels. Together with the plan they determine every bit. Checkpoints before 2026-11-23 lack them.
    #[serde(default)]
    pub kernels: Option<Kernels>,
    /// The text of `resolved.toml`.
    pub config: String,
}

/// The command's part of a checkpoint.
pub fn saved_state(found: &Found) -> Outcome<Saved> {
    serde_json::from_value(found.state.caller.clone()).map_err(|error| {
        Failure::unusable(format!("{}: trainer_state.json: {error}", found.path.display()))
            .hint("this program did not write the checkpoint; start a new run with its directory: `--model DIR`")
    })
}
