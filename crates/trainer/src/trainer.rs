//! A step: an exact update of the parameters from an optimizer batch.
//!
//! Invariants:
//! * The cut of a batch into micro-batches changes only the order of summation: the loss is divided by the target
//!   tokens of the whole batch, and dropout depends on a sample's index in it.
//! * Parameters and optimizer state change only after the whole batch's gradient is known and finite. An interrupted step,
//!   an empty batch and a non-finite step change neither by a bit.
//! * Every batch handed in counts as one step, whatever its outcome, so the step number is the position in the data and
//!   in the schedule.
//! * The next state depends on `(options, batches so far)` alone, up to rounding: on no clock, thread count or memory. The same
//!   bits also take the same [`StepPlan`]s, which cut a batch, and the same kernels ([`t5_ops::instruction_set`],
//!   [`t5_ops::KERNELS_VERSION`]). The number of threads changes no bit.
//!
//! ```no_run
//! # fn example(model: t5::T5, sources: Vec<Vec<u32>>, targets: Vec<Vec<u32>>) -> Result<(), trainer::Error> {
//! use trainer::{Batch, Levers, StepOutcome, StepPlan, Trainer, TrainerOptions};
//! let mut trainer = Trainer::new(model, TrainerOptions::default())?;
//! let levers = Levers { micro_batch_samples: 4, recompute_blocks: 0, loss_chunk_rows: 256, layer_major: None, ..Levers::default() };
//! let plan = StepPlan { levers, longest: None };
//! let batch = Batch { sources: &sources, targets: &targets };
//! match trainer.step(&batch, &plan, &|| false)? {
//!     StepOutcome::Done(stats) => assert!(stats.loss.is_finite()),
//!     StepOutcome::Skipped(_) | StepOutcome::Empty(_) | StepOutcome::Interrupted => {}
//! }
//! # Ok(())
//! # }
//! ```

mod cutting;
mod frozen;

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use candle_core::Tensor;
use t5::step::count::{Counter, Precisions};
use t5::{Files, Gradients, Head, Levers, MicroBatch, StepContext, T5};
use t5_ops::TokenLoss;

use crate::error::{Error, Result};
use crate::kept_logits::KeptLogits;
use crate::optimizer::Optimizer;
use crate::options::{MasterWeights, TrainerOptions};
use crate::parallel::{Parallel, Sharding, Share};
use crate::ranking::RowLabels;
use crate::state::TrainerState;
use crate::stats::{Score, StepOutcome, StepStats};
use crate::update::{Update, Verdict};
use crate::{freeze, groups, state};

/// An optimizer batch as token ids, EOS included; `sources[i]` goes with `targets[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Input of the encoder.
    pub sources: &'a [Vec<u32>],
    /// The output that the decoder learns.
    pub targets: &'a [Vec<u32>],
}

/// How a step is carried out. The available memory decides; the mathematics does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// How the step is cut, and which tensors are recomputed.
    pub levers: Levers,
    /// The longest source and target, in tokens, for which [`Levers::micro_batch_samples`] was chosen. A micro-batch of
    /// shorter samples has more of them, as long as it holds no more bytes; one of longer samples has fewer. `None`: always
    /// `micro_batch_samples`, whatever their lengths.
    pub longest: Option<(usize, usize)>,
}

/// A model and everything that trains it.
pub struct Trainer {
    pub(crate) model: T5,
    pub(crate) options: TrainerOptions,
    pub(crate) optimizer: Optimizer,
    gradients: Gradients,
    /// Counts the bytes that a micro-batch holds.
    counter: Counter,
    /// The files of activations and gradients that do not stay in memory.
    offload: Files,
    /// The processes of this training.
    parallel: Option<Parallel>,
    /// A model beside the trained one, which is only read.
    pub(crate) frozen: Option<Rc<T5>>,
    /// The file in which a teacher's largest logits are kept.
    kept_logits: Option<RefCell<KeptLogits>>,
    step: u64,
    non_finite_in_a_row: u32,
    last_score: Option<Score>,
    best_score: Option<Score>,
    scored_by: String,
}

