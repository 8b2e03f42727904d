//! The start of a run: it is planned, its bill is printed, and only then it writes and loads the weights.

use std::time::Instant;

use collective::{CommunicationStats, Group};
use dataloader::{BatchShare, DataLoader, Position};
use memory_policy::{Bytes, MemorySnapshot, Probe, SystemProbe};
use planner::{Costs, Plan, Wanted};
use run_plan::pace::{PaceInputs, RunPace};
use run_plan::priced::Priced;
use serde_json::json;
use trainer::checkpoint::Found;
use trainer::{Parallel, TrainerOptions};

use super::disk_needs::DiskNeeds;
use super::prediction::Prediction;
use super::{FirstModel, GraphLaunchCheck, Session, agreement};
use crate::config::{Config, surroundings::Surroundings, unused::Circumstances};
use crate::data::survival;
use crate::data::tasks;
use crate::failure::Outcome;
use crate::files::metrics::Metrics;
use crate::files::run_dir::RunDir;
use crate::files::{assets, disk};
use crate::job::{self, RunJob};
use crate::machine::ledger::{Ledger, Needs, Reservation};
use crate::machine::processes::{self, OptionalGroup};
use crate::machine::{device, speed, stages};
use crate::model::base;
use crate::model::sources::Sources;
use crate::remedies;
use crate::run::bits::{self, Before, Kernels, Resumed};
use crate::run::open::Opened;
use crate::run::saved::{Saved, saved_state};
use crate::run::teacher_logits;
use crate::run::views::{Log, Views};
use crate::run::{options, resume, run_data, setup, start_screen, target_machine};
use crate::screen::report::Report;
use crate::screen::stop::Stop;

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

/// The steps of a run, and where they begin.
struct Steps {
    /// What the checkpoint holds for this command, if the run resumes.
    saved: Option<Saved>,
    done: u64,
    total: u64,
    position: Position,
    loader: DataLoader,
    options: TrainerOptions,
}

impl Steps {
    fn count(config: &Config, opened: &Opened, found: Option<&Found>, share: BatchShare) -> Outcome<Self> {
        let saved = found.map(saved_state).transpose()?;
        let done = found.map_or(0, |found| found.state.step);
        let position = saved.as_ref().map_or_else(Position::default, |saved| saved.position);
        if let (None, Some(directory)) = (found, &opened.init_from) {
            run_plan::model::check_trainable(&opened.model, Some(directory))?;
            // Errors in the files are reported before planning.
            t5::StoredWeights::read(directory, &opened.model)?;
        }
        let (loader, total) = setup::steps(config, opened, position, done, share)?;
        let options = options::trainer_options(config, &opened.model, total);
        Ok(Self { saved, done, total, position, loader, options })
    }

    fn left(&self) -> u64 {
        self.total.saturating_sub(self.done)
    }
}

/// The machine as the run finds it, before it is planned.
struct Measured {
    /// The config, completed by what was measured.
    config: Config,
    probe: SystemProbe,
    priced: Priced,
    now: MemorySnapshot,
}

/// The plan that the run starts with.
struct FirstPlan {
    plan: Plan,
    pace: RunPace,
    costs: Costs,
    now: MemorySnapshot,
    scope: bits::Scope,
    kernels: Kernels,
    /// Bits that differ from those before the resumption.
    warning: Option<bits::Warning>,
    machine: Box<dyn Probe>,
    reserved: Option<(Reservation, DiskNeeds)>,
}

