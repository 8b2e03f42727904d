//! Locks of open files and directories (`flock`): they end with the process that took them, however that ends.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::system;

/// The time between two tries.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Takes the lock, if no other process holds it.
pub(crate) fn try_lock(file: &File) -> Result<(), TryLockError> {
    loop {
        match file.try_lock() {
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Interrupted => {}
            locked => return locked,
        }
    }
}

/// Takes the lock of the file at `path`, and waits for it at most this long.
///
/// # Errors
/// [`Error::Busy`] with the process that holds it; I/O errors.
pub fn lock_within(file: &File, path: &Path, limit: Duration) -> Result<()> {
    let began = Instant::now();
    loop {
        match try_lock(file) {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", path, error)),
            Err(TryLockError::WouldBlock) if began.elapsed() >= limit => {
                return Err(Error::Busy { path: path.to_owned(), pid: holder(file), seconds: limit.as_secs() });
            }
            Err(TryLockError::WouldBlock) => {
                // The end of another process's work sends no signal, so this waits for a fixed time.
                let nobody = Mutex::new(());
                let held = nobody.lock().unwrap_or_else(PoisonError::into_inner);
                drop(Condvar::new().wait_timeout(held, POLL_INTERVAL));
            }
        }
    }
}

/// The process that holds the lock of a file, as far as the system tells.
pub(crate) fn holder(file: &File) -> Option<u32> {
    let identity = system::examine(file).ok()?.identity;
    holder_in(&std::fs::read_to_string("/proc/locks").ok()?, identity)
}

/// Reads lines such as `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`. A line of a process that waits has an arrow.
fn holder_in(locks: &str, identity: Identity) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1).skip_while(|field| *field != "FLOCK" || line.contains("->"));
        let (pid, place) = (fields.nth(3)?, fields.next()?);
        let [major, minor, inode] = *place.split(':').collect::<Vec<_>>() else { return None };
        let hexadecimal = |number| u32::from_str_radix(number, 16).ok();
        let is_it = identity.is(hexadecimal(major)?, hexadecimal(minor)?, inode.parse().ok()?);
        pid.parse().ok().filter(|pid| is_it && *pid > 0)
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_stays_taken_is_an_error_that_names_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let (held, wanted) = (File::create(&path).unwrap(), File::open(&path).unwrap());
        lock_within(&held, &path, Duration::ZERO).unwrap();
        let error = lock_within(&wanted, &path, Duration::from_millis(40)).unwrap_err();
        let Error::Busy { pid, .. } = error else { panic!("{error}") };
        assert!(pid.is_none_or(|pid| pid == std::process::id()), "{pid:?}");
        held.unlock().unwrap();
        lock_within(&wanted, &path, Duration::ZERO).unwrap();
    }

    #[test]
    fn the_holder_is_read_from_the_systems_table() {
        let device = rustix::fs::makedev(0xfd, 1);
        let locks = "1: FLOCK  ADVISORY  WRITE 77 fd:01:5679 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 78 fd:01:5678 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 79 fd:01:5678 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 80 fd:01:5678 0 EOF\n";
        assert_eq!(holder_in(locks, Identity::new(device, 5678)), Some(80));
        assert_eq!(holder_in(locks, Identity::new(device, 1)), None);
    }
}
