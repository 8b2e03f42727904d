//! The step: an optimizer batch in, an exact update of the parameters out.
//!
//! Invariants:
//! * How a batch is cut into micro-batches changes nothing but the order of summation: the loss is divided by the target
//!   tokens of the whole batch, and dropout follows a sample's index in it.
//! * Parameters and optimizer state change only after the whole batch's gradient is known and finite. An interrupted step,
//!   an empty batch and a non-finite step change neither by a bit.
//! * Every batch handed in counts as one step, whatever became of it, so the step number is the position in the data and
//!   in the schedule.
//! * Nothing but `(options, batches so far)` decides the next state: no clock, no thread count, no memory.
//!
//! ```no_run
//! # fn example(model: t5::T5, sources: Vec<Vec<u32>>, targets: Vec<Vec<u32>>) -> Result<(), trainer::Error> {
//! use trainer::{Batch, StepOutcome, StepPlan, Trainer, TrainerOptions};
//! let mut trainer = Trainer::new(model, TrainerOptions::default())?;
//! let plan = StepPlan { micro_batch_samples: 4, recompute_blocks: 0, loss_chunk_rows: 256 };
//! let batch = Batch { sources: &sources, targets: &targets };
//! match trainer.step(&batch, &plan, &|| false)? {
//!     StepOutcome::Done(stats) => assert!(stats.loss.is_finite()),
//!     StepOutcome::Skipped(_) | StepOutcome::Empty(_) | StepOutcome::Interrupted => {}
//! }
//! # Ok(())
//! # }
//! ```

use std::collections::HashSet;

use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};
use t5::{Gradients, MicroBatch, StepContext, T5};

use crate::adafactor::{Adafactor, AdafactorOptions};
use crate::checkpoint::TrainerState;
use crate::error::{Error, Result};
use crate::schedule::Schedule;
use crate::{freeze, micro_batches};

/// An optimizer batch as token ids, EOS included; `sources[i]` goes with `targets[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// What the encoder reads.
    pub sources: &'a [Vec<u32>],
    /// What the decoder learns to write.
    pub targets: &'a [Vec<u32>],
}

/// How a step is carried out: chosen by memory, without a say in the mathematics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// The most samples that are in memory at one time.
    pub micro_batch_samples: usize,
    /// Blocks that keep only their input and run forward again in backward.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time.
    pub loss_chunk_rows: usize,
}

/// The dtype of activations. Gradients and optimizer state stay in f32, weights too unless [`MasterWeights`] says else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Single precision.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// Double precision, with an f64 model: for proofs.
    F64,
}

impl Precision {
    /// The dtype in which activations are computed and kept.
    pub fn activations(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F64 => DType::F64,
        }
    }
}

/// What the weights are kept in between two updates, where activations are bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MasterWeights {
    /// f32, rounded to bf16 as products need them.
    #[default]
    F32,
    /// bf16 and nothing beside it; an update is computed in f32 and rounded up or down at random, right on average.
    StochasticRounding,
    /// bf16 and nothing beside it; updates are rounded to the nearest value, which loses small ones. For comparison.
    NearestRounding,
}

/// What makes one run differ from another. Saved in every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerOptions {
    /// Seed of the dropout masks.
    pub seed: u64,
    /// Probability of dropping.
    pub dropout: f64,
    /// Dtype of activations.
    pub precision: Precision,
    /// What the weights are kept in.
    #[serde(default)]
    pub master_weights: MasterWeights,
    /// What does not train; see [`crate::freeze`].
    pub freeze: Vec<String>,
    /// Global L2 norm that gradients are clipped to; 0 switches clipping off.
    pub grad_clip_norm: f64,
    /// The optimizer.
    pub adafactor: AdafactorOptions,
    /// The learning rate's curve.
    pub schedule: Schedule,
    /// Where the schedule ends, in optimizer steps.
    pub total_steps: u64,
    /// The number of non-finite steps in a row that ends the run; at least 1.
    pub max_non_finite: u32,
}

impl Default for TrainerOptions {
    fn default() -> Self {
        TrainerOptions {
            seed: 0,
            dropout: 0.1,
            precision: Precision::F32,
            master_weights: MasterWeights::F32,
            freeze: Vec::new(),
            grad_clip_norm: 1.0,
            adafactor: AdafactorOptions::default(),
            schedule: Schedule::CONSTANT,
            total_steps: 1,
            max_non_finite: 10,
        }
    }
}

