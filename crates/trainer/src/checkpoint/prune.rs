//! Removing checkpoints that nobody asked to keep, after a newer one is safe.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Checkpoints, Manifest, STATE_FILE, Saved, TrainerState, list};
use crate::error::{Error, Result};
use crate::files;

/// Keeps the newest `keep_last` and the `keep_best` with the best scores, of those up to `newest`, which was just saved.
///
/// Later ones stay: they are there when a run went back to an earlier step, which will reach and replace them. Torn ones are
/// not counted, so they never push out a whole one. Nothing that fails here concerns the new checkpoint: it becomes a note.
pub(super) fn prune(checkpoints: &Checkpoints, newest: u64, saved: &mut Saved) {
    let listed = match list(&checkpoints.directory) {
        Ok(listed) => listed,
        Err(error) => return saved.notes.push(error.to_string()),
    };
    let older: Vec<PathBuf> = listed.into_iter().filter(|&(step, _)| step <= newest).map(|(_, path)| path).collect();
    let kept = kept(&older, checkpoints.keep_last, checkpoints.keep_best);
    for path in older.into_iter().filter(|path| !kept.contains(path)) {
        match remove(&path) {
            Ok(()) => saved.pruned.push(path),
            Err(error) => saved.notes.push(error.to_string()),
        }
    }
}

/// Which of these, newest first, stay.
fn kept(newest_first: &[PathBuf], keep_last: usize, keep_best: usize) -> Vec<PathBuf> {
    let whole: Vec<&PathBuf> = newest_first
        .iter()
        .filter(|path| Manifest::read(path).and_then(|manifest| manifest.verify_lengths(path)).is_ok())
        .collect();
    let mut scored: Vec<(f64, &PathBuf)> = whole.iter().filter_map(|path| Some((score(path)?, *path))).collect();
    // Stable: of equal scores the newest is the best.
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let best = scored.into_iter().take(keep_best).map(|(_, path)| path);
    whole.iter().take(keep_last).copied().chain(best).cloned().collect()
}

fn score(path: &Path) -> Option<f64> {
    let text = fs::read(path.join(STATE_FILE)).ok()?;
    serde_json::from_slice::<TrainerState>(&text).ok()?.score
}

/// Takes the name away first, so that being killed on the way leaves a leftover and not a torn checkpoint.
fn remove(path: &Path) -> Result<()> {
    let doomed = files::temporary_directory(path)?;
    files::remove_directory(&doomed)?;
    fs::rename(path, &doomed).map_err(|e| Error::io("move out of the way", path, e))?;
    files::remove_directory(&doomed)
}
