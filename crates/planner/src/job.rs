//! The job: what is computed, over what, within which budget.

use candle_core::DType;
use memory_policy::{Budget, Budgets, Bytes, CostRow, Place};
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
    /// Samples of an optimizer step; in inference, samples at a time, at most.
    pub samples: usize,
    /// The longest source and target in tokens.
    pub longest: (usize, usize),
    /// Where tensors lie.
    pub place: Place,
    /// The budgets.
    pub budgets: Budgets,
    /// The pins.
    pub pins: &'a Pins,
    /// The loader and dataset of a step.
    pub feed: Feed<'a>,
    /// The process's own memory, for people.
    pub process_note: &'a str,
    /// The time that levers cost on this machine.
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
    /// How it trains.
    pub options: &'a TrainerOptions,
    /// Bytes that the whole run may write to files in place of memory, where no pin says so.
    pub disk_writes: u64,
    /// The evaluation between steps, if any.
    pub evaluation: Option<Evaluation<'a>>,
    /// Whether checkpoints are saved.
    pub saves: bool,
    /// Which of the ways to carry out a step are wanted.
    pub wanted: Wanted<'a>,
    /// The files of a base that is frozen beside an adapter and can be read where it is stored.
    pub base: Option<StoredWeights>,
    /// The processes that train together.
    pub processes: Processes,
    /// Source and target tokens of some rows of the run; none where all are as long as they may be.
    pub lengths: &'a [(usize, usize)],
}

/// The evaluation of a run.
#[derive(Clone)]
pub struct Evaluation<'a> {
    /// The answers.
    pub answer: AnswerShape,
    /// How many rows are evaluated and answered.
    pub counts: RowCounts,
    /// The rows that it reads, where they are known.
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
    /// The weights in the model's files, where they may stay there. `None`: they have to be in memory.
    pub stored: Option<StoredWeights>,
    /// The answers.
    pub answer: AnswerShape,
    /// How many rows are evaluated and answered.
    pub counts: RowCounts,
    /// Whether losses are computed, too.
    pub has_targets: bool,
    /// The rows that are read, where they come from a dataset.
    pub rows: Option<EvaluatedRows<'a>>,
    /// What the program holds beside, in every phase.
    pub beside: Vec<CostRow>,
}

/// Which of the ways to carry out a step are wanted.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// All, to be explained.
    All,
    /// Those that some budget would take, and this plan's: little memory, for who plans within a budget that holds already.
    Undominated(Option<&'a Plan>),
}

impl<'a> Job<'a> {
    /// Inference over at most `samples` samples at a time, of at most these source and target tokens.
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
            place: Place::Host,
            budgets,
            pins,
            feed: Feed::Given,
            process_note: "measured",
            prices: Prices::of_units(inference.activations),
            work: Work::Inference(inference),
        }
    }
}

/// So many bytes, or a share of what is available.
pub fn budget_of(bytes: Option<u64>) -> Budget {
    bytes.map_or(Budget::ShareOfAvailable, |bytes| Budget::Explicit(Bytes(bytes)))
}