impl Session {
    /// Plans, prints the bill, and only then loads the weights.
    pub fn start(parts: Parts) -> Outcome<Self> {
        let Parts { config, mut opened, mut run, stop, found, sources, goes_back, machine, group, ledger } = parts;
        let together = OptionalGroup(group.as_ref());
        let mut parallel = together.parallel(&config)?;
        let (shares_cards, shared_card) = together.shared_cards(&config, &opened.device)?;
        let share = processes::batch_share(parallel.as_ref());
        // Before the process is measured, so that the measurement includes the memory of the views.
        let views = Views::new(run.root());
        let steps = Steps::count(&config, &opened, found.as_ref(), share)?;
        stop.starts_at(steps.done);
        if group.is_none() {
            // Several processes stop together, before a step.
            steps.loader.stop_on(stop.flag());
        }
        let kept_segments = opened.train.known_segments();
        let (mut report, screen) = announce(&config, &opened, &steps, found.as_ref(), together, shared_card)?;
        let measured = measure(
            config,
            &mut opened,
            &steps.options,
            (together, parallel.as_mut(), shares_cards),
            machine.as_ref(),
        )?;
        let first = FirstPlan::make(
            &measured,
            &opened,
            &steps,
            found.as_ref(),
            (machine, ledger, share),
            (&run, &stop, together),
            &mut report,
        )?;
        let Measured { config, probe, .. } = measured;
        // The run can no longer be refused: from here on it writes.
        setup::begin(&config, &opened, &mut run)?;
        let mut checkpoints = resume::checkpoints(&config, &run, goes_back.then_some(steps.done))?;
        let source = opened.init_from.take();
        if let Some(source) = &source {
            let prepare = || base::prepare(source, config.model.base_precision, run.root());
            opened.init_from = Some(together.main_process_first(prepare)?);
        }
        let resumed = steps.saved.as_ref().zip(found.as_ref());
        let sources = resume::sources_at_start(&config, &opened, (source.as_deref(), run.root()), sources, resumed)?;
        let log = begin_log(
            &config,
            &opened,
            &steps,
            &first,
            found.as_ref(),
            (&run, views, together),
            (&screen, &mut report),
        );
        let FirstPlan { plan, costs, now, scope, machine, reserved, .. } = first;
        if let Some(text) = device::limit(&opened.device, &plan, &now) {
            report.warn(&text);
        }
        let Steps { saved, done, position, loader, options, .. } = steps;
        let (files, dtype) = (planner::files(run.root(), &now, &plan), options.parameter_dtype());
        let at_first = FirstModel { config: &config, opened: &opened, dtype };
        let mut trainer = at_first.trainer(found.as_ref(), options, (&plan, &files), share)?;
        if let Some(frozen) = &opened.frozen {
            trainer.compare_with(frozen.load(dtype, &files)?)?;
        }
        if let Some(kept) = teacher_logits::open((&config, &opened, &sources), run.root(), together)? {
            if done > 0 && kept.samples() == 0 {
                report.warn(
                    "the teacher's logits of earlier steps are gone and are computed again, in other micro-batches: the last bits differ",
                );
            }
            trainer.keep_logits(kept);
        }
        trainer.offload_to(files);
        if let Some(parallel) = parallel {
            trainer.join(parallel, config.parallel.sharding)?;
        }
        trainer.score_by(&config.checkpoint.best_metric);
        found.iter().for_each(|found| checkpoints.remember(&found.path));
        let mut session = Self {
            budgets: job::budgets(&config),
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
            prediction: Prediction::new(&plan),
            costs,
            scope,
            log,
            checkpoints,
            position,
            plan,
            history: saved.map(|saved| saved.history).unwrap_or_default(),
            sources,
            first_step: done,
            saved_step: found.is_some().then_some(done),
            saved_at: Instant::now(),
            kept_segments,
            shown_peak: Bytes::ZERO,
            graph_micro_batches: GraphLaunchCheck::default(),
            group,
            agreed: agreement::Agreed::default(),
            spent: CommunicationStats::default(),
            reserved,
        };
        session.stop.can_stop_gracefully();
        session.note_memory("with the model loaded")?;
        Ok(session)
    }
}

