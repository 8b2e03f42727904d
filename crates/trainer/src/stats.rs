//! The numbers of a step, its outcome, and the score of its parameters.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::preference::PreferenceStats;

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepStats {
    /// The step's number, from 1.
    pub step: u64,
    /// The sum of token losses over the batch divided by its target tokens, before the update.
    pub loss: f64,
    /// The mean of what is minimised, where that is more than [`StepStats::loss`].
    pub objective: Option<f64>,
    /// The numbers of [`crate::preference`], if the step minimises such a loss. [`StepStats::loss`] is then that of the chosen answers.
    pub preference: Option<PreferenceStats>,
    /// The numbers of [`crate::contrastive`], if the step minimises such a loss. [`StepStats::loss`] is then that loss.
    pub contrastive: Option<ContrastiveStats>,
    /// The loss of [`crate::ranking`], if the step minimises one. [`StepStats::loss`] is then that loss.
    pub ranking: Option<f64>,
    /// The learning rate, before Adafactor's `scale_parameter`.
    pub lr: f64,
    /// The global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Target tokens, EOS included, padding not.
    pub target_tokens: u64,
    /// Source tokens, EOS included, padding not.
    pub source_tokens: u64,
    /// Source and target positions that were computed, padding included.
    pub padded_tokens: u64,
    /// How many micro-batches the batch was cut into.
    pub micro_batches: usize,
    /// How many of this process's micro-batches were launched on a card as graphs ([`t5::Levers::repeats`]).
    pub graph_micro_batches: usize,
}

/// The numbers of a batch of texts, by [`crate::contrastive`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContrastiveStats {
    /// The loss.
    pub loss: f64,
    /// The share of rows whose positive is nearer than all others; `None` where rows have scores.
    pub accuracy: Option<f64>,
}

/// How a step ended.
#[derive(Clone, Debug, PartialEq)]
pub enum StepOutcome {
    /// The parameters were updated.
    Done(StepStats),
    /// Loss, gradient or the square of the clipped gradient was not finite (the stats hold the raw values): nothing was
    /// updated.
    Skipped(StepStats),
    /// The batch had no samples: nothing was updated. Loss and gradient norm are 0.
    Empty(StepStats),
    /// The caller asked to stop between two blocks: nothing was updated and the step does not count.
    Interrupted,
}

impl fmt::Display for StepOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(_) => f.write_str("the parameters were updated"),
            Self::Skipped(stats) => {
                write!(
                    f,
                    "the loss is {} and the gradient norm {}, expected finite numbers",
                    stats.loss, stats.grad_norm
                )
            }
            Self::Empty(_) => f.write_str("the batch has no samples"),
            Self::Interrupted => f.write_str("it was interrupted"),
        }
    }
}

/// The best score of a run so far, and the step that reached it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The score; larger is better.
    pub value: f64,
    /// The step it was measured after.
    pub step: u64,
}