impl Trainer {
    /// A trainer at step 0.
    ///
    /// # Errors
    /// Invalid options; an unknown item in `freeze`; a failed allocation of the optimizer's state.
    pub fn new(model: T5, options: TrainerOptions) -> Result<Self> {
        options.validate()?;
        let names: Vec<&str> = model.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
        let trainable = freeze::trainable(names.iter().copied(), &options.freeze, model.config().lora.as_ref())?;
        let mut optimizer = Optimizer::new(options.optimizer, model.parameters(), &trainable)?;
        optimizer.set_groups(groups::of_each(&names, &trainable, &options.groups)?);
        if options.master_weights == MasterWeights::StochasticRounding {
            optimizer.round_stochastically(options.seed);
        }
        let names = model.parameters().iter().zip(&trainable).filter(|(_, trains)| **trains);
        let trained: HashSet<&str> = names.map(|(parameter, _)| parameter.name.as_str()).collect();
        let is_trained = |parameter: &t5::Parameter| trained.contains(parameter.name.as_str());
        let gradients = Gradients::new(model.parameters(), options.gradient_dtype(), &is_trained);
        options.validate_for(model.config(), &trained)?;
        let precisions = Precisions {
            parameters: options.parameter_dtype(),
            activations: options.precision.activations(),
            gradients: options.gradient_dtype(),
        };
        let counter =
            Counter::new(model.config(), precisions, options.dropout, &|spec| trained.contains(spec.name.as_str()))?
                .minimising(options.token_loss());
        let counter = if options.weighs_samples() { counter.weighing_samples() } else { counter };
        let counter = if options.class_weights.is_empty() { counter } else { counter.weighing_classes() };
        let counter = match &options.contrastive {
            Some(of) => counter.pulling_vectors(of.pooling),
            None => counter,
        };
        // Micro-batches are compared by the bytes that they hold on the device that computes them.
        let counter = if model.device().is_cpu() { counter } else { counter.on_device(&|_| [0; 2]) };
        Ok(Trainer {
            model,
            options,
            optimizer,
            gradients,
            counter,
            offload: Files::in_directory(&std::env::temp_dir()),
            parallel: None,
            frozen: None,
            kept_logits: None,
            step: 0,
            non_finite_in_a_row: 0,
            last_score: None,
            best_score: None,
            scored_by: state::loss(),
        })
    }

    /// Sets the directory of files of activations and gradients, for plans that need them. The default is the system's own.
    pub fn offload_to(&mut self, files: Files) {
        self.offload = files;
    }

    /// Makes every step from now on together with other processes, which have the same model, options and state. Called before
    /// the first step.
    ///
    /// # Errors
    /// The device reports an error.
    pub fn join(&mut self, mut parallel: Parallel, sharding: Sharding) -> Result<()> {
        parallel.reach(self.model.device())?;
        parallel.assign_owners(sharding, self.model.parameters(), |index| self.gradients.is_trainable(index));
        self.optimizer.keep(|index| parallel.updates(index));
        // The parameters that train beside a frozen base are small.
        if sharding == Sharding::Weights && self.model.config().lora.is_none() {
            let weight_pager =
                parallel.share_weights(self.model.parameters(), |index| self.gradients.is_trainable(index))?;
            self.model.page_with(weight_pager);
        }
        self.parallel = Some(parallel);
        Ok(())
    }

    /// Sends the part of the model and of the optimizer's state that only this process holds, while another process saves.
    ///
    /// # Errors
    /// [`Error::Processes`].
    pub fn serve_state(&self) -> Result<()> {
        self.model.serve_weights()?;
        self.sharded_optimizer().map_or(Ok(()), |parallel| self.each_state(parallel, |_| Ok(())))
    }

    /// The processes, if each holds a part of the optimizer's state.
    pub(crate) fn sharded_optimizer(&self) -> Option<&Parallel> {
        self.parallel.as_ref().filter(|parallel| parallel.owner(0).is_some())
    }

    /// The distributed optimizer's state in the order of its file: wider tensors first, parameter by parameter. Every process has to ask.
    pub(crate) fn each_state(
        &self,
        parallel: &Parallel,
        mut take: impl FnMut(Vec<(String, Tensor)>) -> Result<()>,
    ) -> Result<()> {
        let trained = || (0..).zip(self.model.parameters()).filter(|(index, _)| self.gradients.is_trainable(*index));
        for width in self.optimizer.widths(trained().map(|(_, parameter)| parameter)) {
            for (index, parameter) in trained() {
                take(self.optimizer.state_of(index, parameter, width, parallel)?)?;
            }
        }
        Ok(())
    }

    /// The processes of this training.
    pub fn parallel(&self) -> Option<&Parallel> {
        self.parallel.as_ref()
    }

