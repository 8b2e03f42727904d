//! The lock of an output directory: one writer at a time.
//!
//! Invariants:
//! * The kernel holds the lock (`flock`), so it ends with the process that took it, however that ends. A lock file that
//!   is merely there locks nothing: there are no stale locks.
//! * Who takes the lock removes what a killed predecessor left unfinished.
//! * The lock file stays after the run: removing it would let two processes lock two files of the same name.
//!
//! ```no_run
//! let lock = trainer::RunLock::acquire("runs/tiny".as_ref())?;
//! if let Some(pid) = lock.crashed_predecessor() {
//!     eprintln!("process {pid} ended without letting go; going on from its newest checkpoint");
//! }
//! # Ok::<(), trainer::Error>(())
//! ```

use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::checkpoint::CHECKPOINTS_DIRECTORY;
use crate::error::{Error, Result};
use crate::files;

const LOCK_FILE: &str = ".lock";

/// The right to write to an output directory, until it is dropped.
#[derive(Debug)]
pub struct RunLock {
    file: File,
    crashed_predecessor: Option<u32>,
}

impl RunLock {
    /// Takes the lock of `output`, making the directory where there is none, and cleans up after a killed predecessor.
    ///
    /// # Errors
    /// [`Error::Locked`] with the holder's process id while another process has it; I/O errors.
    pub fn acquire(output: &Path) -> Result<Self> {
        fs::create_dir_all(output).map_err(|e| Error::io("create", output, e))?;
        let path = output.join(LOCK_FILE);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| Error::io("open", &path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked { path: output.to_owned(), pid: read_pid(&mut file) });
            }
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
        }
        let crashed_predecessor = read_pid(&mut file);
        write_pid(&mut file, Some(std::process::id())).map_err(|e| Error::io("write", &path, e))?;
        files::remove_leftovers(output)?;
        files::remove_leftovers(&output.join(CHECKPOINTS_DIRECTORY))?;
        Ok(RunLock { file, crashed_predecessor })
    }

    /// The process that had the lock before and ended without letting go of it: it was killed, or the machine stopped.
    pub fn crashed_predecessor(&self) -> Option<u32> {
        self.crashed_predecessor
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Best effort: the lock itself goes with the file handle.
        let _ = write_pid(&mut self.file, None);
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn write_pid(file: &mut File, pid: Option<u32>) -> std::io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    if let Some(pid) = pid { writeln!(file, "{pid}") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_writer_is_refused_and_told_who_the_first_is() {
        let output = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(output.path()).unwrap();
        let error = RunLock::acquire(output.path()).unwrap_err();
        assert!(matches!(error, Error::Locked { pid: Some(pid), .. } if pid == std::process::id()), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(lock);
        assert_eq!(RunLock::acquire(output.path()).unwrap().crashed_predecessor(), None);
    }

    #[test]
    fn a_lock_file_left_by_a_killed_process_locks_nothing_and_its_leftovers_are_removed() {
        let output = tempfile::tempdir().unwrap();
        fs::write(output.path().join(LOCK_FILE), "4000000\n").unwrap();
        let half = output.path().join(CHECKPOINTS_DIRECTORY).join(".tmp-step-00000007");
        fs::create_dir_all(&half).unwrap();
        let lock = RunLock::acquire(output.path()).unwrap();
        assert_eq!(lock.crashed_predecessor(), Some(4_000_000));
        assert!(!half.exists());
    }

    #[test]
    fn the_output_directory_is_made_where_there_is_none() {
        let parent = tempfile::tempdir().unwrap();
        let output = parent.path().join("runs/tiny");
        let _lock = RunLock::acquire(&output).unwrap();
        assert!(output.is_dir());
    }
}
