//! A directory for a dry run. If its process is killed, the next process that looks there removes it.
//!
//! Invariants:
//! * The directory itself is locked (`flock`) as long as its owner lives. A directory whose lock is free has no owner.
//! * In a directory without owner, only files that a run writes are removed. If it has any other file, it stays.
//!
//! ```no_run
//! let is_own = |name: &std::ffi::OsStr| name == "resolved.toml" || name == "metrics.jsonl";
//! durable_files::Scratch::remove_abandoned("runs".as_ref(), is_own);
//! let scratch = durable_files::Scratch::create_in("runs".as_ref(), is_own)?;
//! durable_files::write_atomic(&scratch.path().join("resolved.toml"), b"")?;
//! scratch.close()?;
//! # Ok::<(), durable_files::Error>(())
//! ```

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::temporary::{self, Kind};

/// A directory that is removed with its owner.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// Whether the owner gives this name to a file or directory in it, at any depth.
    is_own: fn(&OsStr) -> bool,
    /// Holds the lock.
    _directory: File,
    is_removed: bool,
}

impl Scratch {
    /// Makes an empty directory in `parent`. The caller will make only its own names in it, at any depth.
    ///
    /// # Errors
    /// The directory cannot be made or opened.
    pub fn create_in(parent: &Path, is_own: fn(&OsStr) -> bool) -> Result<Self> {
        loop {
            let path = temporary::create_run_directory(parent)?;
            // A process that looks for abandoned directories may come between making and locking, and remove this one.
            match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                opened => {
                    let directory = opened.map_err(|e| Error::io("open", &path, e))?;
                    // A file system without locks for directories: no process can take the lock, so none removes the directory.
                    let _ = directory.try_lock();
                    if is_at(&directory, &path) {
                        return Ok(Scratch { path, is_own, _directory: directory, is_removed: false });
                    }
                }
            }
        }
    }

    /// Removes the directories in `parent` whose owners ended without removing them. A directory that cannot be removed stays.
    pub fn remove_abandoned(parent: &Path, is_own: fn(&OsStr) -> bool) {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let is_ours = temporary::kind_of(&entry.file_name()) == Some(Kind::Run);
            if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            let Ok(directory) = File::open(&path) else { continue };
            if directory.try_lock().is_ok() && is_at(&directory, &path) {
                let _ = remove(&path, is_own);
            }
        }
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the directory.
    ///
    /// # Errors
    /// Something in it cannot be removed, or was not made by the owner.
    pub fn close(mut self) -> Result<()> {
        self.is_removed = true;
        remove(&self.path, self.is_own).map_err(|e| Error::io("remove", &self.path, e))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_removed {
            // Best effort: the next process removes the rest.
            let _ = remove(&self.path, self.is_own);
        }
    }
}

fn is_at(directory: &File, path: &Path) -> bool {
    let held = directory.metadata().map(|held| Identity::of(&held));
    matches!((held, Identity::at(path)), (Ok(held), Ok(there)) if held == there)
}

/// Removes the files that a run writes into `directory`, and the directory if nothing else is in it.
fn remove(directory: &Path, is_own: fn(&OsStr) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if !is_own(&name) && !temporary::is_temporary_name(&name) {
            continue;
        }
        if entry.file_type()?.is_dir() { remove(&entry.path(), is_own)? } else { fs::remove_file(entry.path())? }
    }
    fs::remove_dir(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_own(name: &OsStr) -> bool {
        const NAMES: [&str; 7] = [
            ".lock",
            "resolved.toml",
            "sample-data",
            "rows.parquet",
            "checkpoints",
            "step-00000001",
            "model.safetensors",
        ];
        NAMES.iter().any(|own| name == *own)
    }

    /// A directory as a killed dry run leaves it.
    fn abandoned(parent: &Path) -> PathBuf {
        let scratch = Scratch::create_in(parent, is_own).unwrap();
        let path = scratch.path().to_owned();
        for directory in [
            "sample-data",
            "checkpoints/step-00000001",
            "checkpoints/.train_low_mem-tmp-0123456789abcdef-part-step-00000002",
        ] {
            fs::create_dir_all(path.join(directory)).unwrap();
        }
        for file in
            [".lock", "resolved.toml", "sample-data/rows.parquet", "checkpoints/step-00000001/model.safetensors"]
        {
            fs::write(path.join(file), "").unwrap();
        }
        // Ends without removing anything, like a killed process. The lock ends with the process.
        let Scratch { ref _directory, .. } = scratch;
        _directory.unlock().unwrap();
        std::mem::forget(scratch);
        path
    }

    #[test]
    fn an_abandoned_directory_is_removed_and_one_in_use_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let (first, second) = (abandoned(parent.path()), abandoned(parent.path()));
        let in_use = Scratch::create_in(parent.path(), is_own).unwrap();
        Scratch::remove_abandoned(parent.path(), is_own);
        assert!(!first.exists() && !second.exists());
        assert!(in_use.path().is_dir());
        in_use.close().unwrap();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_its_owner_drops_is_gone() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::create_in(parent.path(), is_own).unwrap();
        fs::write(scratch.path().join("resolved.toml"), "").unwrap();
        drop(scratch);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_that_no_run_writes_stay_where_they_are() {
        let parent = tempfile::tempdir().unwrap();
        let path = abandoned(parent.path());
        fs::write(path.join("checkpoints/thesis"), "my only copy").unwrap();
        for other in
            [".train_low_mem-tmp-thesis", ".train_low_mem-tmp-0123456789abcdef-runs", ".train_low_mem-dry-run-x"]
        {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        Scratch::remove_abandoned(parent.path(), is_own);
        assert_eq!(fs::read_to_string(path.join("checkpoints/thesis")).unwrap(), "my only copy");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 4);
    }
}
