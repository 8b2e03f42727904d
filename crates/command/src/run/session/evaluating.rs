//! Evaluations of a run: when they are due, which is the best, and when they end the run.

use memory_policy::plural;
use planner::names;
use serde_json::json;
use trainer::checkpoint::Found;

use super::Session;
use crate::failure::{Failure, Outcome};
use crate::run::options;
use crate::run::saved::saved_state;
use crate::scores::best::Measure;
use crate::scores::class_scores;
use crate::scores::evaluation::{self, Settings};
use crate::scores::figures::Figures;

impl Session {
    /// Whether this step has been evaluated, or there is nothing to evaluate on.
    pub fn is_evaluated(&self) -> bool {
        let step = self.trainer.step_count();
        let last = self.history.last_evaluation.as_ref().and_then(|evaluation| evaluation["step"].as_u64());
        self.opened.validation.is_none() || last == Some(step)
    }

    /// Evaluates if it is due: before the first step, every `train.eval_every_steps` steps, and at the end. A new best model is saved at
    /// once. A signal ends the evaluation without a result.
    pub fn evaluate_if_due(&mut self) -> Outcome<()> {
        let step = self.trainer.step_count();
        let every = self.config.train.eval_every_steps;
        let is_due = step == 0 || self.trainer.is_done() || (every > 0 && step.is_multiple_of(every));
        let Some(dataset) = self.opened.validation.clone().filter(|_| is_due && !self.is_evaluated()) else {
            return Ok(());
        };
        self.trainer.release_gradients();
        heap::release_unused();
        self.note_memory("before evaluation")?;
        let settings = self.settings_of_tasks();
        let rows = settings.iter().map(|(_, settings)| settings.counts(&dataset).evaluated).sum();
        self.report.line(&format!("evaluating {}", plural(rows, "row")));
        let (model, rows) = (self.trainer.model(), (&dataset, &self.opened.tokenizer));
        let report = &self.report;
        let mut progress = |done, all| report.evaluating(done, all);
        let group = self.group.as_ref();
        let mut watcher = evaluation::Watcher { answered: &mut |_| Ok(()), progress: &mut progress, group };
        let figures = evaluation::evaluate_each(model, rows, settings, &self.stop, &mut watcher)?;
        let Some(figures) = figures else { return Ok(()) };
        self.check_prediction(&names::EVALUATION)?;
        self.note_skipped_validation(&figures)?;
        self.note_evaluation(&figures)?;
        heap::release_unused();
        self.note_memory("after evaluation")
    }

    /// Warns once of validation rows that were skipped.
    ///
    /// # Errors
    /// No row could be used: there is no loss.
    fn note_skipped_validation(&mut self, figures: &Figures) -> Outcome<()> {
        let step = self.trainer.step_count();
        let Some(skipped) =
            figures.skipped.in_words(figures.samples).filter(|_| self.history.first_evaluation.is_none())
        else {
            return Ok(());
        };
        let text = format!("validation rows: {skipped}");
        if figures.samples == 0 {
            return Err(Failure::unusable(format!("no row for validation could be used: {skipped}"))
                .hint("`train_low_mem inspect FILE` lists the columns"));
        }
        let row = figures.skipped.first.clone().unwrap_or_default();
        let event = json!({"step": step, "kind": "bad_validation_rows", "bad_rows": figures.skipped.rows, "row": row});
        self.warn(&text, event)
    }

    /// The settings of each evaluation: of all rows, or of the rows of each task with its name and its prefix.
    fn settings_of_tasks(&self) -> Vec<(Option<String>, Settings)> {
        let settings = options::evaluation(&self.config, &self.opened, &self.plan);
        let settings = Settings { reference: self.trainer.frozen().cloned(), ..settings };
        let tasks = self.opened.mixture.as_ref().map(|mixture| mixture.tasks());
        settings.of_tasks(tasks, self.opened.validation_of_tasks.iter().copied())
    }

    fn note_evaluation(&mut self, figures: &Figures) -> Outcome<()> {
        let step = self.trainer.step_count();
        let mut fields = figures.to_json();
        fields["step"] = json!(step);
        let mut event = fields.clone();
        event["examples"] = figures.examples_json();
        self.note_event("eval", event);
        self.warn_of_labels(figures)?;
        self.report.note_validation(figures.loss);
        self.report.line(&format!("evaluation at step {step}: {}", figures.line()));
        figures.task_lines().for_each(|line| self.report.line(&line));
        if !figures.examples.is_empty() && step > 0 {
            self.report.line(&figures.examples_text());
        }
        if step == 0 {
            self.history.first_evaluation = Some(fields.clone());
        }
        self.history.last_evaluation = Some(fields);
        self.history.example_prompt = figures.examples.first().map(|example| example.source.clone());
        let (measure, least) = (self.measure(), self.config.train.early_stopping_min_delta);
        let score = measure.score(figures);
        self.history.stalled.note(measure, score, step, least);
        let is_best = self.trainer.record_score(score);
        let is_worth_saving = step > 0 && is_best && self.config.checkpoint.keep_best > 0;
        if is_worth_saving { self.save() } else { Ok(()) }
    }

    /// Warns once of labels that differ only by case or blanks.
    fn warn_of_labels(&mut self, figures: &Figures) -> Outcome<()> {
        let step = self.trainer.step_count();
        let variants = figures.labels.as_ref().map(|labels| labels.spellings().variants()).unwrap_or_default();
        let text = class_scores::in_words(&variants);
        if step > 0 || text.is_empty() {
            Ok(())
        } else {
            self.warn(text.trim_end(), json!({"step": step, "kind": "labels"}))
        }
    }

    /// Notes the evaluation of the model that a finished run keeps: the last one that its checkpoint has. `None`: the model in memory.
    pub fn keep_evaluation(&mut self, checkpoint: Option<&Found>) -> Outcome<()> {
        let (step, last) = match checkpoint {
            Some(found) => (found.state.step, saved_state(found)?.history.last_evaluation),
            None => (self.trainer.step_count(), self.history.last_evaluation.clone()),
        };
        self.history.kept_evaluation = last.filter(|evaluation| evaluation["step"].as_u64() == Some(step));
        Ok(())
    }

    /// The value by which evaluations are compared.
    pub fn measure(&self) -> Measure {
        Measure::from_name(&self.config.checkpoint.best_metric)
    }

    /// Whether all steps are made.
    pub fn is_over(&self) -> bool {
        self.trainer.is_done() || self.ends_early().is_some()
    }

    /// The reason to end the run before its last step: its evaluations no longer improve. `None` if it continues.
    pub fn ends_early(&self) -> Option<String> {
        self.history.stalled.ends(self.measure(), self.config.train.early_stopping_patience)
    }
}
