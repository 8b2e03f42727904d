//! The lock of an output directory: one writer at a time.
//!
//! Invariants:
//! * The kernel holds the lock (`flock`), so it ends with the process that took it, however that ends. The mere existence of
//!   a lock file locks nothing: there are no stale locks.
//! * Taking the lock changes no existing file. Only a run that continues to [`RunLock::own`] the directory does: it writes
//!   its process id and removes unfinished files of a killed predecessor. A lock that is dropped before that leaves everything
//!   unchanged, and removes the files made for it.
//! * The lock is the file at its path, not only an open file: [`RunLock::check`] compares them. So a run whose directory
//!   was moved, or whose lock file was removed, does not write beside another run.
//! * The lock file stays after a run that owned the directory. Without it, two processes could lock two files of the same
//!   name.
//!
//! ```no_run
//! let mut lock = durable_files::RunLock::acquire("runs/tiny".as_ref())?;
//! // Look around, and refuse to go on without having changed anything; or else:
//! # let own = durable_files::OwnFiles { is_own: |_| false, listed: |_| Vec::new(), list: "" };
//! lock.own(&["checkpoints"], &own)?;
//! if let Some(pid) = lock.crashed_predecessor() {
//!     eprintln!("process {pid} ended without releasing the lock; resuming from its newest checkpoint");
//! }
//! # Ok::<(), durable_files::Error>(())
//! ```

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::directories;
use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::leftovers::{Others, remove_leftovers};
use crate::locks::{holder, try_lock};
use crate::own_files::OwnFiles;
use crate::system::{self, How, Kind};

/// The name of the lock.
pub const LOCK_FILE: &str = ".lock";
/// Permissions of a new lock file, before the umask. A user who can open the file can lock it, so other users may not open it.
const LOCK_MODE: u32 = 0o660;
/// A process id, its line break, and some spare bytes.
const MAX_TEXT_BYTES: u64 = 32;

/// The right to write to an output directory, until it is dropped.
#[derive(Debug)]
pub struct RunLock {
    output: PathBuf,
    directory: Directory,
    file: File,
    crashed_predecessor: Option<u32>,
    is_owner: bool,
    /// Paths created before the directory was owned, in that order.
    made: Vec<PathBuf>,
}

impl RunLock {
    /// Takes the lock of `output`, and makes the directory if there is none.
    ///
    /// # Errors
    /// [`Error::Locked`] with the holder's process id if another process has the lock; [`Error::ForeignLock`] if something
    /// else has the lock's name; I/O errors. Nothing is then changed.
    pub fn acquire(output: &Path) -> Result<Self> {
        let mut made = CreatedPaths(directories::create_directories(output)?);
        let directory = Directory::open(output).map_err(|e| Error::io("open", output, e))?;
        let path = output.join(LOCK_FILE);
        let file = loop {
            let (file, is_new) = open_or_create(&directory)?;
            if is_new {
                made.0.push(path.clone());
            }
            match try_lock(&file) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    // The holder has written its process id, unless it is about to, or is no run.
                    let pid = text_of(&path, &file)?.or_else(|| holder(&file));
                    return Err(Error::Locked { path: output.to_owned(), pid });
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
            }
            // Between opening and locking, a run that was refused may have removed the file.
            if is_at(&file, &directory)? {
                break file;
            }
        };
        let crashed_predecessor = text_of(&path, &file)?;
        Ok(RunLock {
            output: output.to_owned(),
            directory,
            file,
            crashed_predecessor,
            is_owner: false,
            made: std::mem::take(&mut made.0),
        })
    }

    /// Whether a run holds the lock of `output`. Looks only: nothing is made or changed.
    pub fn is_held(output: &Path) -> bool {
        let file = Directory::open(output).and_then(|directory| directory.open_file(OsStr::new(LOCK_FILE), How::Read));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Takes ownership of the directory: writes the process id, and removes unfinished files of a killed predecessor in the
    /// directory and in `subdirectories`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn own(&mut self, subdirectories: &[&str], own: &OwnFiles) -> Result<()> {
        self.is_owner = true;
        let path = self.path();
        write_pid(&mut self.file, Some(std::process::id())).map_err(|e| Error::io("write", &path, e))?;
        if let Some(found) = system::examine(&self.file).ok().filter(|found| found.is_ours() && found.mode & 0o007 != 0)
        {
            // An earlier version let other users open, and so lock it.
            let _ = system::set_mode(&self.file, found.mode & LOCK_MODE);
        }
        remove_leftovers(&self.output, own, Others::None)?;
        for name in subdirectories {
            remove_leftovers(&self.output.join(name), own, Others::None)?;
        }
        Ok(())
    }

    /// Notes a file or directory that was made before the run owned its directory. It is removed if the run never does.
    pub fn note_made(&mut self, path: PathBuf) {
        self.made.push(path);
    }

    /// Checks that the lock is still at the place where this process took it. A lock file that was only removed is made again, unless
    /// another run has made one.
    ///
    /// # Errors
    /// [`Error::LockLost`] if the directory is another one now, or another file has the lock's name; I/O errors.
    pub fn check(&mut self) -> Result<()> {
        let path = self.path();
        let lost = || Error::LockLost { path: self.output.clone() };
        let there = Directory::open(&self.output).and_then(|there| there.identity());
        if !matches!((there, self.directory.identity()), (Ok(there), Ok(held)) if there == held) {
            return Err(lost());
        }
        if is_at(&self.file, &self.directory)? {
            return Ok(());
        }
        let mut file = match self.directory.create_with(OsStr::new(LOCK_FILE), LOCK_MODE) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => return Err(lost()),
            created => created.map_err(|e| Error::io("create", &path, e))?,
        };
        try_lock(&file).map_err(|_| lost())?;
        write_pid(&mut file, Some(std::process::id())).map_err(|e| Error::io("write", &path, e))?;
        self.file = file;
        Ok(())
    }

    /// The process that had the lock before and ended without releasing it: it was killed, or the machine stopped.
    pub fn crashed_predecessor(&self) -> Option<u32> {
        self.crashed_predecessor
    }

    /// The output directory, open.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    fn path(&self) -> PathBuf {
        self.output.join(LOCK_FILE)
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Best effort: closing the file handle ends the lock itself.
        if self.is_owner {
            let _ = write_pid(&mut self.file, None);
        } else {
            drop(CreatedPaths(std::mem::take(&mut self.made)));
        }
    }
}