/// Prints the first screen and what is unusual about the run. Returns the report, and the screen for the run's first event.
fn announce(
    config: &Config,
    opened: &Opened,
    steps: &Steps,
    found: Option<&Found>,
    together: OptionalGroup<'_>,
    shared_card: Option<String>,
) -> Outcome<(Report, String)> {
    let report = Report::new(steps.total, steps.done, config.run.log_every_steps);
    let screen = start_screen::text(config, opened, &steps.options, steps.done, steps.total)?;
    report.line(&screen);
    opened.mixture.iter().for_each(|mixture| report.line(&tasks::in_words(mixture)));
    if opened.reading.survival.as_ref().is_some_and(|(survival, _)| survival.changed[1] > 0) {
        let hint = survival::hint(config.model.init_from.as_deref(), &opened.reading.train.originals);
        report.line(&format!("hint: {hint}"));
    }
    let of_rates = start_screen::rate_warnings(found, &steps.options, (steps.done, steps.total));
    of_rates.into_iter().chain(shared_card).for_each(|warning| report.warn(&warning));
    let here = Circumstances {
        is_on_card: !opened.device.is_cpu(),
        processes: together.0.map_or(1, Group::size),
        objective: Some(opened.reading.config_objective()),
        has_validation: opened.validation.is_some(),
    };
    config.unused(here, assets::EMBEDDED).iter().for_each(|warning| report.warn(warning));
    Ok((report, screen))
}

