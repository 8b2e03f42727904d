//! The plan of a run before it starts, for `plan` and for the choice of a device.

use candle_core::Device;
use dataloader::{BatchShare, Position};
use memory_policy::Probe;
use planner::{Planned, Wanted};
use run_plan::answer;
use run_plan::pace::{PaceInputs, RunPace};

use crate::config::Config;
use crate::failure::Outcome;
use crate::job::RunJob;
use crate::machine::speed;
use crate::machine::stages::{self, Stages};
use crate::run::open::Opened;
use crate::run::{open, options, run_data, setup};

/// A plan, its pace, and the steps of the run, if known.
pub struct PlannedRun {
    /// The plan, and the costs that it was made from.
    pub planned: Planned,
    /// Its pace.
    pub pace: RunPace,
    /// Steps of the run, if known.
    pub total_steps: Option<u64>,
}

impl PlannedRun {
    /// The plan of the config's run at its beginning. Without data, the plan covers what is known then: the queue of batches, but no
    /// dataset.
    ///
    /// # Errors
    /// Nothing fits, or the planner refuses the options.
    pub fn new(
        config: &Config,
        opened: Option<&Opened>,
        machine: &dyn Probe,
        wanted: Wanted<'_>,
        processes: usize,
    ) -> Outcome<Self> {
        let mut config = config.clone();
        // Without data, a plan is for whatever data there will be.
        let mut stages = opened.map_or_else(Stages::default, |opened| opened.stages.clone());
        let shards = trainer::shards(config.parallel.virtual_shards, processes)?;
        let share = BatchShare { shards, ..BatchShare::default() };
        let feed = opened.map(|opened| setup::steps(&config, opened, Position::default(), 0, share)).transpose()?;
        let steps = match opened.and_then(|opened| opened.estimated_rows) {
            None => feed.as_ref().map(|(_, total_steps)| *total_steps).or(config.train.max_steps),
            Some(rows) => {
                let an_epoch = rows.div_ceil(config.train.batch_size as u64);
                let of_epochs = an_epoch.saturating_mul(config.train.epochs.unwrap_or(u64::MAX));
                Some(of_epochs.min(config.train.max_steps.unwrap_or(u64::MAX)))
            }
        };
        let model = match opened {
            Some(opened) => opened.model.clone(),
            None => open::model_without_data(&config)?,
        };
        let device = opened.map_or(&Device::Cpu, |opened| &opened.device);
        // If the length of a run is unknown, so are its writes. Files are then offered only if they are pinned.
        let options = options::trainer_options(&config, &model, steps.unwrap_or(u64::MAX));
        let data = opened.zip(feed.as_ref().map(|(loader, _)| loader));
        let priced = speed::priced_run(&config, &model, &options, device)?;
        if opened.is_some() {
            stages.ends(stages::SPEED)?;
        }
        let now = answer::with_restart_margin(planner::rehearse(&model, &options, device, machine)?);
        let data = data.map(|(opened, loader)| run_data::describe(&config, opened, loader));
        if config.memory.budget.is_none() && processes > 1 {
            // The share that the processes of a host agree on.
            config.memory.budget = Some(planner::budget_of(None).resolve(&now).0 / processes as u64);
        }
        let rows = opened.map(|opened| run_data::sampled_rows(&config, opened, steps));
        let past = stages.rows(&now);
        let run = RunJob {
            config: &config,
            model: &model,
            options: &options,
            data: data.as_ref(),
            lengths: rows.as_ref().map_or(&[], |rows| &rows.lengths),
            wanted,
            prices: priced.prices,
            past: &past,
            shards,
        };
        let planned = answer::plan(&run, &now, steps)?;
        let of = PaceInputs { config: &config, options: &options, rows: rows.as_ref(), steps, priced: &priced };
        let pace = RunPace::new(&of, &run.job(), &now, &planned.plan)?;
        Ok(Self { planned, pace, total_steps: steps })
    }
}
