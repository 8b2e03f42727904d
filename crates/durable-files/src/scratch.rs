//! A directory for a dry run. If its process is killed, the next process that looks there removes it.
//!
//! Invariants:
//! * The directory itself is locked (`flock`) as long as its owner lives. A directory whose lock is free has no owner.
//! * Only this user can look into it, and no other user can exchange it.
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

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::leftovers::{Leftover, Others, is_dead};
use crate::temporary::{self, Kind, is_temporary_name, kind_of};

/// A directory that is removed with its owner.
#[derive(Debug)]
pub struct Scratch {
    parent: Directory,
    name: OsString,
    /// Holds the lock.
    directory: Directory,
    /// Whether the owner gives this name to a file or directory in it, at any depth.
    is_own: fn(&OsStr) -> bool,
    is_removed: bool,
}

impl Scratch {
    /// Makes an empty directory in `parent`. The caller will make only its own names in it, at any depth.
    ///
    /// # Errors
    /// [`Error::Exchangeable`]; the directory cannot be made or opened.
    pub fn create_in(parent: &Path, is_own: fn(&OsStr) -> bool) -> Result<Self> {
        let opened = Directory::open(parent).map_err(|e| Error::io("open", parent, e))?;
        // Everything below is used by its path.
        if !opened.is_guarded() {
            return Err(Error::Exchangeable { path: parent.to_owned() });
        }
        let made = temporary::create_directory(&opened, None);
        let (name, directory) = made.map_err(|e| Error::io("create a directory in", parent, e))?;
        Ok(Scratch { parent: opened, name, directory, is_own, is_removed: false })
    }

    /// Removes the directories in `parent` whose owners, processes of this user, ended without removing them. A directory that cannot
    /// be removed stays.
    pub fn remove_abandoned(parent: &Path, is_own: fn(&OsStr) -> bool) {
        let Ok(parent) = Directory::open(parent) else { return };
        if !parent.keeps_names() {
            return;
        }
        for name in parent.names().unwrap_or_default() {
            let is_ours = || parent.entry(&name).is_ok_and(|entry| entry.is_some_and(|entry| entry.is_ours()));
            if kind_of(&name) != Some(Kind::Run) || !is_ours() {
                continue;
            }
            let Ok(directory) = parent.directory(&name) else { continue };
            if is_dead(&parent, &name, directory.file(), Others::Possible) {
                let _ = remove(&parent, &name, &directory, is_own);
            }
        }
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The directory, for a process that ends without dropping this.
    pub fn leftover(&self) -> Leftover {
        Leftover::new(&self.parent, &self.name, self.directory.file())
    }

    /// Removes the directory.
    ///
    /// # Errors
    /// Something in it cannot be removed, or was not made by the owner.
    pub fn close(mut self) -> Result<()> {
        self.is_removed = true;
        self.remove().map_err(|e| Error::io("remove", self.path(), e))
    }

    fn remove(&self) -> io::Result<()> {
        remove(&self.parent, &self.name, &self.directory, self.is_own)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_removed {
            // Best effort: the next process removes the rest.
            let _ = self.remove();
        }
    }
}

/// Removes the files that a run writes into `directory`, and the directory if nothing else is in it.
fn remove(parent: &Directory, name: &OsStr, directory: &Directory, is_own: fn(&OsStr) -> bool) -> io::Result<()> {
    directory.remove_own(&|name| is_own(name) || is_temporary_name(name))?;
    parent.remove_directory(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

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
        scratch.directory.file().unlock().unwrap();
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

    #[test]
    fn only_its_user_can_look_into_it_and_nobody_else_can_exchange_it() {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::create_in(parent.path(), is_own).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(scratch.path()), 0o700);
        let (inner, beside) = (scratch.path().join("sample-data"), parent.path().join("a-run"));
        fs::create_dir(&inner).and_then(|()| fs::create_dir(&beside)).unwrap();
        for (directory, expected) in [(scratch.path(), 0o600), (&inner, 0o600), (&beside, 0o666)] {
            crate::write_atomic(&directory.join("rows.parquet"), b"rows").unwrap();
            let got = mode(&directory.join("rows.parquet"));
            assert!(got == expected || expected == 0o666 && got > 0o600, "{}: {got:o}", directory.display());
        }
        drop(scratch);
        let left = abandoned(parent.path());
        fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let refused = Scratch::create_in(parent.path(), is_own).unwrap_err();
        assert!(matches!(refused, Error::Exchangeable { .. }), "{refused}");
        Scratch::remove_abandoned(parent.path(), is_own);
        assert!(left.exists());
    }

    #[test]
    fn a_link_in_place_of_a_directory_is_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let (precious, parent) = (root.path().join("precious"), root.path().join("parent"));
        fs::create_dir_all(precious.join("step-00000001")).unwrap();
        fs::write(precious.join("step-00000001/model.safetensors"), "my only copy").unwrap();
        fs::create_dir(&parent).unwrap();
        let left = abandoned(&parent);
        fs::remove_dir_all(left.join("checkpoints")).unwrap();
        std::os::unix::fs::symlink(&precious, left.join("checkpoints")).unwrap();
        std::os::unix::fs::symlink(&precious, parent.join(".train_low_mem-tmp-0123456789abcdef-run")).unwrap();
        Scratch::remove_abandoned(&parent, is_own);
        assert!(precious.join("step-00000001/model.safetensors").exists());
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 1, "the link stays, the directory is gone");
    }
}
