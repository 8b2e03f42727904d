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

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::directories::{parent_of, sync_directory};
use crate::error::{Error, Result};
use crate::temporary;

/// Writes `bytes` to `path` so that a reader, or the next start after a crash, sees the old file or the new, never a part.
///
/// # Errors
/// [`Error::DiskFull`], or [`Error::Io`] for anything else. The old file is then intact, and nothing is left of the new one.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = parent_of(path);
    let (temporary, mut file) = temporary::create_file(&parent)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io("write", path, e));
    let renamed = written.and_then(|()| fs::rename(&temporary, path).map_err(|e| Error::io("replace", path, e)));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    sync_directory(&parent)
}

/// A file that is written piece by piece, and gets its name only once it is whole. If it is dropped before, nothing is left of it.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    is_done: bool,
}

impl AtomicFile {
    /// Begins a file that will be `path`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(path: &Path) -> Result<Self> {
        let (temporary, file) = temporary::create_file(&parent_of(path))?;
        Ok(Self { path: path.to_owned(), temporary, file, is_done: false })
    }

    /// The temporary name of the file.
    pub fn temporary(&self) -> &Path {
        &self.temporary
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
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, e))?;
        fs::rename(&self.temporary, &self.path).map_err(|e| Error::io("replace", &self.path, e))?;
        self.is_done = true;
        sync_directory(&parent_of(&self.path))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.is_done {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[cfg(unix)]
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
