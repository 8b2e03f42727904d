//! The state of a run: the checkpoint that it resumes from, and whether any work is left.

use std::path::Path;

use dataloader::BatchShare;
use serde_json::json;
use trainer::checkpoint::{Checkpoints, Found};

use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::files::run_dir::RunDir;
use crate::model::sources::Sources;
use crate::run::open::Opened;
use crate::run::saved::Saved;
use crate::run::{identity, saved, setup};
use crate::scores::best::Measure;
use crate::screen::report;

/// The checkpoint of the step `from`, or else the newest valid one, checked against the config; `None` if the run has saved none.
pub fn checkpoint_to_resume(
    config: &Config,
    opened: &Opened,
    run: &RunDir,
    from: Option<u64>,
) -> Outcome<Option<(Found, Sources)>> {
    let found = match from {
        Some(step) => Some(checkpoint_of(step, run)?),
        None => Checkpoints::newest_valid(&run.checkpoints())?,
    };
    let Some(found) = found else {
        report::warn(&format!("{}: no checkpoint yet; training begins with step 1", run.root().display()));
        return Ok(None);
    };
    let path = found.path.display().to_string();
    for note in &found.notes {
        report::warn(&format!("{note}; falling back to {path}"));
    }
    let saved = saved::saved_state(&found)?;
    let sources = Sources::read(config, opened.init_from.as_deref(), run.root(), Some(&saved.identity))?;
    let now = identity::identity(config, opened, &sources);
    identity::check_unchanged(&saved.identity, &now, &config.run.allow_changes, &path)?;
    if identity::lacks_sources(&saved.identity, &now) {
        report::note(&format!("{path} does not record the weights below the adapter, so they are not compared"));
    }
    if identity::has_other_validation(&saved.identity, &now) {
        let rows = "changed since the checkpoint: the validation rows";
        report::warn(&format!("{rows}; earlier scores, and the best of them, are those of other rows"));
    }
    for change in identity::changed_settings(&saved.config, config) {
        report::warn(&format!("changed since the checkpoint: {change}"));
    }
    report::print(&format!("resuming from {path}\n"));
    Ok(Some((found, sources)))
}

/// The checkpoint of this step.
fn checkpoint_of(step: u64, run: &RunDir) -> Outcome<Found> {
    let directory = run.checkpoints();
    let steps = Checkpoints::steps(&directory)?;
    let others: Vec<u64> = steps.iter().rev().copied().filter(|&other| other != step).collect();
    let others = match others.as_slice() {
        [] => "the run has no other checkpoint".to_owned(),
        others => {
            format!("the run has checkpoints of {}", others.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
        }
    };
    if !steps.contains(&step) {
        let text = format!("{}: there is no checkpoint of step {step}", directory.display());
        return Err(Failure::usage(text).hint(others));
    }
    let found = Checkpoints::new(&directory, 1, 0).valid_at(step)?;
    found.ok_or_else(|| {
        Failure::unusable(format!("{}: the checkpoint of step {step} is damaged", directory.display())).hint(others)
    })
}

/// The checkpoints of a run that begins, or goes on. If it goes back to a step, later ones are moved aside, and that is said.
pub fn checkpoints(config: &Config, run: &RunDir, back_to: Option<u64>) -> Outcome<Checkpoints> {
    let settings = &config.checkpoint;
    let mut checkpoints = Checkpoints::new(&run.checkpoints(), settings.keep_last, settings.keep_best);
    if let Some(step) = back_to.filter(|_| run.is_locked()) {
        let aside = checkpoints.set_aside_after(step)?;
        let names: Vec<String> = aside.iter().map(|path| path.display().to_string()).collect();
        if !names.is_empty() {
            report::print(&format!("moved aside the later checkpoints: {}\n", names.join(", ")));
        }
    }
    Ok(checkpoints)
}

/// The files beside a run in the directory `root`, whose model is at `source`, before its weights are loaded. `before` are those that were
/// compared with the checkpoint: a quantised copy that was missing has been made again, and must be the same.
pub fn sources_at_start(
    config: &Config,
    opened: &Opened,
    (source, root): (Option<&Path>, &Path),
    before: Option<Sources>,
    resumed: Option<(&Saved, &Found)>,
) -> Outcome<Sources> {
    let mut known = json!({});
    before.unwrap_or_default().add_to(&mut known);
    let sources = Sources::read(config, source, root, Some(&known))?;
    if let Some((saved, found)) = resumed {
        let now = identity::identity(config, opened, &sources);
        let checkpoint = found.path.display().to_string();
        identity::check_unchanged(&saved.identity, &now, &config.run.allow_changes, &checkpoint)?;
    }
    Ok(sources)
}

/// Whether no work is left. If so, prints that.
pub fn is_finished(config: &Config, opened: &Opened, run: &RunDir, found: Option<&Found>) -> Outcome<bool> {
    let Some(found) = found else { return Ok(false) };
    let step = found.state.step;
    let (_, total_steps) =
        setup::steps(config, opened, saved::saved_state(found)?.position, step, BatchShare::default())?;
    if run.finished_step() != Some(step) {
        return Ok(false);
    }
    let measure = Measure::from_name(&config.checkpoint.best_metric);
    let stalled = saved::saved_state(found)?.history.stalled;
    if let Some(why) = stalled.ends(measure, config.train.early_stopping_patience).filter(|_| step < total_steps) {
        report::print(&format!(
            "this run stopped early at step {step}: {why}; the model is in {}\nto train longer, raise `train.early_stopping_patience`\n",
            run.model(&opened.model).display()
        ));
        return Ok(true);
    }
    if step < total_steps {
        return Ok(false);
    }
    report::print(&format!(
        "this run is finished: {step} steps; the model is in {}\nto train longer, raise `--epochs` or `--max-steps`\n",
        run.model(&opened.model).display()
    ));
    Ok(true)
}
