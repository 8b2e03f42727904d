//! Costs: what the parts of the trainer would hold, stated by the parts as rows of name and bytes.
//!
//! A choice is one setting of a part's levers with the rows that it would cost and its relative time.
//! A lever is pinned by offering only the choices that have the pinned value.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// One line of the bill: what something costs, and why that much.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostRow {
    /// What holds the bytes: `parameters`, `activations`, `loader`.
    pub name: String,
    /// How many bytes it holds at the peak.
    pub bytes: Bytes,
    /// Where the number comes from, for people: `188 M x f32`. May be empty.
    pub note: String,
}

impl CostRow {
    /// A row of `bytes` bytes.
    pub fn new(name: impl Into<String>, bytes: u64, note: impl Into<String>) -> Self {
        Self { name: name.into(), bytes: Bytes(bytes), note: note.into() }
    }
}

/// How the training step may be cut, what that would hold, and how long it would take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepChoice {
    /// Samples of one micro-batch.
    pub micro_batch_samples: usize,
    /// Blocks, counted from the first, of which only the input is kept and the rest computed again.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time in the loss.
    pub loss_chunk_rows: usize,
    /// What this choice holds at its peak, the fixed rows not counted again.
    pub rows: Vec<CostRow>,
    /// Time of a step over the time of the fastest choice: 1.0 is the fastest, 1.3 takes 30 % longer.
    pub relative_time: f64,
}

/// How far the loader may run ahead, what that would hold, and how long the step would wait for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoaderChoice {
    /// What the dataset holds between reads.
    pub residency: DatasetResidency,
    /// Threads that decode and tokenize.
    pub decode_threads: usize,
    /// Optimizer batches that may be ready and not yet taken.
    pub prefetch_batches: usize,
    /// What this choice holds at its peak.
    pub rows: Vec<CostRow>,
    /// Time of a step with this loader over the time with the fastest one.
    pub relative_time: f64,
}

/// What the dataset holds between reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetResidency {
    /// Every row, decoded.
    InMemory,
    /// The blocks read last, up to this many bytes.
    RowGroupCache {
        /// The most that the cache may hold.
        bytes: Bytes,
    },
    /// Nothing but the files' metadata.
    #[default]
    UltraLowMem,
}

impl DatasetResidency {
    /// The name that `memory.dataset_residency` uses for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::InMemory => "in_memory",
            Self::RowGroupCache { .. } => "row_group_cache",
            Self::UltraLowMem => "ultra_low_mem",
        }
    }
}

impl fmt::Display for DatasetResidency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RowGroupCache { bytes } => write!(f, "{} of {bytes}", self.name()),
            Self::InMemory | Self::UltraLowMem => f.write_str(self.name()),
        }
    }
}

/// Everything that the parts offer, and what it would cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Samples of one optimizer step; for the bill's last line only.
    pub batch_samples: usize,
    /// What is held whatever is chosen: the process itself, parameters, optimizer state.
    pub fixed: Vec<CostRow>,
    /// The ways to cut the training step. At least one.
    pub steps: Vec<StepChoice>,
    /// The ways to feed it. At least one.
    pub loaders: Vec<LoaderChoice>,
}

/// The sum of some rows.
pub(crate) fn sum(rows: &[CostRow]) -> Bytes {
    rows.iter().map(|row| row.bytes).sum()
}
