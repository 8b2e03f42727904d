//! The parts of a run, and the work between two steps.
//!
//! [`crate::run::train`] is the loop; this module has its verbs: replan, record, evaluate, save, finish. A run's `position` in the data is the
//! end of the samples of all steps so far. It moves only when a step is made, so a checkpoint never counts a batch that was fetched but not
//! used.

mod agreement;
mod disk_needs;
mod divergence;
mod evaluating;
mod first_model;
mod graph_micro_batches;
mod oom_recovery;
mod prediction;
mod saving;
mod start;
mod step_times;

use std::time::Instant;

use collective::{CommunicationStats, Group};
use dataloader::{DataLoader, Position};
use memory_policy::{Budgets, Bytes, Change, Probe, SystemProbe};
use planner::{Costs, MICRO_BATCH_SAMPLES, Plan};
use serde_json::{Value, json};
use trainer::checkpoint::Checkpoints;
use trainer::{StepOutcome, StepPlan, StepStats, Trainer};

pub use self::first_model::FirstModel;
pub use self::start::Parts;
pub use self::step_times::{StepTimes, copies_so_far};
use crate::config::Config;
use crate::failure::Outcome;
use crate::files::metrics::{number, rows_digest};
use crate::files::run_dir::RunDir;
use crate::job;
use crate::machine::ledger::Reservation;
use crate::model::sources::Sources;
use crate::run::bits;
use crate::run::open::Opened;
use crate::run::saved::History;
use crate::run::views::Log;
use crate::scores::figures;
use crate::screen::progress::StepLine;
use crate::screen::report::Report;
use crate::screen::stop::Stop;
use disk_needs::DiskNeeds;
use graph_micro_batches::GraphLaunchCheck;
use prediction::Prediction;
use step_times::milliseconds;

/// A plan that the policy proposes between two steps.
type Replanned = memory_policy::Replanned<planner::Step, planner::Feeding>;

/// A run.
pub struct Session {
    /// The resolved config.
    pub config: Config,
    /// The open data, tokenizer and model files.
    pub opened: Opened,
    /// The output directory.
    pub run: RunDir,
    /// The request to stop, if any.
    pub stop: Stop,
    /// The plan that the next step follows.
    pub plan: Plan,
    /// The trainer.
    pub trainer: Trainer,
    /// The loader.
    pub loader: DataLoader,
    /// Progress for a person.
    pub report: Report,
    probe: SystemProbe,
    machine: Box<dyn Probe>,
    is_hopeless: bool,
    prediction: Prediction,
    costs: Costs,
    budgets: Budgets,
    scope: bits::Scope,
    log: Log,
    checkpoints: Checkpoints,
    position: Position,
    history: History,
    sources: Sources,
    /// Steps made before this process.
    first_step: u64,
    saved_step: Option<u64>,
    saved_at: Instant,
    /// Parts of the data's pages that the kept page map includes.
    kept_segments: u64,
    /// The peak that was last shown to the user.
    shown_peak: Bytes,
    graph_micro_batches: GraphLaunchCheck,
    /// The processes of this run, if there are several.
    group: Option<Group>,
    agreed: agreement::Agreed,
    /// The communication with them until the last step.
    spent: CommunicationStats,
    /// The ledger entry, under `--wait`.
    reserved: Option<(Reservation, DiskNeeds)>,
}

impl Session {
    /// Checks the memory. Follows another plan if the current one no longer fits, or if a faster one does.
    pub fn replan(&mut self) -> Outcome<()> {
        let now = self.machine.snapshot()?;
        let mut replanned = memory_policy::replan(&now, &self.costs, self.budgets, &self.plan);
        self.agree(&now, &mut replanned)?;
        self.follow(replanned)
    }

