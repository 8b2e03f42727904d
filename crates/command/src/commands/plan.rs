//! `train_low_mem plan`: what a run would hold and how it would be cut, without allocating any of it.

use candle_core::Device;
use dataloader::{BatchShare, Position};
use memory_policy::Probe;
use planner::{Planned, Wanted};
use run_plan::answer;
use run_plan::pace::{Of, RunPace};

use crate::cli::PlanArgs;
use crate::commands::report::write_page;
use crate::config::Config;
use crate::failure::Outcome;
use crate::job::RunJob;
use crate::run_dir::RunDir;
use crate::stop::Stop;
use crate::{machine, open, options, report, row_data, run_data, setup, speed};

/// A plan, its pace, and the steps of the run where they are known.
type PlannedRun = (Planned, RunPace, Option<u64>);

/// Prints the bill and the plan.
pub fn plan(flags: &PlanArgs) -> Outcome<()> {
    let config = setup::read_config_to_plan(&flags.train)?;
    let machine = machine::machine(&flags.train, &config, None)?;
    let title = title(&config);
    let wanted = answer::wanted(flags.explain);
    let (planned, pace, total_steps) = planned(config, machine.as_ref(), wanted, flags.processes.into())?;
    let json = || answer::json_of(&planned.plan, &pace, total_steps);
    if let Some(path) = &flags.html {
        write_page(path, &run_report::page::of_plan(&json(), &title))?;
    }
    report::result(&match flags.json {
        true => format!("{:#}\n", json()),
        false => answer::text_of(&planned, &pace, flags.explain),
    })
}

/// The model and where it runs, for the head of a page.
fn title(config: &Config) -> String {
    let model = config.model.init_from.as_ref().map(|directory| directory.display().to_string());
    let model = model.or_else(|| config.values.text("model.config")).unwrap_or_else(|| "a model".to_owned());
    format!("{model}, {} samples a step", config.train.batch_size)
}

/// The plan of the config's run, its pace and its steps. Without data it is the plan as far as it is known then: the queue of
/// batches, and no dataset.
fn planned(config: Config, machine: &dyn Probe, wanted: Wanted<'_>, processes: usize) -> Outcome<PlannedRun> {
    let shards = trainer::shards(config.parallel.virtual_shards, processes)?;
    let share = BatchShare { shards, ..BatchShare::default() };
    let scratch = if config.data.train.is_empty() { None } else { Some(row_data::scratch()?) };
    let (mut config, opened) = match &scratch {
        Some(scratch) => {
            let mut run = RunDir::look_at(scratch.path());
            let mut config = setup::place_embedded_files(config, &mut run)?;
            let wanted = row_data::Wanted { resumes: false, to_plan: true, stop: &Stop::default(), say: report::note };
            let opened = setup::open(&mut config, &mut run, wanted)?;
            (config, Some(opened))
        }
        None => (config, None),
    };
    let feed =
        opened.as_ref().map(|opened| setup::steps(&config, opened, Position::default(), 0, share)).transpose()?;
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
    let priced = speed::priced_run(&config, &model, &options, device)?;
    let now = answer::for_another_start(planner::rehearse(&model, &options, device, machine)?);
    let data = data.map(|(opened, loader)| run_data::of(&config, opened, loader));
    if config.memory.budget.is_none() && processes > 1 {
        // As the processes of a host agree on it.
        config.memory.budget = Some(planner::budget_of(None).resolve(&now).0 / processes as u64);
    }
    let run = RunJob {
        config: &config,
        model: &model,
        options: &options,
        data: data.as_ref(),
        wanted,
        prices: priced.prices,
        shards,
    };
    let planned = answer::plan(&run, &now, steps)?;
    let rows = opened.as_ref().map(|opened| run_data::looked_at(&config, opened, steps));
    let of = Of { config: &config, options: &options, rows: rows.as_ref(), steps, priced: &priced };
    let pace = RunPace::new(&of, &run.job(), &now, &planned.plan)?;
    Ok((planned, pace, steps))
}
