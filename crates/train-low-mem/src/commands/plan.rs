//! `train_low_mem plan`: what a run would hold and how it would be cut, without allocating any of it.

use candle_core::Device;
use collective::Shards;
use dataloader::{BatchShare, Position};
use memory_policy::{Bytes, Explained, MemorySnapshot, Probe};
use planner::{Plan, Planned, Wanted};
use serde_json::json;

use crate::cli::PlanArgs;
use crate::commands::report::write_page;
use crate::config::Config;
use crate::failure::Outcome;
use crate::job::RunJob;
use crate::pace::{Of, RunPace};
use crate::run_dir::RunDir;
use crate::speed::Priced;
use crate::stop::Stop;
use crate::{job, machine, open, options, report, row_data, setup, ways_out};

/// A plan, its pace, and the steps of the run where they are known.
type PlannedRun = (Planned, RunPace, Option<u64>);

/// Prints the bill and the plan.
pub fn plan(flags: &PlanArgs) -> Outcome<()> {
    let config = setup::read_config_to_plan(&flags.train)?;
    let machine = machine::machine(&flags.train, &config, None)?;
    let title = title(&config);
    // Whoever wants nothing explained needs only the choices that some budget would take.
    let wanted = if flags.explain { Wanted::All } else { Wanted::Undominated(None) };
    let (Planned { plan, costs }, pace, total_steps) = planned(config, machine.as_ref(), wanted)?;
    let json = || {
        let mut json = pace.plan_json(&plan);
        json["total_steps"] = json!(total_steps);
        json
    };
    if let Some(path) = &flags.html {
        write_page(path, &run_report::page::of_plan(&json(), &title))?;
    }
    if flags.json {
        return report::result(&format!("{:#}\n", json()));
    }
    let bill = if flags.explain { plan.bill.in_full() } else { plan.bill.to_string() };
    report::result(&format!("{bill}{}\n{}", pace.in_words(), in_words(&plan)))?;
    if flags.explain {
        report::result(&format!("\n{}", explanation(&memory_policy::explain(&costs, &plan), &plan)))?;
    }
    Ok(())
}

/// The model and where it runs, for the head of a page.
fn title(config: &Config) -> String {
    let model = config.model.init_from.as_ref().map(|directory| directory.display().to_string());
    let model = model.or_else(|| config.values.text("model.config")).unwrap_or_else(|| "a model".to_owned());
    format!("{model}, {} samples a step", config.train.batch_size)
}

/// The plan of the config's run, its pace and its steps. Without data it is the plan as far as it is known then: the queue of
/// batches, and no dataset.
fn planned(config: Config, machine: &dyn Probe, wanted: Wanted<'_>) -> Outcome<PlannedRun> {
    let scratch = if config.data.train.is_empty() { None } else { Some(row_data::scratch()?) };
    let (config, opened) = match &scratch {
        Some(scratch) => {
            let mut run = RunDir::look_at(scratch.path());
            let mut config = setup::place_embedded_files(config, &mut run)?;
            let wanted = row_data::Wanted { resumes: false, to_plan: true, stop: &Stop::default(), say: report::note };
            let opened = setup::open(&mut config, &mut run, wanted)?;
            (config, Some(opened))
        }
        None => (config, None),
    };
    let feed = opened
        .as_ref()
        .map(|opened| setup::steps(&config, opened, Position::default(), 0, BatchShare::default()))
        .transpose()?;
    let steps = match config.data.estimated_rows {
        None => feed.as_ref().map(|(_, total_steps)| *total_steps).or(config.train.max_steps),
        Some(rows) => {
            let of_epochs =
                rows.div_ceil(config.train.batch_size as u64).saturating_mul(config.train.epochs.unwrap_or(u64::MAX));
            Some(of_epochs.min(config.train.max_steps.unwrap_or(u64::MAX)))
        }
    };
    let model = match &opened {
        Some(opened) => opened.model.clone(),
        None => open::model_without_data(&config)?,
    };
    let device = opened.as_ref().map_or(&Device::Cpu, |opened| &opened.device);
    // How much a run of unknown length writes is unknown, too: files are offered only where they are pinned.
    let options = options::trainer_options(&config, &model, steps.unwrap_or(u64::MAX));
    let data = opened.as_ref().zip(feed.as_ref().map(|(loader, _)| loader));
    let priced = Priced::of_run(&config, &model, &options, job::place(&config, device))?;
    let now = for_another_start(planner::rehearse(&model, &options, device, machine)?);
    let shards = Shards { count: config.parallel.virtual_shards.unwrap_or(1), processes: 1 };
    let run = RunJob {
        config: &config,
        model: &model,
        options: &options,
        data,
        device,
        wanted,
        prices: priced.prices,
        shards,
    };
    let of = Of { config: &config, options: &options, opened: opened.as_ref(), steps, priced: &priced };
    let planned = planner::plan(&run.job(), &now).map_err(|error| match error {
        planner::Error::DoesNotFit(refusal) => ways_out::failure(*refusal, &run, &now, steps),
        error => error.into(),
    })?;
    let pace = RunPace::new(&of, &run.job(), &now, &planned.plan)?;
    Ok((planned, pace, steps))
}

/// The plan is for a run that is yet to start: what it accepts, that run accepts, though it measures its own process.
fn for_another_start(now: MemorySnapshot) -> MemorySnapshot {
    MemorySnapshot { rss: now.rss + memory_policy::ANOTHER_START, ..now }
}

/// Other values of a lever that are shown, of many evenly spaced ones.
const SHOWN: usize = 8;

/// Every lever with its value, and below it the others that were offered.
fn explanation(levers: &[Explained], plan: &Plan) -> String {
    let (mut text, peak) = (String::new(), plan.peak_of_tensors());
    for lever in levers {
        text += &format!("{} = {}\n", lever.lever, lever.chosen);
        let shown = || lever.others.iter().step_by(lever.others.len().div_ceil(SHOWN).max(1));
        let width = shown().map(|other| other.value.len()).max().unwrap_or(0);
        for other in shown() {
            let (sign, bytes) = match other.predicted_peak > peak {
                true => ("+", other.predicted_peak.saturating_sub(peak)),
                false => ("-", peak.saturating_sub(other.predicted_peak)),
            };
            let percent = 100.0 * (other.relative_time - 1.0);
            text += &format!("  {:<width$}  {sign}{:<12} {percent:+.1} % time\n", other.value, bytes.to_string());
        }
    }
    text
}

/// The plan's numbers under the names of their pins.
fn in_words(plan: &Plan) -> String {
    let (levers, feeding) = (&plan.step.levers, &plan.loader);
    let lines = [
        ("micro_batch_samples", levers.micro_batch_samples.to_string()),
        ("recompute_blocks", levers.recompute_blocks.to_string()),
        ("loss_chunk_rows", levers.loss_chunk_rows.to_string()),
        ("prefetch_batches", feeding.prefetch_batches.to_string()),
        ("decode_threads", feeding.decode_threads.to_string()),
        ("dataset_residency", feeding.residency.to_string()),
        ("smallest budget of this plan", Bytes::to_string(&plan.required())),
    ];
    lines.iter().map(|(name, value)| format!("  {name:<30}{value}\n")).collect()
}
