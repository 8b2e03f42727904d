//! The parts of a run, and the work between two steps.
//!
//! [`crate::train`] is the loop; this module has its verbs: replan, record, evaluate, save, finish. A run's `position` in the data is the
//! end of the samples of all steps so far. It moves only when a step is made, so a checkpoint never counts a batch that was fetched but not
//! used.

mod disk_needs;
mod divergence;
mod evaluating;
mod first_model;
mod graph_micro_batches;
mod oom_recovery;
mod prediction;
mod saving;
mod step_times;
mod together;

use std::time::Instant;

use collective::{CommunicationStats, Group};
use dataloader::{DataLoader, Position};
use memory_policy::{Budgets, Bytes, Change, MemorySnapshot, Probe, SystemProbe};
use planner::{Costs, MICRO_BATCH_SAMPLES, Plan, Wanted};
use run_plan::pace::{PaceInputs, RunPace};
use serde_json::{Value, json};
use trainer::checkpoint::{Checkpoints, Found};
use trainer::{StepOutcome, StepPlan, StepStats, Trainer};

pub use self::first_model::FirstModel;
pub use self::step_times::{StepTimes, copies_so_far};
use crate::bits::{self, Before, Kernels, Resumed};
use crate::config::{Config, surroundings::Surroundings, unused::Circumstances};
use crate::failure::Outcome;
use crate::job::{self, RunJob};
use crate::ledger::{Ledger, Needs, Reservation};
use crate::metrics::{Metrics, number, rows_digest};
use crate::open::Opened;
use crate::processes::{self, OptionalGroup};
use crate::progress::StepLine;
use crate::report::Report;
use crate::run_dir::RunDir;
use crate::saved::{History, saved_state};
use crate::sources::Sources;
use crate::stop::Stop;
use crate::views::{Log, Views};
use crate::{
    assets, base, device, disk, machine, options, remedies, resume, run_data, setup, speed, stages, start_screen,
    survival,
};
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
    agreed: together::Agreed,
    /// The communication with them until the last step.
    spent: CommunicationStats,
    /// The ledger entry, under `--wait`.
    reserved: Option<(Reservation, DiskNeeds)>,
}

/// The parts of a session.
pub struct Parts {
    /// The resolved config.
    pub config: Config,
    /// The open data, tokenizer and model files.
    pub opened: Opened,
    /// The output directory.
    pub run: RunDir,
    /// The request to stop, if any.
    pub stop: Stop,
    /// The checkpoint that it resumes from.
    pub found: Option<Found>,
    /// The files beside the run when that was compared with them.
    pub sources: Option<Sources>,
    /// Whether that is an earlier checkpoint than the newest, by `--resume-from`.
    pub goes_back: bool,
    /// The source of memory snapshots.
    pub machine: Box<dyn Probe>,
    /// The processes of this run, if there are several.
    pub group: Option<Group>,
    /// The ledger for its reservation, if it waits for memory.
    pub ledger: Option<Ledger>,
}

