//! A temporary directory for parsers that read files, in memory if the system supports it.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A temporary directory, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    directory: TempDir,
    is_prepared: Cell<bool>,
}

impl Scratch {
    /// Makes a directory.
    pub fn new() -> io::Result<Self> {
        let in_memory = Path::new("/dev/shm");
        let directory = match tempfile::tempdir_in(in_memory) {
            Ok(directory) => directory,
            Err(_) => tempfile::tempdir()?,
        };
        Ok(Self { directory, is_prepared: Cell::new(false) })
    }

    /// The path of a file or directory in it, which need not exist.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file and returns its path.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).expect("the temporary directory can be written");
        path
    }

    /// Runs `prepare` on the first call only: for files that stay the same for all inputs.
    pub(crate) fn prepare_once(&self, prepare: impl FnOnce()) {
        if !self.is_prepared.replace(true) {
            prepare();
        }
    }
}
