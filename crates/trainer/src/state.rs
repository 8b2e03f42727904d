//! The part of a trainer that a checkpoint holds beside tensors.

use serde::{Deserialize, Serialize};

use crate::options::TrainerOptions;
use crate::stats::Score;

/// The part of a checkpoint that is not tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    pub(crate) format: u32,
    /// Batches stepped so far.
    pub step: u64,
    /// Updates made so far: steps less the skipped and the empty ones.
    pub updates: u64,
    /// Non-finite steps since the last finite one.
    pub non_finite_in_a_row: u32,
    /// The score of these parameters, if they were scored; larger is better.
    pub score: Option<f64>,
    /// The best score of the run so far.
    pub best_score: Option<Score>,
    /// The measure of the scores. Scores of different measures are not compared.
    #[serde(default = "loss")]
    pub scored_by: String,
    /// Seed, schedule, optimizer and the rest of the trainer's options.
    pub options: TrainerOptions,
    /// The caller's state: its configuration, position in the data, fingerprints.
    pub caller: serde_json::Value,
}

/// The measure of a checkpoint that names none.
pub(crate) fn loss() -> String {
    "loss".to_owned()
}

impl TrainerState {
    pub(crate) const FORMAT: u32 = 1;

    /// The score by this measure.
    pub fn score_by(&self, measure: &str) -> Option<f64> {
        self.score.filter(|_| self.scored_by == measure)
    }
}
