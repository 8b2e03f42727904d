//! Positional reads of files that must not change.
//!
//! Every read gives its offset (`pread`), so any number of threads may read one file. When a file is opened, its
//! device, inode, size and modification time are recorded; each use compares them again. At most [`MAX_OPEN_FILES`]
//! descriptors are open, so a dataset of thousands of files works under any `ulimit`.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Fault};

/// The most descriptors that one dataset holds at a time.
const MAX_OPEN_FILES: usize = 64;

/// A record of every byte range that was read from files, in order. For tests, measurements and `inspect`.
#[derive(Debug, Default)]
pub struct IoLog {
    reads: Mutex<Vec<IoRead>>,
}

/// One positional read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoRead {
    /// The index of the file in the dataset, in the given order.
    pub file: usize,
    /// The bytes that were read.
    pub bytes: Range<u64>,
}

impl IoLog {
    /// Returns the reads since the last call, and forgets them.
    pub fn take(&self) -> Vec<IoRead> {
        std::mem::take(&mut *self.reads.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, file: usize, bytes: Range<u64>) {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).push(IoRead { file, bytes });
    }
}

/// The properties by which the operating system identifies a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    pub(crate) bytes: u64,
    modified_ns: i128,
    /// The time of the last inode change, which an ordinary program cannot set back.
    changed_ns: i128,
}

/// Bytes of [`Identity::stamp`].
pub(crate) const STAMP_BYTES: usize = 8 + 16 + 16;

impl Identity {
    fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
            changed_ns: i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec()),
        }
    }

    /// Inode and times; any change of the file changes them. The device is left out, because its number may change when
    /// the machine restarts.
    pub(crate) fn stamp(&self) -> [u8; STAMP_BYTES] {
        let mut stamp = [0; STAMP_BYTES];
        stamp[..8].copy_from_slice(&self.inode.to_le_bytes());
        stamp[8..24].copy_from_slice(&self.modified_ns.to_le_bytes());
        stamp[24..].copy_from_slice(&self.changed_ns.to_le_bytes());
        stamp
    }

    /// Describes the difference between the opened file and the file on disk now.
    fn change(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            return Some("another file now has its name".to_owned());
        }
        if self.bytes != now.bytes {
            return Some(format!("it was {} bytes long, now {}", self.bytes, now.bytes));
        }
        (self.modified_ns != now.modified_ns).then(|| "it was written to".to_owned())
    }
}

/// A file, open for positional reads.
#[derive(Clone)]
pub(crate) struct Handle {
    file: Arc<File>,
    index: usize,
    log: Option<Arc<IoLog>>,
}

impl Handle {
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), Fault> {
        if let Some(log) = &self.log {
            log.record(self.index, offset..offset + buffer.len() as u64);
        }
        self.file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Fault::UnexpectedEof(format!("the file ends before byte {}", offset + buffer.len() as u64).into())
            }
            _ => Fault::File(error),
        })
    }
}

struct Source {
    path: PathBuf,
    identity: Identity,
}

/// The files of a dataset, opened on demand.
pub(crate) struct Files {
    sources: Vec<Source>,
    /// The most recently used file first.
    open: Mutex<VecDeque<(usize, Arc<File>)>>,
    log: Option<Arc<IoLog>>,
}

impl Files {
    pub(crate) fn new(log: Option<Arc<IoLog>>) -> Self {
        Self { sources: Vec::new(), open: Mutex::default(), log }
    }

    /// Adds a file and returns it opened, with its identity.
    pub(crate) fn add(&mut self, path: &Path) -> Result<(Handle, Identity), Error> {
        let (file, identity) = open(path)?;
        let index = self.sources.len();
        self.sources.push(Source { path: path.to_owned(), identity: identity.clone() });
        let file = Arc::new(file);
        self.keep(index, Arc::clone(&file));
        Ok((Handle { file, index, log: self.log.clone() }, identity))
    }

    pub(crate) fn len(&self) -> usize {
        self.sources.len()
    }

    /// Returns `error`, or an error for a changed file if the file has changed.
    pub(crate) fn changed_or(&self, index: usize, error: Error) -> Error {
        match self.handle(index) {
            Err(changed @ Error::Changed { .. }) => changed,
            _ => error,
        }
    }

    pub(crate) fn path(&self, index: usize) -> &Path {
        &self.sources[index].path
    }

    pub(crate) fn identity(&self, index: usize) -> &Identity {
        &self.sources[index].identity
    }

    /// Returns the file, opened again if necessary. Fails if it is not the file that was added.
    pub(crate) fn handle(&self, index: usize) -> Result<Handle, Error> {
        let source = &self.sources[index];
        let held = {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            open.iter().find(|(held, _)| *held == index).map(|(_, file)| Arc::clone(file))
        };
        let (file, identity) = match held {
            Some(file) => {
                let metadata = file.metadata().map_err(|error| Error::io(&source.path, "examine", error))?;
                (file, Identity::from_metadata(&metadata))
            }
            None => {
                let (file, identity) = open(&source.path)?;
                (Arc::new(file), identity)
            }
        };
        if let Some(change) = source.identity.change(&identity) {
            return Err(Error::Changed { path: source.path.clone(), change });
        }
        self.keep(index, Arc::clone(&file));
        Ok(Handle { file, index, log: self.log.clone() })
    }

    fn keep(&self, index: usize, file: Arc<File>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.front().is_some_and(|(front, _)| *front == index) {
            return;
        }
        open.retain(|(held, _)| *held != index);
        open.push_front((index, file));
        open.truncate(MAX_OPEN_FILES);
    }
}

fn open(path: &Path) -> Result<(File, Identity), Error> {
    let file = regular_file::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Error::NotParquet { path: path.to_owned(), reason: error.to_string() },
        _ => Error::io(path, "open", error),
    })?;
    let metadata = file.metadata().map_err(|error| Error::io(path, "examine", error))?;
    Ok((file, Identity::from_metadata(&metadata)))
}