    /// Follows a plan, and reports the change.
    fn follow(&mut self, replanned: Replanned) -> Outcome<()> {
        let was = std::mem::replace(&mut self.plan, replanned.plan);
        if replanned.is_hopeless && !self.is_hopeless {
            self.is_hopeless = true;
            let step = self.trainer.step_count();
            let text = "the machine is swapping even with the smallest plan; the run saves and stops, so resume when memory is free";
            self.warn(text, json!({"step": step, "kind": "swapping"}))?;
        }
        if let (Some(_), Some((reserved, disk))) = (&replanned.change, &self.reserved) {
            reserved.set(&self.plan, &disk.for_plan(&self.machine.snapshot()?, &self.plan)?)?;
        }
        if let Some(change) = replanned.change {
            let differences = bits::of_levers(&was.step.levers, &self.plan.step.levers, self.scope);
            let mut line = format!("new plan: {change}; {}", self.plan.bill.conclusion);
            if !differences.is_empty() {
                line += "; from here on the bits differ from a run with one plan: ";
                line += &bits::in_words(&differences);
            }
            self.report.line(&line);
            if !matches!(change, Change::Grown { .. }) {
                // The allocator would reuse pages of the larger plan's steps and never return them.
                cuda_device::pinned_copies::release_unused();
                heap::release_unused();
            }
            let step = self.trainer.step_count();
            let (is_too_large, reason) = (matches!(change, Change::DoesNotFit { .. }), change.to_string());
            let (followed, bits) = (job::plan_json(&self.plan), bits::to_json(&differences));
            self.note_event(
                "replan",
                json!({"step": step, "reason": change, "reason_text": reason, "plan": followed, "bits": bits}),
            );
            if self.config.run.deterministic && is_too_large {
                self.is_hopeless = true;
                let text = format!(
                    "{reason}; `run.deterministic` does not allow another cut of the batch; the run saves and stops, so resume when memory is free"
                );
                self.warn(&text, json!({"step": step, "kind": "bits"}))?;
            }
        }
        self.prediction.follow(&self.plan);
        Ok(())
    }

    /// Whether the run should stop now: on request, or because the machine has no memory for it. Several processes stop when all of them
    /// know.
    pub fn should_stop(&self) -> bool {
        match self.group {
            Some(_) => self.agreed.stop || self.is_hopeless,
            None => self.stop.requested() || self.is_hopeless,
        }
    }

    /// The plan's values for the trainer.
    pub fn step_plan(&self) -> StepPlan {
        let data = &self.config.data;
        // A pinned number of samples is exact.
        let is_pinned = self.config.memory.pins.value(MICRO_BATCH_SAMPLES.name).is_some();
        let longest =
            (!is_pinned).then(|| self.opened.model.head.lengths(data.max_source_tokens, data.max_target_tokens));
        StepPlan { levers: self.plan.step.levers, longest }
    }

    /// Passes the plan's limits to the loader.
    pub fn feed(&mut self) {
        self.opened.train.set_residency(self.plan.loader.residency.of_dataset());
        self.loader.set_limits(self.plan.loader.limits());
    }

    /// If nothing is made ahead, this thread has tokenized. Frees its small blocks before a step: they never make room for a tensor.
    pub fn free_tokenizer_blocks(&self) {
        let dataloader::LoaderLimits { prefetch_batches, decode_threads } = self.loader.limits();
        if prefetch_batches.min(decode_threads) == 0 {
            heap::release_small();
        }
    }

