//! Costs: what the parts of the trainer would hold, stated by the parts as rows of name and bytes.
//!
//! A choice is one setting of a part's levers with the rows that it would cost and its relative time.
//! A lever is pinned by offering only the choices that have the pinned value.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Place};

/// One line of the bill: what something costs, and why that much.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostRow {
    /// What holds the bytes: `parameters`, `activations`, `loader`.
    pub name: String,
    /// How many bytes it holds at the peak.
    pub bytes: Bytes,
    /// Where the number comes from, for people: `188 M x f32`. May be empty.
    pub note: String,
    /// Where the bytes lie.
    #[serde(default, skip_serializing_if = "Place::is_host")]
    pub place: Place,
}

impl CostRow {
    /// A row of `bytes` bytes.
    pub fn new(name: impl Into<String>, bytes: u64, note: impl Into<String>) -> Self {
        Self { name: name.into(), bytes: Bytes(bytes), note: note.into(), place: Place::Host }
    }

    /// The same row, elsewhere.
    #[must_use]
    pub fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }
}

/// A part of a run that is not the step, such as evaluation, and what it holds beside the fixed rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// `evaluation`, `saving`.
    pub name: String,
    /// What it holds at its peak.
    pub rows: Vec<CostRow>,
}

/// Accumulation of all micro-batches of one layer before the next, with the optimizer inside backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMajor {
    /// Blocks whose gradients are kept from the pass that takes the norm, instead of being computed again.
    pub kept_gradient_blocks: usize,
    /// Whether what attention heads put out is kept beside block inputs instead of being computed again.
    #[serde(default)]
    pub heads_kept: bool,
    /// Whether what forward keeps of blocks lies in a file instead of memory.
    pub boundaries_on_disk: bool,
    /// Blocks, of those that backward comes to first, of which it stays in memory nevertheless. It is gone before the gradients
    /// of the last blocks are there.
    #[serde(default)]
    pub blocks_in_memory: usize,
    /// Whether gradients that are not kept wait in a file instead of being computed again.
    pub gradients_on_disk: bool,
    /// Whether the weights lie in a file, those of one block at a time in memory.
    #[serde(default)]
    pub weights_on_disk: bool,
}

impl LayerMajor {
    /// Whether backward goes through any of `blocks` blocks a second time. Then forward keeps no more than their inputs.
    pub fn goes_twice(&self, blocks: usize) -> bool {
        !self.gradients_on_disk && self.kept_gradient_blocks < blocks
    }

    /// What it does beside keeping gradients, for people.
    pub(crate) fn in_words(&self, recompute_blocks: usize) -> impl Iterator<Item = String> {
        let boundaries = if recompute_blocks > 0 { "block inputs on disk" } else { "activations on disk" };
        let boundaries = match self.blocks_in_memory {
            0 => boundaries.to_owned(),
            blocks => format!("{boundaries} but for {blocks} blocks"),
        };
        let levers = [
            (self.heads_kept && recompute_blocks > 0, "attention heads kept".to_owned()),
            (self.boundaries_on_disk, boundaries),
            (self.gradients_on_disk, "gradients on disk".to_owned()),
            (self.weights_on_disk, "weights on disk".to_owned()),
        ];
        levers.into_iter().filter_map(|(is_on, words)| is_on.then_some(words))
    }
}

/// How the training step may be cut, what that would hold, and how long it would take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepChoice {
    /// Samples of one micro-batch.
    pub micro_batch_samples: usize,
    /// Blocks, counted from the first, of which only the input is kept and the rest computed again.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time in the loss.
    pub loss_chunk_rows: usize,
    /// Layer after layer instead of micro-batch after micro-batch.
    pub layer_major: Option<LayerMajor>,
    /// Samples evaluated or generated at a time.
    pub evaluation_samples: usize,
    /// What this choice holds at the peak of a step, the fixed rows not counted again.
    pub rows: Vec<CostRow>,
    /// What it holds in the other phases of a run.
    pub other_phases: Vec<Phase>,
    /// Time of a step over the time of the fastest choice: 1.0 is the fastest, 1.3 takes 30 % longer.
    pub relative_time: f64,
}

/// The name of the phase that a step is.
pub const TRAINING: &str = "training";

impl StepChoice {
    /// Every phase with its rows, the step first.
    pub fn phases(&self) -> impl Iterator<Item = (&str, &[CostRow])> {
        let others = self.other_phases.iter().map(|phase| (phase.name.as_str(), phase.rows.as_slice()));
        std::iter::once((TRAINING, self.rows.as_slice())).chain(others)
    }

    /// How the step is cut, for people.
    pub(crate) fn in_words(&self) -> String {
        let mut words = format!("micro-batches of {}", self.micro_batch_samples);
        if self.recompute_blocks > 0 {
            words += &format!(", {} blocks recomputed", self.recompute_blocks);
        }
        if let Some(layers) = self.layer_major {
            words += ", layer by layer";
            if layers.kept_gradient_blocks > 0 {
                words += &format!(" with gradients of {} blocks kept", layers.kept_gradient_blocks);
            }
            for lever in layers.in_words(self.recompute_blocks) {
                words += &format!(" with {lever}");
            }
        }
        words
    }

    /// The phase that holds most of the process's own memory; of equal ones the first.
    pub fn binding(&self) -> (&str, &[CostRow]) {
        self.binding_at(Place::Host)
    }

    /// The phase that holds most at `place`; of equal ones the first.
    pub(crate) fn binding_at(&self, place: Place) -> (&str, &[CostRow]) {
        let first = (TRAINING, self.rows.as_slice());
        self.phases()
            .fold(first, |most, phase| if sum_at(place, phase.1) > sum_at(place, most.1) { phase } else { most })
    }
}

/// How far the loader may run ahead, what that would hold, and how long the step would wait for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// Of ways to cut a step those that some budget would take: none of the others holds no more and takes no longer. Those that
/// `is_kept` says stay, too. What is left out is let go at once, so of tens of thousands of choices, 100 MiB, only the
/// hundreds that matter exist at a time.
pub fn undominated(
    steps: impl IntoIterator<Item = StepChoice>,
    is_kept: impl Fn(&StepChoice) -> bool,
) -> Vec<StepChoice> {
    let mut left: Vec<(StepChoice, [Bytes; 2])> = Vec::new();
    for step in steps {
        let held = [Place::Host, Place::Device].map(|place| sum_at(place, step.binding_at(place).1));
        let dominates = |(a, a_holds): (&StepChoice, [Bytes; 2]), (b, b_holds): (&StepChoice, [Bytes; 2])| {
            a_holds[0] <= b_holds[0] && a_holds[1] <= b_holds[1] && a.relative_time <= b.relative_time
        };
        if is_kept(&step) || !left.iter().any(|(other, holds)| dominates((other, *holds), (&step, held))) {
            left.retain(|(other, holds)| is_kept(other) || !dominates((&step, held), (other, *holds)));
            left.push((step, held));
        }
    }
    left.into_iter().map(|(step, _)| step).collect()
}

/// The sum of some rows that lie in the process's own memory.
pub(crate) fn sum(rows: &[CostRow]) -> Bytes {
    sum_at(Place::Host, rows)
}

/// The sum of some rows that lie at `place`.
pub(crate) fn sum_at(place: Place, rows: &[CostRow]) -> Bytes {
    rows.iter().filter(|row| row.place == place).map(|row| row.bytes).sum()
}
