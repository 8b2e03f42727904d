//! A run whose values are no longer finite: what it does not call a finished model, and the checkpoint from which it can go on.

use trainer::checkpoint::Checkpoints;

use super::Session;
use crate::failure::{Exit, Failure, Outcome};

impl Session {
    /// Refuses to call the model in memory finished if nothing shows that its weights are of use: the last updates were skipped as not
    /// finite, and no evaluation of these weights had a finite loss.
    pub fn refuse_diverged_model(&self) -> Outcome<()> {
        let (step, skipped) = (self.trainer.step_count(), self.trainer.non_finite_in_a_row());
        let evaluation = self.history.last_evaluation.as_ref().filter(|found| found["step"].as_u64() == Some(step));
        let is_finite = evaluation.map(|found| found["loss"].as_f64().is_some_and(f64::is_finite));
        let why = match (is_finite, skipped) {
            (Some(true), _) | (None, 0) => return Ok(()),
            (Some(false), _) => "the loss on validation rows is not finite".to_owned(),
            (None, 1) => "the last update was skipped as not finite".to_owned(),
            (None, _) => format!("the last {skipped} updates were skipped as not finite"),
        };
        let text = format!("step {step}: {why}; training diverged, and the model is not saved as a finished one");
        Err(Failure::new(Exit::Diverged, text))
    }

    /// Adds the way back to a failure of a run that diverged: the newest checkpoint whose weights a finite step has used.
    pub fn with_way_back(&self, failure: Failure) -> Failure {
        let done = self.trainer.step_count() - u64::from(self.trainer.non_finite_in_a_row());
        let directory = self.checkpoints.directory();
        match Checkpoints::newest_valid_before(directory, done) {
            Ok(Some(found)) => failure.hint(format!(
                "to go on from before that, run the same command with `--keep-training --resume-from {}` and a lower `--learn-rate`",
                found.state.step
            )),
            _ => failure.hint("no checkpoint is from before that: start again with a lower `--learn-rate` and another `--output`"),
        }
    }
}
