//! Exact optimizer steps from batches of token ids, and everything needed to make them again after a crash.
//!
//! * [`Trainer::step`]: gradient accumulation over micro-batches, global-norm clipping, Adafactor or AdamW ([`optimizer`]), a
//!   [`schedule`], freezing by name ([`freeze`]).
//! * [`Parallel`]: several processes that make each step together.
//! * [`evaluate`]: loss, perplexity, and the scores of answers ([`text_metrics`]), streaming.
//! * [`checkpoint`]: atomic, verified, exact to the bit.
//! * [`costs`]: the trainer's rows of the memory bill.
//!
//! Architecture invariants: this crate parses no configuration file, prints nothing and never asks the operating system
//! about memory. The caller decides how a batch is cut ([`StepPlan`]), which changes nothing but the order of summation.

pub mod adafactor;
pub mod adamw;
mod between_cards;
pub mod checkpoint;
mod class_weights;
pub mod contrastive;
pub mod costs;
pub mod distillation;
mod error;
pub mod evaluate;
mod file_digests;
mod files;
pub mod freeze;
pub mod groups;
mod kept_logits;
pub mod lion;
mod lists;
pub mod micro_batches;
pub mod optimizer;
mod options;
mod pairs;
mod parallel;
mod passes;
pub mod preference;
pub mod ranking;
mod rule;
pub mod schedule;
mod state;
mod state_file;
mod stats;
#[cfg(test)]
#[path = "../../cuda-device/tests/support/device.rs"]
mod test_device;
mod texts;
mod trainer;
mod transport;
mod update;

pub use checkpoint::{Checkpoints, Found, Saved, export_checkpoint, export_model};
pub use error::{Error, Result};
pub use file_digests::{FileDigest, FileDigests, digests_of};
pub use kept_logits::{KeptLogits, KeptLogitsOf};
pub use optimizer::{Optimizer, OptimizerOptions};
pub use options::{GradientPrecision, MasterWeights, Precision, TrainerOptions};
pub use parallel::{Parallel, Sharding, shards};
pub use ranking::RowLabels;
pub use state::TrainerState;
pub use stats::{Score, StepOutcome, StepStats};
pub use t5::{LayerMajor, Levers};
pub use trainer::{Batch, StepPlan, Trainer};
