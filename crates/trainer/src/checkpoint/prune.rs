//! Removing checkpoints that need not be kept, after a newer one is safe, and never losing another.
//!
//! A look at a checkpoint has one of three results:
//!
//! * **whole**: its files exist with the lengths in its manifest, and its state has the manifest's checksum;
//! * **torn**: it was read and disagrees with its manifest, or has none;
//! * **unknown**: it could not be read, or another version wrote it. Nothing is known about it, so it stays and does not
//!   count.
//!
//! Invariants:
//! * The checkpoint that was just saved stays.
//! * A checkpoint that was saved while updates were skipped as not finite does not count: nothing shows that its weights are of use, and
//!   it would take the place of one whose weights are.
//! * Nothing is removed before `keep_last` newer ones are known to be whole to the last byte. This process knows that of the
//!   checkpoints that it wrote or resumed from, and reads any other one once. After that a look costs a few small reads, so saving
//!   does not read back its own files. Those with the best scores are verified in the same way before another one is removed.
//! * A torn checkpoint is removed under the same condition, and reported. One that is unknown, or has files that no run writes, stays
//!   and is reported once.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use durable_files::{Directory, Kind, foreign_names, retire_directory};

use super::load::{self, verify};
use super::{Checkpoints, OWN_FILES, Saved, list};
use crate::error::{Error, Result};

/// The state of a checkpoint on disk.
enum Condition {
    Whole {
        score: Option<f64>,
        /// Whether the last update before it was skipped as not finite.
        is_stalled: bool,
    },
    Torn(String),
    Unknown(String),
}

impl Condition {
    fn of_error(error: &Error) -> Self {
        match error {
            Error::Torn { .. } => Condition::Torn(reason(error)),
            _ => Condition::Unknown(reason(error)),
        }
    }
}

struct Inspected {
    step: u64,
    path: PathBuf,
    condition: Condition,
}

/// Keeps the newest `keep_last` and the `keep_best` with the best scores, of the checkpoints up to `newest`, which was just saved.
///
/// Later ones stay. They exist if a run went back to an earlier step, and that run will replace them. An error
/// here does not affect the new checkpoint: it becomes a note.
pub(super) fn prune(checkpoints: &mut Checkpoints, newest: u64, saved: &mut Saved, interrupted: &dyn Fn() -> bool) {
    let listed = match list(&checkpoints.directory) {
        Ok(listed) => listed,
        Err(error) => return saved.notes.push(format!("no old checkpoint was removed: {error}")),
    };
    let older = listed.into_iter().filter(|&(step, _)| step <= newest);
    let mut older: Vec<Inspected> = older
        .map(|(step, path)| Inspected { step, condition: look(&path, step, &checkpoints.scored_by), path })
        .collect();
    let kept = kept(checkpoints, &mut older, interrupted);
    for (index, Inspected { step, path, condition }) in older.iter().enumerate() {
        let is_surplus = *step != newest && kept.as_ref().is_some_and(|kept| !kept.contains(&index));
        match condition {
            Condition::Unknown(reason) => note_once(checkpoints, saved, path, reason),
            Condition::Whole { .. } if is_surplus => {
                remove(checkpoints, saved, path);
            }
            Condition::Torn(reason) if is_surplus && remove(checkpoints, saved, path) => {
                saved.notes.push(format!("removed {}, because it was torn: {reason}", path.display()));
            }
            _ => {}
        }
    }
}

/// Which of these checkpoints, newest first, stay. `None` if too little is known to remove any.
fn kept(checkpoints: &mut Checkpoints, older: &mut [Inspected], interrupted: &dyn Fn() -> bool) -> Option<Vec<usize>> {
    let counts = |looked: &Inspected| !matches!(looked.condition, Condition::Whole { is_stalled: true, .. });
    let newest_first: Vec<usize> = (0..older.len()).filter(|&index| counts(&older[index])).collect();
    let mut kept = verified(checkpoints, older, &newest_first, checkpoints.keep_last, interrupted)?;
    if kept.len() < checkpoints.keep_last {
        return None;
    }
    let mut scored: Vec<(f64, usize)> =
        older.iter().enumerate().filter_map(|(i, looked)| Some((score(looked)?, i))).collect();
    // Of equal scores the earliest is the best, as `Trainer::record_score` counts. Larger indices are earlier steps.
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    let best_first: Vec<usize> = scored.into_iter().map(|(_, index)| index).collect();
    kept.extend(verified(checkpoints, older, &best_first, checkpoints.keep_best, interrupted)?);
    Some(kept)
}

fn score(looked: &Inspected) -> Option<f64> {
    match looked.condition {
        Condition::Whole { score, .. } => score,
        _ => None,
    }
}

/// The first `most` in this order that are whole to the last byte. `None` when interrupted.
fn verified(
    checkpoints: &mut Checkpoints,
    older: &mut [Inspected],
    order: &[usize],
    most: usize,
    interrupted: &dyn Fn() -> bool,
) -> Option<Vec<usize>> {
    let mut found = Vec::new();
    for &index in order {
        if found.len() == most {
            break;
        }
        let Inspected { step, path, condition } = &mut older[index];
        if !matches!(condition, Condition::Whole { .. }) {
            continue;
        }
        if !checkpoints.remembers(path) {
            match verify(path, *step, interrupted) {
                Ok(Some(_)) => checkpoints.remember(path),
                Ok(None) => return None,
                Err(error) => {
                    *condition = Condition::of_error(&error);
                    continue;
                }
            }
        }
        found.push(index);
    }
    Some(found)
}

