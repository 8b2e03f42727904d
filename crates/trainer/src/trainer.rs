//! The step: an optimizer batch in, an exact update of the parameters out.
//!
//! Invariants:
//! * How a batch is cut into micro-batches changes nothing but the order of summation: the loss is divided by the target
//!   tokens of the whole batch, and dropout follows a sample's index in it.
//! * Parameters and optimizer state change only after the whole batch's gradient is known and finite. An interrupted step,
//!   an empty batch and a non-finite step change neither by a bit.
//! * Every batch handed in counts as one step, whatever became of it, so the step number is the position in the data and
//!   in the schedule.
//! * Nothing but `(options, batches so far)` decides the next state up to rounding: no clock, no thread count, no memory. To the
//!   bit it also takes the same [`StepPlan`]s, which cut a batch, and the same kernels ([`t5_ops::instruction_set`],
//!   [`t5_ops::KERNELS_VERSION`]); the number of threads shows in no bit.
//!
//! ```no_run
//! # fn example(model: t5::T5, sources: Vec<Vec<u32>>, targets: Vec<Vec<u32>>) -> Result<(), trainer::Error> {
//! use trainer::{Batch, Levers, StepOutcome, StepPlan, Trainer, TrainerOptions};
//! let mut trainer = Trainer::new(model, TrainerOptions::default())?;
//! let levers = Levers { micro_batch_samples: 4, recompute_blocks: 0, loss_chunk_rows: 256, layer_major: None };
//! let plan = StepPlan { levers, longest: None };
//! let batch = Batch { sources: &sources, targets: &targets };
//! match trainer.step(&batch, &plan, &|| false)? {
//!     StepOutcome::Done(stats) => assert!(stats.loss.is_finite()),
//!     StepOutcome::Skipped(_) | StepOutcome::Empty(_) | StepOutcome::Interrupted => {}
//! }
//! # Ok(())
//! # }
//! ```

use std::cell::Cell;
use std::collections::HashSet;

use candle_core::Device;
use serde::{Deserialize, Serialize};
use t5::costs::{Pass, Shape};
use t5::{Files, Gradients, LayerMajor, LayerPass, Levers, MicroBatch, Stage, StepContext, T5};
use t5_ops::SquareSums;

use crate::adafactor::Adafactor;
use crate::checkpoint::TrainerState;
use crate::error::{Error, Result};
use crate::options::{MasterWeights, TrainerOptions};
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
    /// How it is cut, and what is computed again.
    pub levers: Levers,
    /// The longest source and target, in tokens, that [`Levers::micro_batch_samples`] was chosen for. A micro-batch of
    /// shorter samples takes as many as hold no more than that, one of longer samples fewer. `None`: just
    /// `micro_batch_samples`, whatever their lengths.
    pub longest: Option<(usize, usize)>,
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
    /// The caller asked to stop between two blocks: nothing was updated and the step does not count.
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

/// The gradient of a batch.
enum Accumulated {
    /// In the accumulators, with its sums of squares.
    Whole(Vec<Option<SquareSums>>),
    /// To be computed again, block by block.
    Layers(Box<LayerPass>, Vec<Option<SquareSums>>),
}

