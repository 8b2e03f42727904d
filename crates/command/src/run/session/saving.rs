//! The saves of a run: checkpoints, and the digests of the data that checkpoints rely on.

use std::path::PathBuf;
use std::time::Instant;

use memory_policy::Bytes;
use planner::names;
use serde_json::json;
use trainer::checkpoint::{Checkpoints, Found, TokenizerFiles};

use super::{Session, milliseconds};
use crate::failure::{Failure, Outcome};
use crate::model::model_files;
use crate::run::bits::Kernels;
use crate::run::saved::Saved;
use crate::run::{identity, setup};

impl Session {
    /// Saves if it is due: by steps, by time, on a signal, and at the end. While updates are skipped as not finite, nothing is due by steps or
    /// by time: the weights are those of before, and nothing shows that they are of use.
    pub fn save_if_due(&mut self) -> Outcome<()> {
        let step = self.trainer.step_count();
        if self.trainer.non_finite_in_a_row() > 0 && !self.trainer.is_done() && !self.should_stop() {
            return Ok(());
        }
        let by_steps = self.config.checkpoint.every_steps.is_some_and(|every| step.is_multiple_of(every));
        let by_clock = if self.group.is_some() { self.agreed.save } else { self.is_time_to_save() };
        if by_steps || by_clock || self.trainer.is_done() || self.should_stop() { self.save() } else { Ok(()) }
    }

    /// Whether a save is due by time.
    pub(super) fn is_time_to_save(&self) -> bool {
        let every = self.config.checkpoint.every_minutes;
        every.is_some_and(|minutes| self.saved_at.elapsed().as_secs_f64() >= 60.0 * minutes)
    }

    /// Saves the current state of the run, unless it was saved already.
    pub fn save(&mut self) -> Outcome<()> {
        let step = self.trainer.step_count();
        if self.saved_step == Some(step) {
            return Ok(());
        }
        // As before an evaluation: the next step allocates gradients again.
        self.trainer.release_gradients();
        let began = Instant::now();
        if !self.writes() {
            self.trainer.serve_state()?;
            (self.saved_step, self.saved_at) = (Some(step), began);
            self.stop.note_saved();
            return Ok(());
        }
        let state = Saved {
            position: self.position,
            identity: identity::identity(&self.config, &self.opened, &self.sources),
            history: self.history.clone(),
            plan: self.plan.clone(),
            kernels: Some(Kernels::of_this_process(&self.opened.device)),
            config: self.config.to_toml(""),
        };
        let state =
            serde_json::to_value(state).map_err(|error| Failure::internal(format!("checkpoint state: {error}")))?;
        self.run.check()?;
        self.keep_page_map()?;
        self.stop.note_saving();
        let (files, stop) = (model_files::of_tokenizer(&self.opened.tokenizer), self.stop.clone());
        let saved = self.checkpoints.save(&self.trainer, &state, Some(files), &|| stop.requested())?;
        self.stop.note_saved();
        self.saved_step = Some(step);
        self.saved_at = Instant::now();
        for note in &saved.notes {
            self.warn(note, json!({"step": step, "kind": "checkpoint"}))?;
        }
        let took_ms = milliseconds(began.elapsed());
        let path = saved.path.display().to_string();
        self.note_event("checkpoint", json!({"step": step, "path": path, "bytes": saved.bytes, "save_ms": took_ms}));
        self.report.line(&format!("saved {path} ({}, {took_ms:.0} ms)", Bytes(saved.bytes)));
        self.check_prediction(&names::SAVING)?;
        self.note_memory("after saving")
    }

    /// Saves the digests of the read pages, before the checkpoint that relies on them. A run can continue without them, but then notices
    /// fewer changes of the data.
    fn keep_page_map(&mut self) -> Outcome<()> {
        let known = self.opened.train.known_segments();
        if known == self.kept_segments {
            return Ok(());
        }
        match setup::keep_page_map(&self.opened, self.run.root()) {
            Ok(()) => self.kept_segments = known,
            Err(failure) => {
                let text = format!("{}; changed data may go unnoticed after a resume", failure.message);
                self.warn(&text, json!({"step": self.trainer.step_count(), "kind": "page_map"}))?;
            }
        }
        Ok(())
    }

    /// The path of the checkpoint of the current step.
    pub fn checkpoint_path(&self) -> PathBuf {
        self.checkpoints.path_of(self.trainer.step_count())
    }

    /// The checkpoint of the finished model, if that is not the model in memory. It is the best one, if the config asks for it, it is from
    /// an earlier step, and it is whole.
    ///
    /// # Errors
    /// The best checkpoint cannot be read. Another model must not silently replace it.
    pub fn best_checkpoint(&mut self) -> Outcome<Option<Found>> {
        let best = self.trainer.best_score().map(|best| best.step);
        let Some(step) = best.filter(|step| self.config.checkpoint.model_is_best && *step != self.trainer.step_count())
        else {
            return Ok(None);
        };
        if let Some(found) = self.checkpoints.valid_at(step)? {
            return Ok(Some(found));
        }
        let found = Checkpoints::best_valid(self.checkpoints.directory(), self.trainer.scored_by())?;
        // The model of step 0 is the one that the run started with, and is not saved.
        if step == 0 {
            let saved = found.as_ref().map_or(self.trainer.step_count(), |found| found.state.step);
            let text = format!(
                "no evaluation beat the starting model; the saved model is the best of the others, step {saved}"
            );
            self.report.line(&text);
            return Ok(found);
        }
        let Some(found) = found else { return Ok(None) };
        let saved = found.state.step;
        let text = format!(
            "the checkpoint of the best step, {step}, is missing or damaged; the saved model is from step {saved}"
        );
        self.warn(&text, json!({"step": self.trainer.step_count(), "kind": "checkpoint"}))?;
        Ok(Some(found))
    }

    /// The tokenizer's files, to be saved beside a model.
    pub fn tokenizer_files(&self) -> TokenizerFiles<'_> {
        model_files::of_tokenizer(&self.opened.tokenizer)
    }
}