/// Files and directories that are removed when this is dropped, the last one first. A directory that is not empty stays.
struct CreatedPaths(Vec<PathBuf>);

impl Drop for CreatedPaths {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let Ok((parent, name)) = Directory::open_parent(path) else { continue };
            let _ = match parent.entry(&name) {
                Ok(Some(made)) if made.kind == Kind::Directory => parent.remove_directory(&name),
                _ => parent.remove_file(&name),
            };
        }
    }
}

/// Opens the lock file, or makes one. Returns the file, and whether it was made. Does not change an existing file.
fn open_or_create(directory: &Directory) -> Result<(File, bool)> {
    let (name, path) = (OsStr::new(LOCK_FILE), directory.path().join(LOCK_FILE));
    loop {
        match directory.entry(name).map_err(|e| Error::io("examine", &path, e))? {
            Some(found) if found.kind != Kind::File => {
                return Err(Error::ForeignLock { path, got: found.in_words() });
            }
            Some(_) => match directory.open_file(name, How::ReadWrite) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                opened => return Ok((opened.map_err(|e| Error::io("open", &path, e))?, false)),
            },
            None => match directory.create_with(name, LOCK_MODE) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                created => return Ok((created.map_err(|e| Error::io("create", &path, e))?, true)),
            },
        }
    }
}

fn is_at(file: &File, directory: &Directory) -> Result<bool> {
    directory.has(OsStr::new(LOCK_FILE), file).map_err(|e| Error::io("examine", &directory.path().join(LOCK_FILE), e))
}

/// The process id that a lock file holds, if any. A file with any other text is not written to.
fn text_of(path: &Path, mut file: &File) -> Result<Option<u32>> {
    let mut text = Vec::new();
    let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut text));
    read.map_err(|e| Error::io("read", path, e))?;
    let foreign = || Error::ForeignLock { path: path.to_owned(), got: "a file with other text".to_owned() };
    let text = str::from_utf8(&text).map_err(|_| foreign())?;
    // A power cut can leave zeros in place of a text.
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(|_| foreign()) }
}

