//! The output directory: its names, and the rule that no run is ever overwritten.
//!
//! ```text
//! OUTPUT/resolved.toml   the config as resolved
//! OUTPUT/metrics.jsonl   one line per event
//! OUTPUT/checkpoints/    step-00000100, ...
//! OUTPUT/model/          the finished model
//! OUTPUT/finished.json   which step the model is of, and what it is worth; written last
//! ```
//!
//! One process writes here: it holds [`trainer::RunLock`]. `--dry-run` only looks at it.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use trainer::RunLock;

use crate::failure::{Failure, Outcome};

/// An output directory.
#[derive(Debug)]
pub struct RunDir {
    root: PathBuf,
    _lock: Option<RunLock>,
}

impl RunDir {
    /// Creates the directory where needed and takes its lock.
    pub fn lock(root: &Path) -> Outcome<Self> {
        let lock = RunLock::acquire(root)?;
        Ok(Self { root: root.to_path_buf(), _lock: Some(lock) })
    }

    /// The directory as it is, or is not, to look at: without its lock nothing may be written there.
    pub fn look_at(root: &Path) -> Self {
        Self { root: root.to_path_buf(), _lock: None }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `OUTPUT/checkpoints`
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join(trainer::checkpoint::CHECKPOINTS_DIRECTORY)
    }

    /// `OUTPUT/model`
    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    /// `OUTPUT/metrics.jsonl`
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The step of `OUTPUT/model`, where the run was finished.
    pub fn finished_step(&self) -> Option<u64> {
        let text = std::fs::read(self.root.join("finished.json")).ok()?;
        let finished: Value = serde_json::from_slice(&text).ok()?;
        finished["step"].as_u64().filter(|_| self.model().join("model.safetensors").exists())
    }

    /// Says that `OUTPUT/model` is the model of this step. The last thing that a run writes.
    pub fn finish(&self, step: u64, history: &impl Serialize) -> Outcome<()> {
        let text = json!({ "step": step, "history": history });
        Ok(trainer::write_atomic(&self.root.join("finished.json"), format!("{text:#}\n").as_bytes())?)
    }

    /// Refuses to start a new run where one has saved something.
    pub fn refuse_to_overwrite(&self) -> Outcome<()> {
        let has_checkpoints = std::fs::read_dir(self.checkpoints()).is_ok_and(|mut entries| entries.next().is_some());
        if !has_checkpoints && !self.model().exists() {
            return Ok(());
        }
        let what = if has_checkpoints { "checkpoints" } else { "a model" };
        Err(Failure::usage(format!(
            "{}: this directory already holds {what} of a run, and a run is never overwritten",
            self.root.display()
        ))
        .hint("`--keep-training` goes on with that run")
        .hint("`--output DIR` starts a new one elsewhere"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_saved_something_is_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::lock(directory.path()).unwrap();
        std::fs::create_dir(run.checkpoints()).unwrap();
        run.refuse_to_overwrite().expect("nothing saved yet");
        std::fs::create_dir(run.checkpoints().join("step-00000001")).unwrap();
        let refused = run.refuse_to_overwrite().expect_err("a checkpoint");
        assert!(refused.hints[0].contains("--keep-training"), "{refused}");
    }
}
