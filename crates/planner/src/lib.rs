//! The planner: turns a job into its plan.
//!
//! A [`Job`] names the computation, its data and its budget. [`costs`] lists all choices, each with its bytes as rows of a bill and its
//! relative time. [`plan()`] takes the fastest choice that fits.
//!
//! # Levers
//!
//! [`LEVERS`] is the only table of a step's levers: name, values, pin, flag, words. Config keys, the flags of `bench`, and `plan --explain`
//! read it, and the search goes through it. A lever's price is in [`Prices`].
//!
//! # Invariants
//!
//! * Costs are a function of job and snapshot: no clock, no file. Measurements of a machine come in as values.
//! * Bytes of tensors are counted by [`t5`] and never estimated here. The other memory of a process is measured, or stated by the part that
//!   holds it.
//! * A pinned lever is offered with its pinned value only.

mod answer_bytes;
mod answer_pace;
mod answer_speed;
mod counted;
mod error;
mod feed;
pub mod feeding;
mod files;
mod frozen_model;
mod inference;
mod job;
mod kinds;
mod lever;
mod levers;
mod measurement;
pub mod names;
mod pace;
mod place;
mod planning;
mod prediction;
mod prices;
mod processes;
#[cfg(feature = "datasets")]
mod reading;
mod reading_bytes;
mod rehearsal;
mod requests;
mod rounding;
mod row_counts;
#[cfg(feature = "datasets")]
mod rows;
mod search;
mod speed;
mod step_parts;
mod teacher;
#[cfg(test)]
mod testing;
mod timeline;
mod traffic;
mod training;
#[cfg(not(feature = "datasets"))]
mod without_datasets;

pub use answer_bytes::AnswerBytes;
pub use answer_pace::{AnsweredBatch, InferencePace, inference_pace};
pub use answer_speed::{AnswerSpeed, FewRows};
pub use error::{Error, Result};
pub use feed::Feed;
pub use feeding::{DatasetResidency, Feeding};
pub use files::files;
pub use job::{Evaluation, Frozen, Inference, Job, KeptLogits, Training, Wanted, Work, budget_of};
pub use lever::{Flag, Lever, Pins, Takes, Value, Values};
pub use levers::{FEEDING_LEVERS, LEVERS, MICRO_BATCH_SAMPLES, RECORDED_MICRO_BATCHES, Step, lever_of_a_pin};
pub use measurement::{MeasuredSizes, measure, measure_card};
pub use pace::{Pace, pace};
pub use planning::{Planned, costs, plan};
pub use prediction::wrong_row;
pub use prices::Prices;
pub use processes::{Network, Processes};
#[cfg(feature = "datasets")]
pub use reading::{EvaluatedRows, NOTHING_AHEAD, in_file_order};
pub use reading_bytes::Reading;
pub use rehearsal::{rehearse, rehearse_inference};
pub use requests::device_calls;
pub use row_counts::RowCounts;
#[cfg(feature = "datasets")]
pub use rows::{Rows, RowsRead};
pub use speed::{CardTimes, GraphTimes, LaunchTimes, MachineSpeed, Speed};
pub use teacher::{SamplesRead, kept_logits};
pub use timeline::{Moment, Timeline, timeline};
pub use training::MAX_EVALUATED_TOGETHER;
#[cfg(not(feature = "datasets"))]
pub use without_datasets::{EvaluatedRows, Rows};

/// A plan of this planner's choices.
pub type Plan = memory_policy::Plan<Step, Feeding>;
/// The choices of a job.
pub type Costs = memory_policy::Costs<Step, Feeding>;
/// A way to carry out a step.
pub type StepChoice = memory_policy::Choice<Step>;
/// A way to feed a step.
pub type FeedingChoice = memory_policy::Choice<Feeding>;
/// No choice fits.
pub type DoesNotFit = memory_policy::DoesNotFit<Step, Feeding>;