/// A model and everything that trains it.
pub struct Trainer {
    pub(crate) model: T5,
    pub(crate) options: TrainerOptions,
    pub(crate) adafactor: Adafactor,
    gradients: Gradients,
    /// Where activations and gradients go that are not to stay in memory.
    offload: Files,
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
        let is_trained = |parameter: &t5::Parameter| !frozen.contains(parameter.name.as_str());
        let gradients = Gradients::new(&model, options.gradient_dtype(), &is_trained);
        Ok(Trainer {
            model,
            options,
            adafactor,
            gradients,
            offload: Files::in_directory(&std::env::temp_dir()),
            step: 0,
            non_finite_in_a_row: 0,
            last_score: None,
            best_score: None,
        })
    }

    /// Puts files of activations and gradients, where a plan asks for them, there and not where the system has its own.
    pub fn offload_to(&mut self, files: Files) {
        self.offload = files;
    }

    /// Makes one optimizer step of `batch`, `plan.micro_batch_samples` at a time.
    ///
    /// `interrupted` is asked before every block of every micro-batch, up to the first change of a parameter; `true`
    /// discards the gradients and ends the step.
    ///
    /// # Errors
    /// [`Error::BatchShape`]; [`Error::Diverged`] at the `max_non_finite`-th non-finite step in a row; what the model
    /// refuses, such as token ids outside the vocabulary. All of these leave parameters and state as they were. A file of
    /// block inputs or gradients that cannot be read back in the second pass of a layer-major step does not: the trainer is then of
    /// no use.
    pub fn step(&mut self, batch: &Batch, plan: &StepPlan, interrupted: &dyn Fn() -> bool) -> Result<StepOutcome> {
        if batch.sources.len() != batch.targets.len() {
            return Err(Error::BatchShape { sources: batch.sources.len(), targets: batch.targets.len() });
        }
        if plan.levers.micro_batch_samples == 0 {
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
        self.model.move_weights(plan.levers.has_weights_on_disk().then_some(&self.offload))?;
        let Some(accumulated) = self.accumulate(batch, plan, &mut stats, interrupted)? else {
            return Ok(StepOutcome::Interrupted);
        };
        let scale = clip_scale(stats.grad_norm, self.options.grad_clip_norm);
        // Adafactor squares in f32: a gradient whose square is infinite would reach its state as one.
        let largest_square = (stats.grad_norm * scale).powi(2) as f32;
        if stats.loss.is_finite() && stats.grad_norm.is_finite() && largest_square.is_finite() {
            match accumulated {
                Accumulated::Whole(sums) => {
                    let with_sums = |(index, gradient): (usize, _)| Some((index, gradient, sums[index].as_ref()?));
                    let gradients = self.gradients.iter().filter_map(with_sums);
                    self.adafactor.update(self.model.parameters(), gradients, stats.lr, scale)?;
                }
                Accumulated::Layers(pass, sums) => {
                    if !self.apply_by_layer(pass, &sums, stats.lr, scale, interrupted)? {
                        self.gradients.release();
                        return Ok(StepOutcome::Interrupted);
                    }
                }
            }
            self.step += 1;
            self.non_finite_in_a_row = 0;
            return Ok(StepOutcome::Done(stats));
        }
        if let Accumulated::Layers(..) = accumulated {
            self.gradients.release();
        }
        self.step += 1;
        self.non_finite_in_a_row += 1;
        if self.non_finite_in_a_row >= self.options.max_non_finite {
            return Err(Error::Diverged { in_a_row: self.non_finite_in_a_row, stats: Box::new(stats) });
        }
        Ok(StepOutcome::Skipped(stats))
    }

    /// Finds loss and norm of the whole batch's gradient for `stats`, and the gradient as far as the plan keeps it.
    /// `None` when interrupted.
    fn accumulate(
        &mut self,
        batch: &Batch,
        plan: &StepPlan,
        stats: &mut StepStats,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Accumulated>> {
        let cx = StepContext {
            seed: self.options.seed,
            step: self.step,
            dropout: self.options.dropout,
            activations: self.options.precision.activations(),
            recompute_blocks: plan.levers.recompute_blocks,
            loss_chunk_rows: plan.levers.loss_chunk_rows,
            target_tokens: stats.target_tokens,
        };
        let lengths: Vec<_> =
            batch.sources.iter().zip(batch.targets).map(|(source, target)| (source.len(), target.len())).collect();
        let device = self.model.device().clone();
        let cut = self.cut(&lengths, plan);
        stats.micro_batches = cut.len();
        stats.padded_tokens = cut.iter().map(|samples| micro_batches::padded_tokens(&lengths, samples)).sum();
        let config = self.model.config().clone();
        let gathered = cut.iter().map(|samples| gather(batch, samples, &config, &device));
        let accumulated = match plan.levers.layer_major {
            None => self.accumulate_whole(gathered, &cx, stats, interrupted)?,
            Some(layers) => {
                let accumulated = self.accumulate_by_layer(gathered, &cx, &layers, stats, interrupted);
                if !matches!(accumulated, Ok(Some(_))) {
                    self.gradients.release();
                }
                accumulated?
            }
        };
        stats.loss /= stats.target_tokens as f64;
        Ok(accumulated)
    }

    fn accumulate_whole(
        &mut self,
        micro_batches: impl Iterator<Item = Result<MicroBatch>>,
        cx: &StepContext,
        stats: &mut StepStats,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Accumulated>> {
        // Whatever an interrupted step left behind is discarded here.
        self.gradients.clear();
        for micro_batch in micro_batches {
            if interrupted() {
                return Ok(None);
            }
            let loss = self.model.forward_backward_unless(&micro_batch?, cx, &mut self.gradients, interrupted)?;
            let Some(loss) = loss else { return Ok(None) };
            stats.loss += loss;
        }
        let mut sums = vec![None; self.model.parameters().len()];
        for (index, gradient) in self.gradients.iter() {
            sums[index] = Some(SquareSums::of(gradient)?);
        }
        stats.grad_norm = norm(&sums);
        Ok(Some(Accumulated::Whole(sums)))
    }

    /// Forward, and the pass of backward that takes the norm.
    fn accumulate_by_layer(
        &mut self,
        micro_batches: impl Iterator<Item = Result<MicroBatch>>,
        cx: &StepContext,
        layers: &LayerMajor,
        stats: &mut StepStats,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Accumulated>> {
        // Accumulators of an earlier plan would stay beside the blocks'.
        self.gradients.release();
        let micro_batches = micro_batches.collect::<Result<Vec<_>>>()?;
        let (model, gradients) = (&self.model, &mut self.gradients);
        let Some(mut pass) =
            model.layer_major_forward(micro_batches, cx, layers, &self.offload, gradients, interrupted)?
        else {
            return Ok(None);
        };
        stats.loss = pass.loss_sum();
        let mut sums = vec![None; model.parameters().len()];
        let mut measure = |index: usize, gradients: &Gradients| -> Result<()> {
            sums[index] = gradients.get(index).map(SquareSums::of).transpose()?;
            Ok(())
        };
        if !model.layer_major_backward(&mut pass, Stage::Measure, gradients, interrupted, &mut measure)? {
            return Ok(None);
        }
        stats.grad_norm = norm(&sums);
        Ok(Some(Accumulated::Layers(Box::new(pass), sums)))
    }

    /// The second pass: every gradient is used as soon as it is complete. False when interrupted before the first was;
    /// after that the pass goes to its end, because a step is made whole or not at all.
    fn apply_by_layer(
        &mut self,
        mut pass: Box<LayerPass>,
        sums: &[Option<SquareSums>],
        learning_rate: f64,
        scale: f64,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        if interrupted() {
            return Ok(false);
        }
        let (model, adafactor) = (&self.model, &self.adafactor);
        let is_changed = Cell::new(false);
        let mut update = |index: usize, gradients: &Gradients| {
            is_changed.set(true);
            match (gradients.get(index), &sums[index]) {
                (Some(gradient), Some(sums)) => model
                    .change(index, |values| adafactor.update_one(index, values, gradient, sums, learning_rate, scale)),
                _ => Ok(()),
            }
        };
        let interrupted = || !is_changed.get() && interrupted();
        let is_done =
            model.layer_major_backward(&mut pass, Stage::Apply, &mut self.gradients, &interrupted, &mut update)?;
        if is_done {
            self.adafactor.finish_update();
        }
        Ok(is_done)
    }

    /// The micro-batches of a batch with these lengths: no larger than the plan's, and no larger than is any use.
    fn cut(&self, lengths: &[(usize, usize)], plan: &StepPlan) -> Vec<Vec<usize>> {
        let Some((source_tokens, target_tokens)) = plan.longest else {
            return micro_batches::cut(lengths, plan.levers.micro_batch_samples);
        };
        let training_bytes = self.model.training_bytes(&self.gradients);
        let bytes = |shape: Shape| {
            training_bytes(&Pass {
                shape,
                activations: self.options.precision.activations(),
                gradients: self.options.gradient_dtype(),
                recompute_blocks: plan.levers.recompute_blocks,
                loss_chunk_rows: plan.levers.loss_chunk_rows,
                dropout: self.options.dropout > 0.0,
            })
        };
        let most = bytes(Shape { samples: plan.levers.micro_batch_samples, source_tokens, target_tokens });
        micro_batches::cut_within(lengths, &|samples, (source_tokens, target_tokens)| {
            bytes(Shape { samples, source_tokens, target_tokens }) <= most
        })
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

/// The global L2 norm, summed in the parameters' order.
fn norm(sums: &[Option<SquareSums>]) -> f64 {
    sums.iter().flatten().map(SquareSums::total).sum::<f64>().sqrt()
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
}