    /// Records the outcome of a batch. Returns false if the step was interrupted and does not count.
    pub fn record(&mut self, outcome: StepOutcome, batch: &dataloader::Batch, took: &StepTimes) -> Outcome<bool> {
        let (stats, kind) = match outcome {
            StepOutcome::Interrupted => return Ok(false),
            StepOutcome::Done(stats) => (stats, "done"),
            StepOutcome::Skipped(stats) => (stats, "skipped"),
            StepOutcome::Empty(stats) => (stats, "empty"),
        };
        self.stop.note_step(stats.step);
        self.position = batch.position_after;
        let now = self.probe.snapshot()?;
        let tokens = stats.source_tokens + stats.target_tokens;
        #[expect(clippy::cast_precision_loss, reason = "tokens of a batch are far below 2^53")]
        let tokens_per_second = tokens as f64 / (took.step + took.data_wait).as_secs_f64().max(1e-9);
        let mut line = json!({
            "step": stats.step, "epoch": batch.epoch, "loss": number(stats.loss), "lr": stats.lr,
            "grad_norm": number(stats.grad_norm), "target_tokens": stats.target_tokens,
            "source_tokens": stats.source_tokens, "tokens_per_second": tokens_per_second,
            "step_ms": milliseconds(took.step), "data_wait_ms": milliseconds(took.data_wait),
            "micro_batches": stats.micro_batches, "rss_bytes": now.rss.0, "peak_rss_bytes": now.peak_rss.0,
            "predicted_peak_bytes": self.plan.predicted_peak.0, "samples": batch.rows.len(),
            "padded_tokens": stats.padded_tokens, "rows": rows_digest(&batch.rows),
            "cut_sources": batch.cut_sources, "cut_targets": batch.cut_targets,
            "lossy_sources": batch.lossy.sources, "lossy_targets": batch.lossy.targets,
            "longest_source": longest(&batch.sources), "longest_target": longest(&batch.targets),
            "available_bytes": now.ceiling().0, "file_wait_ms": milliseconds(took.files.waited),
        });
        took.add_to(&mut line);
        if let Some(mixture) = &self.opened.mixture {
            let mut counts = vec![0_u64; mixture.tasks().len()];
            batch.rows.iter().for_each(|row| counts[mixture.task_of(*row)] += 1);
            let named = mixture.tasks().iter().zip(counts).map(|(task, count)| (task.name.clone(), json!(count)));
            line["tasks"] = Value::Object(named.collect());
        }
        if let Some(objective) = stats.objective {
            line["objective"] = json!(number(objective));
        }
        if let Some(preference) = &stats.preference {
            figures::preference_json(preference, &mut line);
        }
        if let Some(contrastive) = &stats.contrastive {
            contrastive.accuracy.into_iter().for_each(|share| line["in_batch_accuracy"] = json!(number(share)));
        }
        if self.plan.step.levers.repeats {
            line["graph_micro_batches"] = json!(stats.graph_micro_batches);
        }
        self.add_device(&now, &mut line);
        let pressure = [now.pressure, now.group_pressure].into_iter().flatten().map(|waits| waits.some_percent);
        pressure.reduce(f64::max).into_iter().for_each(|percent| line["pressure_percent"] = json!(percent));
        if kind != "done" {
            line[kind] = json!(true);
        }
        self.add_communication(&mut line);
        self.note_event("step", line);
        self.note_skipped(&stats, kind)?;
        self.note_graphs(&stats)?;
        self.note_bad_rows(batch)?;
        self.note_lossy_texts(batch)?;
        #[expect(clippy::cast_precision_loss, reason = "rows are far below 2^53")]
        let of_epoch = batch.position_after.sample as f64 / self.loader.samples_per_epoch().max(1) as f64;
        self.report.step(&StepLine {
            step: stats.step,
            epoch: batch.position_after.epoch as f64 + of_epoch,
            loss: stats.loss,
            gradient_norm: stats.grad_norm,
            learning_rate: stats.lr,
            tokens,
            took: took.step + took.data_wait,
            rss: now.rss,
            budget: self.config.memory.budget.map(|_| self.plan.budget),
            on_device: now.device.as_ref().map(|device| device.used),
        });
        Ok(true)
    }

    fn note_skipped(&mut self, stats: &StepStats, kind: &str) -> Outcome<()> {
        match kind {
            "skipped" => {
                self.history.skipped_steps += 1;
                self.warn(
                    &format!(
                        "step {}: loss {}, gradient norm {}: not finite; the update was skipped",
                        stats.step, stats.loss, stats.grad_norm
                    ),
                    json!({"step": stats.step, "kind": "non_finite", "loss": number(stats.loss), "grad_norm": number(stats.grad_norm)}),
                )
            }
            "empty" => self.warn(
                &format!("step {}: every row of the batch was skipped, so there is no update", stats.step),
                json!({"step": stats.step, "kind": "empty_batch"}),
            ),
            _ => Ok(()),
        }
    }

    /// Issues a warning, for the user and in the metrics.
    pub fn warn(&mut self, text: &str, mut fields: Value) -> Outcome<()> {
        self.report.warn(text);
        fields["message"] = json!(text);
        self.note_event("warning", fields);
        Ok(())
    }