/// Measures the device, the network and this process.
fn measure(
    config: Config,
    opened: &mut Opened,
    options: &TrainerOptions,
    (together, mut parallel, shares_cards): (OptionalGroup<'_>, Option<&mut Parallel>, bool),
    machine: &dyn Probe,
) -> Outcome<Measured> {
    device::check_dtype(&opened.device, options.precision.activations())?;
    let probe = target_machine::probe_of(opened);
    let priced = together.main_process_first(|| speed::priced_run(&config, &opened.model, options, &opened.device))?;
    let priced = priced.with(together.broadcast_from_root(priced.prices)?);
    opened.stages.ends(stages::SPEED)?;
    if let Some(parallel) = parallel.as_mut().filter(|_| !shares_cards) {
        // Before the device is measured: memory for this connection does not belong to tensors.
        parallel.connect_cards(&opened.device)?;
    }
    let network = together.network(&config, parallel.as_deref(), &opened.device)?;
    let now = planner::rehearse(&opened.model, options, &opened.device, machine)?;
    let (budget, prices) = (together.memory_share(&config, &now)?, priced.noted(&config)?);
    let config = config.completed(Surroundings { shares_cards, network, budget, prices })?;
    Ok(Measured { config, probe, priced, now })
}

impl FirstPlan {
    /// Plans the run, waits for its memory if a ledger is given, and prints the bill. Refuses what fits neither memory nor disk.
    fn make(
        measured: &Measured,
        opened: &Opened,
        steps: &Steps,
        found: Option<&Found>,
        (machine, ledger, share): (Box<dyn Probe>, Option<Ledger>, BatchShare),
        (run, stop, together): (&RunDir, &Stop, OptionalGroup<'_>),
        report: &mut Report,
    ) -> Outcome<Self> {
        let Measured { config, priced, now, .. } = measured;
        let Steps { saved, options, loader, total, .. } = steps;
        let data = run_data::describe(config, opened, loader);
        // Lengths of rows of the whole run: a resumed run reads the same rows, and so has the same choices.
        let rows = run_data::sampled_rows(config, opened, Some(*total));
        let past = opened.stages.rows(now);
        let job = RunJob {
            config,
            model: &opened.model,
            options,
            data: Some(&data),
            lengths: &rows.lengths,
            wanted: Wanted::Undominated(saved.as_ref().map(|saved| &saved.plan)),
            prices: priced.prices,
            past: &past,
            shards: share.shards,
        };
        let mut costs = planner::costs(&job.job(), now)?;
        let budgets = job::budgets(config);
        let (now, machine, reserved) = match ledger {
            Some(ledger) => {
                let say = |text: &str| report.line(text);
                let card = device::card(&opened.device, &config.run.device);
                let disk = DiskNeeds {
                    config: config.clone(),
                    model: opened.model.clone(),
                    options: options.clone(),
                    priced: *priced,
                    shards: share.shards,
                    steps: Some(steps.left()),
                };
                let disk_of = |now: &MemorySnapshot, plan: &Plan| disk.for_plan(now, plan);
                let needs = Needs { machine: machine.as_ref(), costs: &costs, budgets, card, disk: &disk_of };
                let (left, reserved) = ledger.admit(run.root(), &needs, stop, &say)?;
                let machine = reserved.remaining_memory_probe(machine);
                (left, machine, Some((reserved, disk)))
            }
            None => (now.clone(), machine, None),
        };
        let kernels = Kernels::of_this_process(&opened.device);
        let scope = bits::Scope::new(config, options, &opened.device);
        let Resumed { plan, warning } = match saved {
            Some(saved) => {
                let checkpoint = found.map(|found| found.path.display().to_string()).unwrap_or_default();
                let before = Before { checkpoint, plan: &saved.plan, kernels: saved.kernels.as_ref() };
                bits::resume(&before, &kernels, (&now, &costs, budgets), scope, config.run.deterministic)?
            }
            None => Resumed {
                plan: memory_policy::plan(&now, &costs, budgets)
                    .map_err(|refusal| remedies::failure(refusal, &job, &now, Some(*total)))?,
                warning: None,
            },
        };
        if let Some((reserved, disk)) = &reserved {
            reserved.set(&plan, &disk.for_plan(&now, &plan)?)?;
        }
        let plan = together.agree_on_plan(plan, (&now, &costs, budgets), false)?;
        if config.run.deterministic {
            costs = bits::with_batch_split_of(&costs, &plan, scope);
        }
        heap::release_small();
        let of = PaceInputs { config, options, rows: Some(&rows), steps: Some(steps.left()), priced };
        let pace = RunPace::new(&of, &job.job(), &now, &plan)?;
        report.line(&format!("{}{}", plan.bill, pace.in_words()));
        report.predict(pace.step_time());
        disk::check(&pace.disk_need(), run.root())?;
        Ok(Self { plan, pace, costs, now, scope, kernels, warning, machine, reserved })
    }
}

/// Opens the metrics and the views of the run, and records how it starts.
fn begin_log(
    config: &Config,
    opened: &Opened,
    steps: &Steps,
    first: &FirstPlan,
    found: Option<&Found>,
    (run, mut views, together): (&RunDir, Views, OptionalGroup<'_>),
    (screen, report): (&str, &Report),
) -> Log {
    let FirstPlan { plan, pace, now, kernels, warning, .. } = first;
    let mut log = if together.is_first() {
        let resumes_at = found.is_some().then_some(steps.done);
        views.begin(&run.metrics(), resumes_at, &config.to_toml("")).inspect(|warning| report.warn(warning));
        Log::new(Metrics::new(&run.metrics()), views)
    } else {
        Log::of_another()
    };
    let event = if found.is_some() { "resume" } else { "start" };
    let start = json!({
        "step": steps.done, "total_steps": steps.total,
        "checkpoint": found.map(|found| found.path.display().to_string()),
        "threads": kernels.threads, "instruction_set": kernels.instruction_set, "kernels": kernels.version,
        "version": env!("CARGO_PKG_VERSION"), "total_memory_bytes": now.total.0, "screen": screen,
        "reading": opened.reading.to_json(),
    });
    let warned = warning.as_ref().map(|warning| {
        report.warn(&warning.text);
        ("warning", warning.event(steps.done))
    });
    let converted = opened.converted.iter().map(|converted| ("data", converted.clone()));
    let events = [(event, start), ("plan", pace.plan_json(plan))];
    for (event, fields) in events.into_iter().chain(converted).chain(warned) {
        log.record(event, fields).for_each(|warning| report.warn(&warning));
    }
    log
}