impl TrainerOptions {
    /// The dtype of the model that these options train.
    pub fn parameter_dtype(&self) -> DType {
        match (self.precision, self.master_weights) {
            (Precision::F64, _) => DType::F64,
            (_, MasterWeights::F32) => DType::F32,
            (_, MasterWeights::StochasticRounding | MasterWeights::NearestRounding) => DType::BF16,
        }
    }

    /// Checks every option and every pair of options that can contradict each other.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the first one at fault.
    pub fn validate(&self) -> Result<()> {
        self.adafactor.validate()?;
        self.schedule.validate()?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::invalid_option("train.dropout", "a number from 0 up and below 1", self.dropout));
        }
        if !(self.grad_clip_norm.is_finite() && self.grad_clip_norm >= 0.0) {
            let expected = "a finite number from 0 up; 0 switches clipping off";
            return Err(Error::invalid_option("train.grad_clip_norm", expected, self.grad_clip_norm));
        }
        if self.master_weights != MasterWeights::F32 && self.precision != Precision::Bf16 {
            let expected = "`f32` unless `train.precision` is `bf16`";
            return Err(Error::invalid_option("train.master_weights", expected, format!("{:?}", self.master_weights)));
        }
        if self.max_non_finite == 0 {
            return Err(Error::invalid_option("train.max_non_finite_steps", "at least 1", 0));
        }
        if self.adafactor.relative_step && self.schedule != Schedule::CONSTANT {
            let expected =
                "`constant` without warm-up beside `optimizer.relative_step = true`, which is a schedule of its own";
            return Err(Error::invalid_option("schedule.name", expected, format!("{:?}", self.schedule)));
        }
        Ok(())
    }
}

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepStats {
    /// The step's number, from 1.
    pub step: u64,
    /// The sum of token losses over the batch divided by its target tokens, before the update.
    pub loss: f64,
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
    /// The caller asked to stop between two micro-batches: nothing was updated and the step does not count.
    Interrupted,
}

/// The best score of a run so far, and the step that reached it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The score; larger is better.
    pub value: f64,
    /// The step it was measured after.
    pub step: u64,
}

/// A model and everything that trains it.
pub struct Trainer {
    pub(crate) model: T5,
    pub(crate) options: TrainerOptions,
    pub(crate) adafactor: Adafactor,
    gradients: Gradients,
    step: u64,
    non_finite_in_a_row: u32,
    last_score: Option<Score>,
    best_score: Option<Score>,
}

impl Trainer {
    /// A trainer at step 0.
    ///
    /// # Errors
    /// Invalid options; an unknown item in `freeze`; a failed allocation of the optimizer's state.
    pub fn new(model: T5, options: TrainerOptions) -> Result<Self> {
        options.validate()?;
        let names = model.parameters().iter().map(|parameter| parameter.name.as_str());
        let trainable = freeze::trainable(names, &options.freeze)?;
        let mut adafactor = Adafactor::new(options.adafactor, model.parameters(), &trainable)?;
        if options.master_weights == MasterWeights::StochasticRounding {
            adafactor.round_stochastically(options.seed);
        }
        let frozen: HashSet<&str> = model
            .parameters()
            .iter()
            .zip(&trainable)
            .filter(|(_, trains)| !**trains)
            .map(|(parameter, _)| parameter.name.as_str())
            .collect();
        let gradients = Gradients::new(&model, &|parameter| !frozen.contains(parameter.name.as_str()));
        Ok(Trainer {
            model,
            options,
            adafactor,
            gradients,
            step: 0,
            non_finite_in_a_row: 0,
            last_score: None,
            best_score: None,
        })
    }

