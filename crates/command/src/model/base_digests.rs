//! Whether the weights below an adapter are still those beside which its run trained it. The run's newest checkpoint has their digests.

use std::path::{Path, PathBuf};

use serde_json::Value;
use trainer::checkpoint::{CHECKPOINTS_DIRECTORY, Checkpoints, STATE_FILE};
use trainer::{FileDigest, FileDigests, digests_of};

use crate::model::base;
use crate::screen::report;

/// The key of the stamps of these files in a run's identity. Stamps are not compared: they save reading a file again.
pub const STAMPS: &str = "stamps";

/// The source below an adapter.
pub const OF_MODEL: &str = "model.init_from";

/// A longer state is no checkpoint's.
const MAX_STATE_BYTES: u64 = 4 << 20;

/// Warns if the weights below an adapter have changed since its run used them. The run's newest checkpoint has their digests; of an adapter
/// that lies elsewhere nothing is known.
pub fn warn_if_changed(base: &Path, adapter: &Path) {
    if let Some(file) = changed_file(base, adapter) {
        let (file, adapter) = (file.display(), adapter.display());
        report::warn(&format!("{file} has changed since {adapter} was trained beside it: this is another model"));
    }
}

fn changed_file(base: &Path, adapter: &Path) -> Option<PathBuf> {
    // The adapter of a checkpoint lies beside its state, and that of a run beside its checkpoints.
    let of_run = || {
        let checkpoints = adapter.parent()?.join(CHECKPOINTS_DIRECTORY);
        let step = Checkpoints::steps(&checkpoints).ok()?.first().copied()?;
        Some(checkpoints.join(format!("step-{step:08}")))
    };
    let state = |directory: PathBuf| regular_file::read(&directory.join(STATE_FILE), MAX_STATE_BYTES).ok();
    let state = state(adapter.to_owned()).or_else(|| state(of_run()?))?;
    let state: Value = serde_json::from_slice(&state).ok()?;
    let is_copy = base.file_name().is_some_and(|name| name.to_string_lossy().starts_with("base-"));
    let source = if is_copy { base::shown_name(base) } else { OF_MODEL.to_owned() };
    let known: FileDigests = serde_json::from_value(state["caller"]["identity"][STAMPS][&source].clone()).ok()?;
    let now = digests_of(&t5::weight_files(base).ok()?, &known).ok()?;
    let is_same = |name: &str, now: &FileDigest| known.get(name).is_some_and(|then| then.sha256 == now.sha256);
    now.iter().find(|(name, digest)| !is_same(name, digest)).map(|(name, _)| base.join(name))
}