    /// Makes one optimizer step of `batch`, `plan.micro_batch_samples` at a time.
    ///
    /// `interrupted` is asked before every block of every micro-batch, up to the first change of a parameter; `true`
    /// discards the gradients and ends the step.
    ///
    /// # Errors
    /// [`Error::BatchShape`]; [`Error::Diverged`] at the `max_non_finite`-th non-finite step in a row; errors of the model,
    /// such as token ids outside the vocabulary. All of these leave parameters and state unchanged. The exception is a file of
    /// block inputs or gradients that cannot be read back in the second pass of a layer-major step: the trainer is then
    /// unusable.
    pub fn step(&mut self, batch: &Batch, plan: &StepPlan, interrupted: &dyn Fn() -> bool) -> Result<StepOutcome> {
        self.step_of_shards(batch, &[batch.sources.len()], plan, interrupted)
    }

    /// As [`Trainer::step`], where `batch` is the share of this process. `shards` has the number of samples of each of its shards, which
    /// follow each other. Numbers of the outcome are those of the whole batch.
    ///
    /// # Errors
    /// As [`Trainer::step`]; several shards whose gradients would wait in a file; [`Error::Processes`]. If the device of one process
    /// has no memory before the decision, every process returns [`Error::DeviceMemory`] or [`Error::DeviceMemoryElsewhere`], and may
    /// repeat the step with another plan.
    pub fn step_of_shards(
        &mut self,
        batch: &Batch,
        shards: &[usize],
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<StepOutcome> {
        self.step_of_labels((batch, RowLabels::default()), shards, plan, interrupted)
    }

    /// As [`Trainer::step_of_shards`], where samples have labels, if the loss is one of labels.
    ///
    /// # Errors
    /// As [`Trainer::step_of_shards`].
    pub fn step_of_labels<'a>(
        &mut self,
        (batch, labels): (&Batch, impl Into<RowLabels<'a>>),
        shards: &[usize],
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<StepOutcome> {
        let labels = labels.into();
        if batch.sources.len() != batch.targets.len() {
            return Err(Error::BatchShape { sources: batch.sources.len(), targets: batch.targets.len() });
        }
        let of_texts = self.options.contrastive.as_ref().map(|of| self.texts(of, batch, shards));
        match &of_texts {
            None => self.step_of_samples((batch, labels), shards, plan, interrupted),
            Some((texts, shards)) => self.step_of_samples((&texts.batch(), labels), shards, plan, interrupted),
        }
    }

    /// As [`Trainer::step_of_labels`], for a batch of what the model reads: samples, or single texts.
    fn step_of_samples(
        &mut self,
        (batch, labels): (&Batch, RowLabels),
        shards: &[usize],
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<StepOutcome> {
        check_plan(plan, shards)?;
        let (cut, of_shards) = self.cut_of_shards(batch, shards, plan);
        let share = self.share(batch, &cut, interrupted)?;
        let mut stats = self.stats(&share);
        if share.is_interrupted {
            return Ok(StepOutcome::Interrupted);
        }
        if share.samples == 0 {
            self.step += 1;
            return Ok(StepOutcome::Empty(stats));
        }
        let own = (&cut[..], share.first_sample);
        let holds_copies = self.follow(plan)?;
        // Without others, the pass may end here; with others, all end together.
        let stops = || self.parallel.is_none() && interrupted();
        let cx = self.step_context(plan, stats.target_tokens);
        let known = self.passes_before((batch, labels), own, (shards, plan, &cx), &stops)?;
        let Some(mut known) = known else { return Ok(StepOutcome::Interrupted) };
        let layers = plan.levers.layer_major.as_ref();
        match layers {
            // An interrupted step may have left part of a gradient.
            None => self.gradients.clear(),
            // Accumulators of an earlier plan would stay beside the blocks'.
            Some(_) => self.gradients.release(),
        }
        let rates = (stats.lr, self.options.grad_clip_norm);
        let update = Update::new(&self.model, &self.optimizer, rates, stats.target_tokens, interrupted);
        // Layer by layer, a gradient's memory is used for others before the gradient is applied.
        let mut update = update.keeping_gradients(layers.is_none());
        if let Some(parallel) = &self.parallel {
            let shards = parallel.own_shards().zip(of_shards).collect();
            update = update.among(parallel, shards, share.max_micro_batches);
            parallel.begin_step();
        }
        let graph_micro_batches = self.model.micro_batches_as_graphs();
        let micro_batches = holds_copies.and_then(|()| self.micro_batches(batch, own, &mut known));
        let result = micro_batches
            .and_then(|of| self.model.step(&of, &cx, layers, &self.offload, &mut self.gradients, &mut update))
            .and_then(|is_made| update.complete().map(|()| is_made));
        let has_others = self.parallel.as_ref().is_some_and(|parallel| parallel.group().size() > 1);
        let result = match result {
            Err(error) if has_others && !update.has_decided && error.is_of_device_memory() => {
                let requests = self.model.collective_requests(cut.len(), &cx, layers, &self.gradients, &mut update);
                update.give_up(&requests, &mut self.gradients)?;
                Err(error.before_any_change())
            }
            Err(error) if !has_others && !update.is_changed => Err(error.before_any_change()),
            result => result,
        };
        let verdict = update.verdict;
        (stats.loss, stats.grad_norm) = (update.loss, update.grad_norm);
        let has_objective = cx.token_loss != TokenLoss::default()
            || self.options.distillation.is_some()
            || !self.options.class_weights.is_empty();
        stats.objective = has_objective.then_some(update.objective);
        known.note(&mut stats);
        stats.graph_micro_batches = (self.model.micro_batches_as_graphs() - graph_micro_batches) as usize;
        if layers.is_some() {
            // Layer by layer, no gradient stays after its step, however the step ends.
            self.gradients.release();
        }
        if result.as_ref().is_err_and(Error::is_of_device_memory) && !has_others && self.model.stop_repeating() {
            tracing::warn!("the device had no memory left; from here on micro-batches are launched kernel by kernel");
            return self.step_of_samples((batch, labels), shards, plan, interrupted);
        }
        self.finish(result?, verdict, stats)
    }

    /// The numbers of a step that are known before it.
    fn stats(&self, share: &Share) -> StepStats {
        let factor = self.options.schedule.factor(self.step, self.options.total_steps);
        StepStats {
            step: self.step + 1,
            loss: 0.0,
            objective: None,
            preference: None,
            contrastive: None,
            ranking: None,
            lr: self.options.optimizer.resolved_learning_rate(self.optimizer.updates(), factor),
            grad_norm: 0.0,
            target_tokens: share.target_tokens,
            source_tokens: share.source_tokens,
            padded_tokens: share.padded_tokens,
            micro_batches: share.micro_batches as usize,
            graph_micro_batches: 0,
        }
    }

    /// Puts weights and moments where a plan has them. Returns whether copies of the weights could be held: only the step may say so, since it
    /// tells the other processes.
    fn follow(&mut self, plan: &StepPlan) -> Result<Result<()>> {
        let weight_blocks_in_memory = plan.levers.weight_blocks_in_memory();
        let weights_by_matrix = plan.levers.has_weights_by_matrix();
        let weights = Files { weight_blocks_in_memory, weights_by_matrix, ..self.offload.clone() };
        self.model.move_weights(plan.levers.has_weights_on_disk().then_some(&weights))?;
        self.optimizer.move_moments(plan.levers.has_optimizer_on_disk().then_some(&self.offload))?;
        let holds_copies = self.model.hold_copies(plan.levers.weight_copies);
        self.model.repeat_micro_batches(plan.levers.repeats);
        Ok(holds_copies.map_err(Error::from))
    }

    fn step_context(&self, plan: &StepPlan, target_tokens: u64) -> StepContext {
        StepContext {
            seed: self.options.seed,
            step: self.step,
            dropout: self.options.dropout,
            adapter_dropout: self.model.config().lora.as_ref().map_or(0.0, |lora| lora.dropout),
            activations: self.options.precision.activations(),
            recompute_blocks: plan.levers.recompute_blocks,
            loss_chunk_rows: plan.levers.loss_chunk_rows,
            target_tokens,
            token_loss: self.options.token_loss(),
        }
    }

    /// Counts a step that went through its batch, and tells its outcome.
    fn finish(&mut self, is_made: bool, verdict: Verdict, stats: StepStats) -> Result<StepOutcome> {
        match (is_made, verdict) {
            (true, _) => {
                self.optimizer.finish_update();
                self.model.refresh_copies()?;
                self.step += 1;
                self.non_finite_in_a_row = 0;
                return Ok(StepOutcome::Done(stats));
            }
            (false, Verdict::Interrupted | Verdict::Made) => return Ok(StepOutcome::Interrupted),
            (false, Verdict::LacksMemory) => return Err(Error::DeviceMemoryElsewhere),
            (false, Verdict::NotFinite) => {}
        }
        self.step += 1;
        self.non_finite_in_a_row += 1;
        if self.non_finite_in_a_row >= self.options.max_non_finite {
            return Err(Error::Diverged { in_a_row: self.non_finite_in_a_row, stats: Box::new(stats) });
        }
        Ok(StepOutcome::Skipped(stats))
    }

    /// The gradients of the last batch, unclipped. For tests and diagnosis.
    pub fn gradients(&self) -> &Gradients {
        &self.gradients
    }

    /// Gives back device memory that this process holds and does not use.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn release_unused_of_device(&self) -> Result<()> {
        Ok(cuda_device::release_unused_of_device(self.model.device())?)
    }

    /// Frees the gradients' memory until the next step, for evaluation and saving under a tight budget. Also frees the host memory in which
    /// tensors wait that are not on the card during a step.
    pub fn release_gradients(&mut self) {
        self.gradients.release();
        self.model.release_micro_batches();
        cuda_device::pinned_copies::release_unused();
    }

    /// The number of batches that were stepped, including skipped and empty ones.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// The number of steps since the last update, all of them skipped as not finite.
    pub fn non_finite_in_a_row(&self) -> u32 {
        self.non_finite_in_a_row
    }

    /// Whether `total_steps` have been made.
    pub fn is_done(&self) -> bool {
        self.step >= self.options.total_steps
    }

    /// The learning rate of the next step, before Adafactor's `scale_parameter`.
    pub fn learning_rate(&self) -> f64 {
        let factor = self.options.schedule.factor(self.step, self.options.total_steps);
        self.options.optimizer.resolved_learning_rate(self.optimizer.updates(), factor)
    }

    /// The model being trained.
    pub fn model(&self) -> &T5 {
        &self.model
    }

    /// The options that the trainer was made with.
    pub fn options(&self) -> &TrainerOptions {
        &self.options
    }

    /// The optimizer and its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Notes the score of the current parameters (larger is better). Returns whether it is the best so far.
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

    /// Sets the measure of later scores, which is the loss at first. Scores of another measure are dropped.
    pub fn score_by(&mut self, measure: &str) {
        if self.scored_by != measure {
            (self.last_score, self.best_score) = (None, None);
            measure.clone_into(&mut self.scored_by);
        }
    }

    /// The measure of the scores.
    pub fn scored_by(&self) -> &str {
        &self.scored_by
    }

    /// The best score so far.
    pub fn best_score(&self) -> Option<Score> {
        self.best_score
    }

    /// Everything that a checkpoint holds beside tensors, with the caller's own state.
    pub(crate) fn state(&self, caller: serde_json::Value) -> TrainerState {
        TrainerState {
            format: TrainerState::FORMAT,
            step: self.step,
            updates: self.optimizer.updates(),
            non_finite_in_a_row: self.non_finite_in_a_row,
            score: self.last_score.filter(|score| score.step == self.step).map(|score| score.value),
            best_score: self.best_score,
            scored_by: self.scored_by.clone(),
            options: self.options.clone(),
            caller,
        }
    }

    /// Sets step, scores and counters to those of `state`. The caller restores the optimizer's tensors.
    pub(crate) fn set_state(&mut self, state: &TrainerState) {
        self.step = state.step;
        self.non_finite_in_a_row = state.non_finite_in_a_row;
        self.best_score = state.best_score;
        self.scored_by.clone_from(&state.scored_by);
        self.last_score = state.score.map(|value| Score { value, step: state.step });
    }
}

fn check_plan(plan: &StepPlan, shards: &[usize]) -> Result<()> {
    if plan.levers.micro_batch_samples == 0 {
        return Err(Error::invalid_option("memory.micro_batch_samples", "at least 1", 0));
    }
    if shards.len() > 1 && plan.levers.layer_major.is_some_and(|layers| layers.gradients_on_disk) {
        let expected = "`memory` beside more virtual shards than processes";
        return Err(Error::invalid_option("memory.gradient_offload", expected, "disk"));
    }
    Ok(())
}

/// Source and target tokens of each sample.
pub(crate) fn lengths(batch: &Batch, head: &Head) -> Vec<(usize, usize)> {
    batch.sources.iter().zip(batch.targets).map(|(source, target)| head.lengths(source.len(), target.len())).collect()
}

/// The micro-batch of some samples of a share. Each sample keeps its index in the whole batch, where the share begins at `first`.
pub(crate) fn gather(batch: &Batch, samples: &[usize], first: usize, model: &T5) -> Result<MicroBatch> {
    let sources: Vec<&[u32]> = samples.iter().map(|&i| batch.sources[i].as_slice()).collect();
    let targets: Vec<&[u32]> = samples.iter().map(|&i| batch.targets[i].as_slice()).collect();
    let indices: Vec<u32> = samples.iter().map(|&i| (first + i) as u32).collect();
    Ok(MicroBatch::new(&sources, &targets, &indices, model.config(), model.device())?)
}

fn count_tokens(lists: &[Vec<u32>]) -> u64 {
    lists.iter().map(|ids| ids.len() as u64).sum()
}

#[cfg(test)]
mod tests;