    /// Makes one optimizer step of `batch`, `plan.micro_batch_samples` at a time.
    ///
    /// `interrupted` is asked before every micro-batch; `true` discards the gradients and ends the step.
    ///
    /// # Errors
    /// [`Error::BatchShape`]; [`Error::Diverged`] at the `max_non_finite`-th non-finite step in a row; what the model
    /// refuses, such as token ids outside the vocabulary. All of these leave parameters and state as they were.
    pub fn step(&mut self, batch: &Batch, plan: &StepPlan, interrupted: &dyn Fn() -> bool) -> Result<StepOutcome> {
        if batch.sources.len() != batch.targets.len() {
            return Err(Error::BatchShape { sources: batch.sources.len(), targets: batch.targets.len() });
        }
        if plan.micro_batch_samples == 0 {
            return Err(Error::invalid_option("memory.micro_batch_samples", "at least 1", 0));
        }
        let factor = self.options.schedule.factor(self.step, self.options.total_steps);
        let mut stats = StepStats {
            step: self.step + 1,
            loss: 0.0,
            lr: self.options.adafactor.resolved_learning_rate(self.adafactor.updates(), factor),
            grad_norm: 0.0,
            target_tokens: count_tokens(batch.targets),
            source_tokens: count_tokens(batch.sources),
            padded_tokens: 0,
            micro_batches: 0,
        };
        if batch.sources.is_empty() {
            self.step += 1;
            return Ok(StepOutcome::Empty(stats));
        }
        if !self.accumulate(batch, plan, &mut stats, interrupted)? {
            return Ok(StepOutcome::Interrupted);
        }
        let scale = clip_scale(stats.grad_norm, self.options.grad_clip_norm);
        // Adafactor squares in f32: a gradient whose square is infinite would reach its state as one.
        let largest_square = (stats.grad_norm * scale).powi(2) as f32;
        if stats.loss.is_finite() && stats.grad_norm.is_finite() && largest_square.is_finite() {
            self.adafactor.update(self.model.parameters(), self.gradients.iter(), stats.lr, scale)?;
            self.step += 1;
            self.non_finite_in_a_row = 0;
            return Ok(StepOutcome::Done(stats));
        }
        self.step += 1;
        self.non_finite_in_a_row += 1;
        if self.non_finite_in_a_row >= self.options.max_non_finite {
            return Err(Error::Diverged { in_a_row: self.non_finite_in_a_row, stats: Box::new(stats) });
        }
        Ok(StepOutcome::Skipped(stats))
    }

    /// Fills the gradients with those of the whole batch and `stats` with its loss and norm. `false` when interrupted.
    fn accumulate(
        &mut self,
        batch: &Batch,
        plan: &StepPlan,
        stats: &mut StepStats,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let cx = StepContext {
            seed: self.options.seed,
            step: self.step,
            dropout: self.options.dropout,
            activations: self.options.precision.activations(),
            recompute_blocks: plan.recompute_blocks,
            loss_chunk_rows: plan.loss_chunk_rows,
            target_tokens: stats.target_tokens,
        };
        let lengths: Vec<_> =
            batch.sources.iter().zip(batch.targets).map(|(source, target)| (source.len(), target.len())).collect();
        let device = self.model.device().clone();
        // Whatever an interrupted step left behind is discarded here.
        self.gradients.zero()?;
        let mut loss_sum = 0.0;
        for samples in micro_batches::cut(&lengths, plan.micro_batch_samples) {
            if interrupted() {
                return Ok(false);
            }
            let micro_batch = gather(batch, &samples, self.model.config(), &device)?;
            loss_sum += self.model.forward_backward(&micro_batch, &cx, &mut self.gradients)?;
            stats.padded_tokens += micro_batches::padded_tokens(&lengths, &samples);
            stats.micro_batches += 1;
        }
        stats.loss = loss_sum / stats.target_tokens as f64;
        stats.grad_norm = self.gradient_norm()?;
        Ok(true)
    }

    /// The global L2 norm over all trainable parameters.
    fn gradient_norm(&self) -> Result<f64> {
        let mut sum = 0.0;
        for (_, gradient) in self.gradients.iter() {
            sum += t5_ops::square_sum(gradient)?;
        }
        Ok(sum.sqrt())
    }

    /// The gradients of the last batch, unclipped. For tests and diagnosis.
    pub fn gradients(&self) -> &Gradients {
        &self.gradients
    }

    /// Frees the gradients' memory until the next step, for evaluation and saving under a tight budget.
    pub fn release_gradients(&mut self) {
        self.gradients.release();
    }

