//! `--dry-run`: tries one step, one save and one load, and leaves nothing behind.
//!
//! A dry run does the same as a real run, including plan and first batch. It uses a directory of its own beside the output directory, on
//! the same disk, and removes it at the end. The next run removes the directory of a killed dry run. With `--keep-training` the step is the
//! one after the newest checkpoint of the output directory, which is read and not changed.

use std::path::Path;
use std::time::Instant;

use durable_files::{Error, Scratch};
use memory_policy::{Probe, SystemProbe};
use trainer::checkpoint::Checkpoints;
use trainer::{Batch, StepOutcome, Trainer};

use crate::cli::TrainArgs;
use crate::config::Config;
use crate::data::splits::Purpose;
use crate::data::{row_data, unpacked};
use crate::failure::{Failure, Outcome};
use crate::files::disk::existing_ancestor;
use crate::files::run_dir::{RunDir, is_own_name};
use crate::run::open::Opened;
use crate::run::resume::{checkpoint_to_resume, is_finished};
use crate::run::session::{FirstModel, Parts, Session};
use crate::run::{faster_device, options, setup, target_machine};
use crate::screen::stop::Stop;
use crate::screen::{report, stop};

/// Tries a run.
pub fn dry_run(flags: &TrainArgs, config: Config, stop: Stop) -> Outcome<()> {
    let keep_training = flags.keep_training == Some(true);
    let tried = RunDir::open_read_only(&config.run.output_dir);
    if keep_training {
        tried.refuse_to_resume_nothing()?;
    }
    let beside = existing_ancestor(&config.run.output_dir);
    stop.ends_with(stop::tried);
    let make = || match Scratch::create_in(&beside, is_own_name) {
        Err(error @ Error::Exchangeable { .. }) => {
            report::note(&format!("{error}; this dry run writes to the directory for temporary files"));
            unpacked::scratch()
        }
        made => Ok(made?),
    };
    let scratch = stop.remove_at_end(make, Scratch::leftover)?;
    let mut run = RunDir::lock(scratch.path())?;
    let config = setup::place_embedded_files(config, &mut run)?;
    let wanted = row_data::Wanted {
        purpose: Purpose::Training,
        resumes: false,
        to_plan: false,
        stop: &stop,
        say: row_data::print_line,
    };
    let mut opened = setup::open(&config, &mut run, wanted)?;
    let resumed = match keep_training {
        true => checkpoint_to_resume(&config, &opened, &tried, flags.resume_from)?,
        false => None,
    };
    let (found, sources) = resumed.unzip();
    if is_finished(&config, &opened, &tried, found.as_ref())? {
        return Ok(());
    }
    let config = faster_device::choose(config, &mut opened, flags, found.as_ref(), 1)?;
    let machine = target_machine::machine(flags, &config, Some(&opened))?;
    let mut session = Session::start(Parts {
        config,
        opened,
        run,
        stop,
        found,
        sources,
        goes_back: false,
        machine,
        group: None,
        ledger: None,
    })?;
    if session.trainer.is_done() {
        session.report.finish();
        report::print("dry run: all steps are done; the last evaluation and the model remain\n");
        return Ok(());
    }
    session.feed();
    let Some(batch) = session.loader.next_batch()? else {
        return Err(if session.stop.requested() { stop::tried() } else { Failure::unusable("the data has no rows") });
    };
    let (sources, targets, shards) = batch.samples();
    let samples = Batch { sources: &sources, targets: &targets };
    let stop = session.stop.clone();
    let began = Instant::now();
    let plan = session.step_plan();
    let outcome = session
        .trainer
        .step_of_labels((&samples, options::row_labels(&batch)), &shards, &plan, &|| stop.requested())?;
    let took = began.elapsed();
    let stats = match outcome {
        StepOutcome::Done(stats) => stats,
        StepOutcome::Interrupted => {
            return Err(stop::tried());
        }
        other => return Err(Failure::internal(format!("the step failed: {other}"))),
    };
    session.save()?;
    session.report.finish();
    let checkpoints = session.run.checkpoints();
    let predicted = session.plan.predicted_peak;
    // A resumed run loads into an empty process. Memory was never planned for two models at a time.
    let Session { config, opened, .. } = session;
    let loaded = load(&checkpoints, &config, &opened)?;
    let now = SystemProbe::new().snapshot()?;
    report::print(&format!(
        "dry run: loss {:.4}, gradient norm {:.3}, {:.2} s a step, step {} loaded back; peak {} of the predicted {}\n",
        stats.loss,
        stats.grad_norm,
        took.as_secs_f64(),
        loaded.step_count(),
        now.peak_rss,
        predicted
    ));
    Ok(scratch.close()?)
}

/// Resumes from the saved checkpoint, as `--keep-training` would.
fn load(directory: &Path, config: &Config, opened: &Opened) -> Outcome<Trainer> {
    let found = Checkpoints::newest_valid(directory)?
        .ok_or_else(|| Failure::internal(format!("{}: nothing was saved", directory.display())))?;
    let options = found.state.options.clone();
    let dtype = options.parameter_dtype();
    if opened.model.lora.is_some() {
        return Ok(Trainer::resume_adapter(
            &found,
            FirstModel { config, opened, dtype }.adapted(None)?,
            options,
            None,
        )?);
    }
    Ok(Trainer::resume(&found, options, dtype, &opened.device)?)
}