impl Session {
    /// Plans, prints the bill, and only then loads the weights.
    pub fn start(parts: Parts) -> Outcome<Self> {
        let Parts { config, mut opened, mut run, stop, found, sources, goes_back, mut machine, group, ledger } = parts;
        let together = OptionalGroup(group.as_ref());
        let mut parallel = together.parallel(&config)?;
        let (shares_cards, shared_card) = together.shared_cards(&config, &opened.device)?;
        let share = processes::batch_share(parallel.as_ref());
        // Before the process is measured, so that the measurement includes the memory of the views.
        let mut views = Views::of(run.root());
        let saved = found.as_ref().map(saved_state).transpose()?;
        let steps_done = found.as_ref().map_or(0, |found| found.state.step);
        let position = saved.as_ref().map_or_else(Position::default, |saved| saved.position);
        if let (None, Some(directory)) = (&found, &opened.init_from) {
            run_plan::model::check_trainable(&opened.model, Some(directory))?;
            // Errors in the files are reported before planning.
            t5::StoredWeights::of(directory, &opened.model)?;
        }
        let (loader, total_steps) = setup::steps(&config, &opened, position, steps_done, share)?;
        let options = options::trainer_options(&config, &opened.model, total_steps);
        stop.starts_at(steps_done);
        if group.is_none() {
            // Several processes stop together, before a step.
            loader.stop_on(stop.flag());
        }

        let kept_segments = opened.train.known_segments();
        let mut report = Report::new(total_steps, steps_done, config.run.log_every_steps);
        let screen = start_screen::text(&config, &opened, &options, steps_done, total_steps)?;
        report.line(&screen);
        if opened.reading.survival.as_ref().is_some_and(|(survival, _)| survival.changed[1] > 0) {
            report.line(&format!("hint: {}", survival::HINT));
        }
        let of_rates = start_screen::rate_warnings(found.as_ref(), &options, (steps_done, total_steps));
        of_rates.into_iter().chain(shared_card).for_each(|warning| report.warn(&warning));
        let here = Circumstances {
            is_on_card: !opened.device.is_cpu(),
            processes: group.as_ref().map_or(1, Group::size),
            objective: Some(opened.reading.task()),
            has_validation: opened.validation.is_some(),
        };
        config.unused(here, assets::EMBEDDED).iter().for_each(|warning| report.warn(warning));
        device::check_dtype(&opened.device, options.precision.activations())?;
        let probe = machine::probe_of(&opened);
        let priced =
            together.main_process_first(|| speed::priced_run(&config, &opened.model, &options, &opened.device))?;
        let priced = priced.with(together.broadcast_from_root(priced.prices)?);
        opened.stages.ends(stages::SPEED)?;
        if let Some(parallel) = parallel.as_mut().filter(|_| !shares_cards) {
            // Before the device is measured: memory for this connection does not belong to tensors.
            parallel.connect_cards(&opened.device)?;
        }
        let network = together.network(&config, parallel.as_ref(), &opened.device)?;
        let now = planner::rehearse(&opened.model, &options, &opened.device, machine.as_ref())?;
        let (budget, prices) = (together.memory_share(&config, &now)?, priced.noted(&config)?);
        let config = config.completed(Surroundings { shares_cards, network, budget, prices })?;
        let wanted = Wanted::Undominated(saved.as_ref().map(|saved| &saved.plan));
        let data = run_data::of(&config, &opened, &loader);
        // Lengths of rows of the whole run: a resumed run reads the same rows, and so has the same choices.
        let rows = run_data::sampled_rows(&config, &opened, Some(total_steps));
        let past = opened.stages.rows(&now);
        let job = RunJob {
            config: &config,
            model: &opened.model,
            options: &options,
            data: Some(&data),
            lengths: &rows.lengths,
            wanted,
            prices: priced.prices,
            past: &past,
            shards: share.shards,
        };
        let mut costs = planner::costs(&job.job(), &now)?;
        let budgets = job::budgets(&config);
        let left_steps = Some(total_steps.saturating_sub(steps_done));
        let (now, reserved) = match ledger {
            Some(ledger) => {
                let say = |text: &str| report.line(text);
                let (config, model, options) = (config.clone(), opened.model.clone(), options.clone());
                let card = device::card(&opened.device, &config.run.device);
                let disk = DiskNeeds { config, model, options, priced, shards: share.shards, steps: left_steps };
                let disk_of = |now: &MemorySnapshot, plan: &Plan| disk.of(now, plan);
                let needs = Needs { machine: machine.as_ref(), costs: &costs, budgets, card, disk: &disk_of };
                let (left, reserved) = ledger.admit(run.root(), &needs, &stop, &say)?;
                machine = reserved.remaining_memory_probe(machine);
                (left, Some((reserved, disk)))
            }
            None => (now, None),
        };
        let origin = found.as_ref().map(|found| found.path.display().to_string());
        let kernels = Kernels::of_this_process(&opened.device);
        let scope = bits::Scope::of(&config, &options, &opened.device);
        let Resumed { plan, warning } = match &saved {
            Some(saved) => {
                let checkpoint = origin.clone().unwrap_or_default();
                let before = Before { checkpoint, plan: &saved.plan, kernels: saved.kernels.as_ref() };
                bits::resume(&before, &kernels, (&now, &costs, budgets), scope, config.run.deterministic)?
            }
            None => Resumed {
                plan: memory_policy::plan(&now, &costs, budgets)
                    .map_err(|refusal| remedies::failure(refusal, &job, &now, Some(total_steps)))?,
                warning: None,
            },
        };
        if let Some((reserved, disk)) = &reserved {
            reserved.set(&plan, &disk.of(&now, &plan)?)?;
        }
        let plan = together.agree_on_plan(plan, (&now, &costs, budgets), false)?;
        if config.run.deterministic {
            costs = bits::with_batch_split_of(&costs, &plan, scope);
        }
        heap::release_small();
        let of =
            PaceInputs { config: &config, options: &options, rows: Some(&rows), steps: left_steps, priced: &priced };
        let pace = RunPace::new(&of, &job.job(), &now, &plan)?;
        report.line(&format!("{}{}", plan.bill, pace.in_words()));
        report.predict(pace.step_time());
        disk::check(&pace.disk_need(), run.root())?;
        // The run can no longer be refused: from here on it writes.
        setup::begin(&config, &opened, &mut run)?;
        let mut checkpoints = resume::checkpoints(&config, &run, goes_back.then_some(steps_done))?;
        let source = opened.init_from.take();
        if let Some(source) = &source {
            let prepare = || base::prepare(source, config.model.base_precision, run.root());
            opened.init_from = Some(together.main_process_first(prepare)?);
        }
        let resumed = saved.as_ref().zip(found.as_ref());
        let sources = resume::sources_at_start(&config, &opened, (source.as_deref(), run.root()), sources, resumed)?;
        let mut log = if together.is_first() {
            let resumes_at = found.is_some().then_some(steps_done);
            views.begin(&run.metrics(), resumes_at, &config.to_toml("")).inspect(|warning| report.warn(warning));
            Log::new(Metrics::new(&run.metrics()), views)
        } else {
            Log::of_another()
        };
        let event = if found.is_some() { "resume" } else { "start" };
        let start = json!({"step": steps_done, "total_steps": total_steps, "checkpoint": origin,
            "threads": kernels.threads, "instruction_set": kernels.instruction_set, "kernels": kernels.version,
            "version": env!("CARGO_PKG_VERSION"), "total_memory_bytes": now.total.0, "screen": screen, "reading": opened.reading.to_json()});
        let warned = warning.map(|warning| {
            report.warn(&warning.text);
            ("warning", warning.event(steps_done))
        });
        let converted = opened.converted.iter().map(|converted| ("data", converted.clone()));
        let first = [(event, start), ("plan", pace.plan_json(&plan))];
        for (event, fields) in first.into_iter().chain(converted).chain(warned) {
            log.record(event, fields).for_each(|warning| report.warn(&warning));
        }

        if let Some(text) = device::limit(&opened.device, &plan, &now) {
            report.warn(&text);
        }
        let (files, dtype) = (planner::files(run.root(), &now, &plan), options.parameter_dtype());
        let at_first = FirstModel { config: &config, opened: &opened, dtype };
        let mut trainer = at_first.trainer(found.as_ref(), options, (&plan, &files), share)?;
        trainer.offload_to(files);
        if let Some(parallel) = parallel {
            trainer.join(parallel, config.parallel.sharding)?;
        }
        trainer.score_by(&config.checkpoint.best_metric);
        found.iter().for_each(|found| checkpoints.remember(&found.path));
        let mut session = Self {
            config,
            opened,
            run,
            stop,
            trainer,
            loader,
            report,
            probe,
            machine,
            is_hopeless: false,
            prediction: Prediction::of(&plan),
            costs,
            budgets,
            scope,
            log,
            checkpoints,
            position,
            plan,
            history: saved.map(|saved| saved.history).unwrap_or_default(),
            sources,
            first_step: steps_done,
            saved_step: found.is_some().then_some(steps_done),
            saved_at: Instant::now(),
            kept_segments,
            shown_peak: Bytes::ZERO,
            graph_micro_batches: GraphLaunchCheck::default(),
            group,
            agreed: together::Agreed::default(),
            spent: CommunicationStats::default(),
            reserved,
        };
        session.stop.can_stop_gracefully();
        session.note_memory("with the model loaded")?;
        Ok(session)
    }

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
            reserved.set(&self.plan, &disk.of(&self.machine.snapshot()?, &self.plan)?)?;
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
                t5_ops::waiting::release_unused();
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
        let is_pinned = self.config.memory.pins.of(MICRO_BATCH_SAMPLES.name).is_some();
        let longest = (!is_pinned).then_some((data.max_source_tokens, data.max_target_tokens));
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
            "longest_source": longest(&batch.sources), "longest_target": longest(&batch.targets),
            "available_bytes": now.ceiling().0, "file_wait_ms": milliseconds(took.files.waited),
        });
        took.add_to(&mut line);
        if let Some(objective) = stats.objective {
            line["objective"] = json!(number(objective));
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