/// Looks at everything but the tensors. The score is the one by this measure.
fn look(path: &Path, step: u64, measure: &str) -> Condition {
    let state = load::manifest_of(path).and_then(|manifest| {
        manifest.verify_lengths(path)?;
        load::read_state(path, step, &manifest)
    });
    match state {
        Ok(state) => Condition::Whole { score: state.score_by(measure), is_stalled: state.non_finite_in_a_row > 0 },
        Err(error) => Condition::of_error(&error),
    }
}

/// Removes a checkpoint and returns whether it did. A failure becomes a note.
fn remove(checkpoints: &mut Checkpoints, saved: &mut Saved, path: &Path) -> bool {
    let foreign = || {
        let (parent, name) = Directory::open_parent(path)?;
        match parent.entry(&name)? {
            Some(found) if found.kind == Kind::Link => Ok(None),
            _ => foreign_names(&parent.directory(&name)?, &OWN_FILES).map(Some),
        }
    };
    let removed = match foreign() {
        Ok(None) => {
            note_once(checkpoints, saved, path, "it is a symbolic link");
            return false;
        }
        Ok(Some(foreign)) => match foreign.first() {
            Some(name) => {
                let reason = format!("it contains a file that no run writes: {}", name.display());
                note_once(checkpoints, saved, path, &reason);
                return false;
            }
            None => retire_directory(path, &OWN_FILES).map_err(Error::from),
        },
        Err(e) => Err(Error::io("list", path, e)),
    };
    match removed {
        Ok(()) => saved.pruned.push(path.to_owned()),
        Err(error) => saved.notes.push(error.to_string()),
    }
    checkpoints.forget(path);
    true
}

/// Reports why a checkpoint stays, once and not at every save.
fn note_once(checkpoints: &mut Checkpoints, saved: &mut Saved, path: &Path, reason: &str) {
    if checkpoints.noted.insert(path.to_owned()) {
        saved.notes.push(format!("kept {}, because {reason}", path.display()));
    }
}

fn reason(error: &Error) -> String {
    let name = |path: &Path| path.file_name().unwrap_or_default().display().to_string();
    match error {
        Error::Torn { path, reason } => format!("{}: {reason}", name(path)),
        Error::Unreadable { path, source } => format!("{} could not be read: {source}", name(path)),
        Error::LaterFormat { path, format, known } => {
            let name = name(path);
            format!("a newer version of train_low_mem wrote it: {name} has format {format}, this version reads {known}")
        }
        other => other.to_string(),
    }
}

/// The entry that was at the path of a new checkpoint.
#[derive(Default)]
pub(super) struct Before {
    /// Its new path, if it may not be replaced.
    pub(super) aside: Option<PathBuf>,
    /// The note about it.
    pub(super) note: Option<String>,
}

impl Checkpoints {
    /// Moves the checkpoints after `step` aside: a run goes back to that step, and what it does next takes their place. Returns their new
    /// paths, the newest first. They stay until somebody removes them.
    ///
    /// # Errors
    /// I/O errors. Those that were moved before stay aside.
    pub fn set_aside_after(&mut self, step: u64) -> Result<Vec<PathBuf>> {
        let later = list(&self.directory)?.into_iter().filter(|(found, _)| *found > step);
        later
            .map(|(_, path)| {
                self.forget(&path);
                move_aside(&path)
            })
            .collect()
    }
}

/// Gives an entry a name that no checkpoint has, and returns its new path.
fn move_aside(path: &Path) -> Result<PathBuf> {
    let mut number = 1;
    loop {
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".kept-{number}"));
        match rename_to_free(path, aside.as_ref()) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            renamed => return renamed.map(|()| PathBuf::from(aside)).map_err(|e| Error::io("move aside", path, e)),
        }
    }
}

/// Renames a checkpoint, unless the new name is taken.
pub(super) fn rename_to_free(from: &Path, to: &Path) -> std::io::Result<()> {
    let ((directory, old), new) = (Directory::open_parent(from)?, to.file_name().unwrap_or_default());
    directory.rename_to_free(&old, &directory, new)
}

/// Makes way for a checkpoint of the same step. A whole or a torn one will be replaced; any other entry moves aside.
pub(super) fn make_way(target: &Path, step: u64) -> Result<Before> {
    match Directory::open_parent(target).and_then(|(parent, name)| parent.entry(&name)) {
        Ok(Some(_)) => {}
        Ok(None) => return Ok(Before::default()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Before::default()),
        Err(e) => return Err(Error::io("examine", target, e)),
    }
    let reason = match look(target, step, "") {
        Condition::Whole { .. } => return Ok(Before::default()),
        Condition::Torn(reason) => {
            let note = Some(format!("replaced {}, because it was torn: {reason}", target.display()));
            return Ok(Before { aside: None, note });
        }
        Condition::Unknown(reason) => reason,
    };
    let aside = move_aside(target)?;
    let note = format!("moved {} to {}, because {reason}", target.display(), aside.display());
    Ok(Before { aside: Some(aside), note: Some(note) })
}