    /// Writes a line to the metrics. If that fails, the run continues, and warns once.
    fn note_event(&mut self, event: &str, fields: Value) {
        self.log.record(event, fields).for_each(|warning| self.report.warn(&warning));
        // Only while the directory still belongs to this run.
        let shows = matches!(event, "eval" | "checkpoint" | "end") && self.run.check().is_ok();
        if let Some(warning) = shows.then(|| self.log.write_page()).flatten() {
            self.report.warn(&warning);
        }
    }

    /// Returns freed memory to the system: every N steps if the config pins N. Otherwise small blocks if they would exceed the prediction
    /// in the next step, and all unused memory if it would exceed the budget.
    ///
    /// Pages of tensors are reused and never exceed their own peak, so only small blocks can accumulate. They are the cheapest to allocate
    /// again.
    pub fn clear_cache(&self) -> Outcome<()> {
        if let Some(every) = self.config.memory.clear_cache_every_steps {
            if every > 0 && self.trainer.step_count().is_multiple_of(every) {
                heap::release_unused();
            }
            return Ok(());
        }
        let limits = [self.plan.predicted_peak.min(self.plan.budget), self.plan.budget];
        for (release, limit) in [heap::release_small, heap::release_unused].into_iter().zip(limits) {
            let held = heap::held();
            let growth = held.peak_live.saturating_sub(held.live + held.free) as u64;
            if self.probe.snapshot()?.rss + Bytes(growth) <= limit {
                break;
            }
            release();
        }
        Ok(())
    }

    /// At the end of an epoch, returns freed memory to the system and reports the memory that is held.
    pub fn note_epoch(&mut self, batch: &dataloader::Batch) -> Outcome<()> {
        let after = batch.position_after;
        if after.epoch == batch.epoch && after.sample < self.loader.samples_per_epoch() {
            return Ok(());
        }
        heap::release_unused();
        self.note_memory(&format!("after epoch {}", batch.epoch + 1))
    }

    /// Whether this process has made a step.
    pub fn has_made_steps(&self) -> bool {
        self.trainer.step_count() > self.first_step
    }

    /// Records the last event.
    pub fn record_end(&mut self, reason: &str) -> Outcome<()> {
        let step = self.trainer.step_count();
        let now = self.probe.snapshot()?;
        let mut end = json!({
            "step": step, "reason": reason, "bad_rows": self.history.bad_rows,
            "skipped_steps": self.history.skipped_steps, "peak_rss_bytes": now.peak_rss.0,
        });
        self.history.kept_evaluation.iter().for_each(|kept| end["model_step"] = kept["step"].clone());
        self.add_device(&now, &mut end);
        self.note_event("end", end);
        if let Some(missing) = self.log.missing() {
            self.report.warn(&missing);
        }
        Ok(())
    }

    /// Records memory at one of a run's key moments in the metrics. Tells the user if the peak has grown by a tenth.
    pub fn note_memory(&mut self, moment: &str) -> Outcome<()> {
        let now = self.probe.snapshot()?;
        let mut event = json!({"step": self.trainer.step_count(), "moment": moment, "rss_bytes": now.rss.0,
            "peak_rss_bytes": now.peak_rss.0, "available_bytes": now.ceiling().0});
        self.add_device(&now, &mut event);
        self.note_event("memory", event);
        if now.peak_rss > self.shown_peak.percent(110) {
            self.shown_peak = now.peak_rss;
            self.report.line(&format!("memory {moment}: {now}"));
        }
        Ok(())
    }

    /// The most bytes that the process has held, and, if a device computes, the most that it has held there.
    pub fn peaks(&self) -> (Bytes, Option<Bytes>) {
        let now = self.probe.snapshot().unwrap_or_default();
        (now.peak_rss, now.device.map(|device| device.peak))
    }

    /// Numbers for the report at the end.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The same numbers, mutable.
    pub fn history_mut(&mut self) -> &mut History {
        &mut self.history
    }
}

fn longest(texts: &[Vec<u32>]) -> usize {
    texts.iter().map(Vec::len).max().unwrap_or(0)
}