    /// How many batches have been stepped, skipped and empty ones included.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Whether `total_steps` have been made.
    pub fn is_done(&self) -> bool {
        self.step >= self.options.total_steps
    }

    /// The learning rate of the next step, before Adafactor's `scale_parameter`.
    pub fn learning_rate(&self) -> f64 {
        let factor = self.options.schedule.factor(self.step, self.options.total_steps);
        self.options.adafactor.resolved_learning_rate(self.adafactor.updates(), factor)
    }

    /// The model being trained.
    pub fn model(&self) -> &T5 {
        &self.model
    }

    /// The options that it was made with.
    pub fn options(&self) -> &TrainerOptions {
        &self.options
    }

    /// The optimizer and its state.
    pub fn adafactor(&self) -> &Adafactor {
        &self.adafactor
    }

    /// Notes the score of the parameters as they are (larger is better); says whether it is the best so far.
    ///
    /// A checkpoint saved before the next step carries it, for `keep_best`. A score that is not a number is ignored.
    pub fn record_score(&mut self, value: f64) -> bool {
        if value.is_nan() {
            return false;
        }
        let score = Score { value, step: self.step };
        self.last_score = Some(score);
        let is_best = self.best_score.is_none_or(|best| value > best.value);
        if is_best {
            self.best_score = Some(score);
        }
        is_best
    }

    /// The best score so far.
    pub fn best_score(&self) -> Option<Score> {
        self.best_score
    }

    /// Everything that a checkpoint holds beside tensors and the caller's own state.
    pub(crate) fn state(&self, caller: serde_json::Value) -> TrainerState {
        TrainerState {
            format: TrainerState::FORMAT,
            step: self.step,
            updates: self.adafactor.updates(),
            non_finite_in_a_row: self.non_finite_in_a_row,
            score: self.last_score.filter(|score| score.step == self.step).map(|score| score.value),
            best_score: self.best_score,
            options: self.options.clone(),
            caller,
        }
    }

    /// Goes to where `state` was saved. The optimizer's tensors are the caller's to restore.
    pub(crate) fn set_state(&mut self, state: &TrainerState) {
        self.step = state.step;
        self.non_finite_in_a_row = state.non_finite_in_a_row;
        self.best_score = state.best_score;
        self.last_score = state.score.map(|value| Score { value, step: state.step });
    }
}

/// What gradients are multiplied by: `torch.nn.utils.clip_grad_norm_`.
fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

/// The micro-batch of some samples of a batch, each with its index in the batch.
fn gather(batch: &Batch, samples: &[usize], config: &t5::Config, device: &Device) -> Result<MicroBatch> {
    let sources: Vec<&[u32]> = samples.iter().map(|&i| batch.sources[i].as_slice()).collect();
    let targets: Vec<&[u32]> = samples.iter().map(|&i| batch.targets[i].as_slice()).collect();
    let indices: Vec<u32> = samples.iter().map(|&i| i as u32).collect();
    Ok(MicroBatch::new(&sources, &targets, &indices, config, device)?)
}

fn count_tokens(lists: &[Vec<u32>]) -> u64 {
    lists.iter().map(|ids| ids.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_is_that_of_torch() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(4.0, 1.0), 1.0 / (4.0 + 1e-6));
        assert_eq!(clip_scale(4.0, 0.0), 1.0);
        assert_eq!(clip_scale(0.0, 1.0), 1.0);
    }

    #[test]
    fn options_that_contradict_each_other_are_refused_by_name() {
        let check = |change: &dyn Fn(&mut TrainerOptions), name: &str| {
            let mut options = TrainerOptions::default();
            change(&mut options);
            let error = options.validate().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        };
        assert!(TrainerOptions::default().validate().is_ok());
        check(&|o| o.dropout = 1.0, "train.dropout");
        check(&|o| o.dropout = f64::NAN, "train.dropout");
        check(&|o| o.master_weights = MasterWeights::StochasticRounding, "train.master_weights");
        check(&|o| o.grad_clip_norm = -1.0, "train.grad_clip_norm");
        check(&|o| o.max_non_finite = 0, "train.max_non_finite_steps");
        check(&|o| o.schedule.warmup_steps = Some(10), "schedule.name");
        check(&|o| o.adafactor.relative_step = false, "optimizer.learning_rate");
    }
}
