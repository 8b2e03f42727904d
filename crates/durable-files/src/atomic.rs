//! Files that are whole or absent: the only module of the project that writes small files.
//!
//! Invariants:
//! * A name never points at half a file: everything is written under a temporary name (see [`crate::temporary`]) in the same
//!   directory, synced, and renamed.
//! * A new file is on the disk with its name: after a rename the directory that has the name is synced.
//!
//! ```no_run
//! durable_files::write_atomic("runs/tiny/resolved.toml".as_ref(), b"[run]\n")?;
//! # Ok::<(), durable_files::Error>(())
//! ```

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::leftovers::Leftover;
use crate::temporary;

/// Writes `bytes` to `path` so that a reader, or the next start after a crash, sees the old file or the new, never a part.
///
/// # Errors
/// [`Error::DiskFull`], or [`Error::Io`] for anything else. The old file is then intact, and nothing is left of the new one.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    AtomicFile::create(path)?.write(bytes)
}

impl Directory {
    /// As [`write_atomic`], for a name in this directory.
    ///
    /// # Errors
    /// As [`write_atomic`].
    pub fn write_atomic(&self, name: &OsStr, bytes: &[u8]) -> Result<()> {
        AtomicFile::create_in(self.clone(), name.to_owned())?.write(bytes)
    }
}

/// A file that is written piece by piece, and gets its name only once it is whole. If it is dropped before, nothing is left of it.
#[derive(Debug)]
pub struct AtomicFile {
    directory: Directory,
    name: OsString,
    path: PathBuf,
    temporary: OsString,
    /// Locked, so that no other process takes it for a leftover.
    file: File,
    is_done: bool,
}

impl AtomicFile {
    /// Begins a file that will be `path`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(path: &Path) -> Result<Self> {
        let failed = |e| Error::io("create a file in", &crate::directory::parent_of(path), e);
        let (directory, name) = Directory::open_parent(path).map_err(failed)?;
        Self::create_in(directory, name)
    }

    /// Begins a file that will have this name in an open directory.
    fn create_in(directory: Directory, name: OsString) -> Result<Self> {
        let made = temporary::create_file(&directory);
        let (temporary, file) = made.map_err(|e| Error::io("create a file in", directory.path(), e))?;
        Ok(Self { path: directory.path().join(&name), directory, name, temporary, file, is_done: false })
    }

    /// The unfinished file, for a process that ends without dropping this.
    pub fn leftover(&self) -> Leftover {
        Leftover::new(&self.directory, &self.temporary, &self.file)
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name. A file that had the name is replaced.
    ///
    /// # Errors
    /// I/O errors. The old file then still has the name, or only the last sync failed.
    pub fn commit(mut self) -> Result<()> {
        self.finish()
    }

    /// As [`AtomicFile::commit`]. Returns the open file, to write more at its end.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`].
    pub fn commit_open(mut self) -> Result<File> {
        let open = self.file.try_clone().map_err(|e| Error::io("write", &self.path, e))?;
        self.finish()?;
        Ok(open)
    }

    fn write(self, bytes: &[u8]) -> Result<()> {
        self.file().write_all(bytes).map_err(|e| Error::io("write", &self.path, e))?;
        self.commit()
    }

    fn finish(&mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, e))?;
        self.directory.rename(&self.temporary, &self.name).map_err(|e| Error::io("replace", &self.path, e))?;
        self.is_done = true;
        self.directory.sync().map_err(|e| Error::io("sync", self.directory.path(), e))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.is_done {
            let _ = self.directory.remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_atomic_write_replaces_the_file_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_atomic(&path, b"old").unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_written_in_pieces_is_there_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rows.parquet");
        drop(AtomicFile::create(&path).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let file = AtomicFile::create(&path).unwrap();
        file.file().write_all(b"rows").unwrap();
        assert!(!path.exists());
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"rows");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_atomic_write_that_cannot_be_done_names_the_place() {
        let directory = tempfile::tempdir().unwrap();
        let error = write_atomic(&directory.path().join("absent/state.json"), b"").unwrap_err();
        assert!(matches!(&error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("absent"), "{error}");
    }

    #[test]
    fn an_atomic_write_makes_a_file_that_others_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let (path, plain) = (directory.path().join("a"), directory.path().join("b"));
        write_atomic(&path, b"").unwrap();
        File::create(&plain).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
    }
}
