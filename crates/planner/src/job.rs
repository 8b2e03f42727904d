//! The job: the computation, its data, and its budget.

use candle_core::DType;
use memory_policy::{Budget, Budgets, Bytes, CostRow, MemorySpace};
use t5::{AnswerShape, StoredWeights};
use trainer::TrainerOptions;

use crate::feed::Feed;
use crate::lever::Pins;
use crate::prices::Prices;
use crate::processes::Processes;
use crate::reading_bytes::Reading;
use crate::row_counts::RowCounts;
use crate::{EvaluatedRows, Plan};

/// The job to plan.
pub struct Job<'a> {
    /// The model that computes.
    pub model: &'a t5::Config,
    /// The work.
    pub work: Work<'a>,
    /// Samples of an optimizer step; in inference, the most samples at a time.
    pub samples: usize,
    /// The longest source and target in tokens.
    pub longest: (usize, usize),
    /// Where tensors are.
    pub place: MemorySpace,
    /// The budgets.
    pub budgets: Budgets,
    /// The pins.
    pub pins: &'a Pins,
    /// The loader and dataset of a step.
    pub feed: Feed<'a>,
    /// A note about the process's own memory, for the bill.
    pub process_note: &'a str,
    /// Memory at the process's peak so far: the phase `reading` of the bill.
    pub past: Vec<CostRow>,
    /// The prices of levers on this machine.
    pub prices: Prices,
}

/// The computation.
#[derive(Clone)]
pub enum Work<'a> {
    /// Optimizer steps.
    Training(Training<'a>),
    /// Losses and answers.
    Inference(Inference<'a>),
}

/// The settings of training beside those of the job.
#[derive(Clone)]
pub struct Training<'a> {
    /// Options of the trainer.
    pub options: &'a TrainerOptions,
    /// Bytes that the whole run may write to files in place of memory, unless a pin asks for files.
    pub disk_writes: u64,
    /// The evaluation between steps, if any.
    pub evaluation: Option<Evaluation<'a>>,
    /// Whether checkpoints are saved.
    pub saves: bool,
    /// The choices that the caller wants.
    pub wanted: Wanted<'a>,
    /// The files of a base that is frozen beside an adapter, if they can be read where they are stored.
    pub base: Option<StoredWeights>,
    /// A model beside the trained one, which is only read.
    pub frozen: Option<Frozen<'a>>,
    /// The processes that train together.
    pub processes: Processes,
    /// Source and target tokens of some rows of the run; empty if all rows are as long as allowed.
    pub lengths: &'a [(usize, usize)],
}

/// A model beside the trained one, whose weights stay in its files.
#[derive(Clone, Copy)]
pub struct Frozen<'a> {
    /// Its name in the bill: reference or teacher.
    pub called: &'static str,
    /// The model.
    pub model: &'a t5::Config,
    /// Its files.
    pub stored: StoredWeights,
    /// Whether evaluations ask it, too.
    pub is_evaluated: bool,
    /// Its largest logits in a file, if it is a teacher that reads each sample once.
    pub kept: Option<KeptLogits>,
}

/// Logits that a run keeps in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptLogits {
    /// Bytes of the table of places in memory.
    pub table_bytes: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// The evaluation of a run.
#[derive(Clone)]
pub struct Evaluation<'a> {
    /// The answers.
    pub answer: AnswerShape,
    /// How many rows are evaluated and answered.
    pub counts: RowCounts,
    /// The rows that the evaluation reads, if known.
    pub rows: Option<EvaluatedRows<'a>>,
}

impl Evaluation<'_> {
    pub(crate) fn reading(&self, samples: usize) -> Reading {
        self.rows.as_ref().map_or(Reading::default(), |rows| rows.bytes(samples))
    }
}

/// The settings of inference beside those of the job.
#[derive(Clone)]
pub struct Inference<'a> {
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype in which parameters are kept.
    pub parameters: DType,
    /// The weights in the model's files, if they may stay there. `None`: they must be in memory.
    pub stored: Option<StoredWeights>,
    /// The answers.
    pub answer: AnswerShape,
    /// How many rows are evaluated and answered.
    pub counts: RowCounts,
    /// Whether losses are computed, too.
    pub has_targets: bool,
    /// The rows that are read, if they come from a dataset.
    pub rows: Option<EvaluatedRows<'a>>,
    /// The bytes of prompts that come from elsewhere.
    pub prompts: Reading,
    /// Rows of the program's other memory, in every phase.
    pub beside: Vec<CostRow>,
}

/// The choices that the caller wants.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// All choices, for an explanation.
    All,
    /// The choices that some budget would take, and the choice of this plan. They take little memory, for planning within a budget that is
    /// already in use.
    Undominated(Option<&'a Plan>),
}

impl<'a> Job<'a> {
    /// A job of inference over at most `samples` samples at a time, with at most these source and target tokens.
    pub fn of_inference(
        model: &'a t5::Config,
        inference: Inference<'a>,
        samples: usize,
        longest: (usize, usize),
        (budgets, pins): (Budgets, &'a Pins),
    ) -> Self {
        Self {
            model,
            samples,
            longest,
            place: MemorySpace::Host,
            budgets,
            pins,
            feed: Feed::Given,
            process_note: "measured",
            past: Vec::new(),
            prices: Prices::of_units(inference.activations),
            work: Work::Inference(inference),
        }
    }
}

/// A budget of this many bytes, or a share of the available memory.
pub fn budget_of(bytes: Option<u64>) -> Budget {
    bytes.map_or(Budget::ShareOfAvailable, |bytes| Budget::Explicit(Bytes(bytes)))
}
