//! Errors of files, one variant for each cause on which a caller can act.

use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with a file. `Display` says what, where, expected and got; [`Error::hint`] gives advice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("{}: could not {action}: {source}", path.display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// No space, quota or file-size allowance is left. The unfinished file is removed; the files that were there before are intact.
    #[error("{}: no space left to write it ({source}); earlier checkpoints are intact", path.display())]
    DiskFull {
        /// The file that did not fit.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A directory that must belong to this user alone does not.
    #[error("{}: expected a directory of this user alone, got {got}", path.display())]
    NotOurs {
        /// The directory.
        path: PathBuf,
        /// The found kind and owner.
        got: String,
    },
    /// Another user could exchange the names in a directory for temporary files.
    #[error("{}: other users could exchange temporary files in it, because they may write there or above", path.display())]
    Exchangeable {
        /// The directory.
        path: PathBuf,
    },
    /// Another process holds a lock for too long.
    #[error("{}: still locked after {seconds} s{}", path.display(), by(*pid))]
    Busy {
        /// The file.
        path: PathBuf,
        /// The process that holds the lock, if the system tells.
        pid: Option<u32>,
        /// The time that this process waited.
        seconds: u64,
    },
    /// Another process is writing to the output directory.
    #[error("{}: in use by another run{}", path.display(), by(*pid))]
    Locked {
        /// The output directory.
        path: PathBuf,
        /// The process that holds it, if its id could be read.
        pid: Option<u32>,
    },
    /// A file in the output directory has the name of the run's lock, and no run wrote it.
    #[error("{}: expected the lock file of a run, got {got}", path.display())]
    ForeignLock {
        /// The file.
        path: PathBuf,
        /// The found kind of file.
        got: String,
    },
    /// The lock that this process took is no longer in its output directory: another run may write there.
    #[error("{}: the lock of this run is gone: the directory was moved, or its `.lock` was replaced", path.display())]
    LockLost {
        /// The output directory.
        path: PathBuf,
    },
}

impl Error {
    /// An I/O error on `path`. A full disk becomes [`Error::DiskFull`].
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if is_full(&source) { Error::DiskFull { path, source } } else { Error::Io { action, path, source } }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Error::DiskFull { source, .. } if source.kind() == io::ErrorKind::FileTooLarge => {
                "raise the file size limit (`ulimit -f`), then resume with `--keep-training`"
            }
            Error::DiskFull { .. } => {
                "free some disk space or set a smaller `checkpoint.keep_last`, then resume with `--keep-training`"
            }
            Error::Locked { .. } => "wait for it to end, or choose another `--output`",
            Error::ForeignLock { .. } => "move the file away, or choose another `--output`",
            Error::LockLost { .. } => {
                "look for another run with this `--output`; resume from the newest checkpoint with `--keep-training`"
            }
            Error::NotOurs { .. } => "remove it, or set `XDG_RUNTIME_DIR` to a directory that only you can write to",
            Error::Exchangeable { .. } => "set `TMPDIR` to a directory that only you can write to",
            Error::Busy { .. } => "wait for the process to end, or end it",
            Error::Io { .. } => return None,
        })
    }
}

fn by(pid: Option<u32>) -> String {
    pid.map(|pid| format!(", process {pid}")).unwrap_or_default()
}

/// Whether the disk is full, or what one may write to it.
pub fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