fn write_pid(file: &mut File, pid: Option<u32>) -> std::io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    if let Some(pid) = pid { writeln!(file, "{pid}") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::NewDirectory;

    const OWN: OwnFiles = OwnFiles { is_own: |_| false, listed: |_| Vec::new(), list: "" };

    fn owned(output: &Path) -> RunLock {
        let mut lock = RunLock::acquire(output).unwrap();
        lock.own(&["sample-data", "checkpoints"], &OWN).unwrap();
        lock
    }

    #[test]
    fn a_second_writer_is_refused_and_told_who_the_first_is() {
        let output = tempfile::tempdir().unwrap();
        assert!(!RunLock::is_held(output.path()));
        let lock = owned(output.path());
        assert!(RunLock::is_held(output.path()));
        let error = RunLock::acquire(output.path()).unwrap_err();
        assert!(matches!(error, Error::Locked { pid: Some(pid), .. } if pid == std::process::id()), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(lock);
        assert_eq!(RunLock::acquire(output.path()).unwrap().crashed_predecessor(), None);
    }

    #[test]
    fn leftovers_are_removed_once_the_directory_is_owned_and_not_before() {
        let output = tempfile::tempdir().unwrap();
        fs::write(output.path().join(LOCK_FILE), "4000000\n").unwrap();
        let leftovers: Vec<PathBuf> = ["checkpoints", "sample-data"]
            .map(|name| {
                fs::create_dir(output.path().join(name)).unwrap();
                NewDirectory::create(&output.path().join(name).join("step-00000007")).unwrap().path().to_owned()
            })
            .into();
        let lock = RunLock::acquire(output.path()).unwrap();
        assert_eq!(lock.crashed_predecessor(), Some(4_000_000));
        drop(lock);
        assert_eq!(fs::read(output.path().join(LOCK_FILE)).unwrap(), b"4000000\n");
        assert!(leftovers.iter().all(|path| path.exists()));
        let lock = owned(output.path());
        assert!(!leftovers.iter().any(|path| path.exists()));
        assert_eq!(lock.crashed_predecessor(), Some(4_000_000));
    }

    #[test]
    fn the_output_directory_is_made_where_there_is_none_and_goes_with_a_run_that_never_owned_it() {
        let parent = tempfile::tempdir().unwrap();
        let output = parent.path().join("runs/tiny");
        let mut lock = RunLock::acquire(&output).unwrap();
        assert!(output.is_dir());
        fs::write(output.join("placed"), "").unwrap();
        lock.note_made(output.join("placed"));
        drop(lock);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        drop(owned(&output));
        assert!(output.join(LOCK_FILE).exists());
        drop(RunLock::acquire(&output).unwrap());
        assert!(output.join(LOCK_FILE).exists(), "it was there before");
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_file_that_is_no_lock_of_ours_is_refused_and_not_touched() {
        let directory = tempfile::tempdir().unwrap();
        let precious = directory.path().join("precious");
        fs::write(&precious, "my only copy").unwrap();
        let lock = |name: &str| {
            let output = directory.path().join(name);
            fs::create_dir(&output).unwrap();
            (output.join(LOCK_FILE), output)
        };
        let (link, linked) = lock("linked");
        std::os::unix::fs::symlink(&precious, link).unwrap();
        let (hard_link, hard_linked) = lock("hard-linked");
        fs::hard_link(&precious, hard_link).unwrap();
        let (pipe, piped) = lock("piped");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        let (inner, directories) = lock("directories");
        fs::create_dir(inner).unwrap();
        for output in [linked, hard_linked, piped, directories] {
            let error = RunLock::acquire(&output).unwrap_err();
            assert!(matches!(error, Error::ForeignLock { .. }), "{error}");
            assert!(error.hint().is_some());
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "my only copy");
    }

    #[cfg(unix)]
    #[test]
    fn a_run_whose_directory_or_lock_belongs_to_another_one_notices() {
        let parent = tempfile::tempdir().unwrap();
        let output = parent.path().join("run");
        let mut first = owned(&output);
        first.check().unwrap();
        fs::remove_file(output.join(LOCK_FILE)).unwrap();
        let second = owned(&output);
        assert!(matches!(first.check(), Err(Error::LockLost { .. })));
        drop(second);
        assert!(matches!(first.check(), Err(Error::LockLost { .. })), "it may have saved something");
        drop(first);

        let mut first = owned(&output);
        fs::rename(&output, parent.path().join("moved")).unwrap();
        assert!(matches!(first.check(), Err(Error::LockLost { .. })));
        fs::create_dir(&output).unwrap();
        assert!(matches!(first.check(), Err(Error::LockLost { .. })));
        assert_eq!(fs::read_dir(&output).unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_file_that_only_went_away_is_made_again() {
        let output = tempfile::tempdir().unwrap();
        let mut lock = owned(output.path());
        fs::remove_file(output.path().join(LOCK_FILE)).unwrap();
        lock.check().unwrap();
        let error = RunLock::acquire(output.path()).unwrap_err();
        assert!(matches!(error, Error::Locked { pid: Some(_), .. }), "{error}");
        lock.check().unwrap();
    }
}
