//! The state of a run: the checkpoint that it resumes from, and whether any work is left.

use dataloader::BatchShare;
use trainer::checkpoint::{Checkpoints, Found};

use crate::best::Measure;
use crate::config::Config;
use crate::failure::Outcome;
use crate::open::Opened;
use crate::run_dir::RunDir;
use crate::{identity, report, saved, setup};

/// The newest valid checkpoint, checked against the config; `None` if the run has saved none.
pub fn checkpoint_to_resume(config: &Config, opened: &Opened, run: &RunDir) -> Outcome<Option<Found>> {
    let Some(found) = Checkpoints::newest_valid(&run.checkpoints())? else {
        report::warn(&format!("{}: no checkpoint yet; starting from scratch", run.root().display()));
        return Ok(None);
    };
    let path = found.path.display().to_string();
    for note in &found.notes {
        report::warn(&format!("{note}; falling back to {path}"));
    }
    let saved = saved::saved_state(&found)?;
    let now = identity::identity(config, opened);
    identity::check_unchanged(&saved.identity, &now, &config.run.allow_changes, &path)?;
    for change in identity::changed_settings(&saved.config, config) {
        report::warn(&format!("changed since the checkpoint: {change}"));
    }
    report::print(&format!("resuming from {path}\n"));
    Ok(Some(found))
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
    let measure = Measure::of(&config.checkpoint.best_metric);
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
