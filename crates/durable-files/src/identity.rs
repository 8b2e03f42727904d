//! The identity of a file or directory.

use std::io;
use std::path::Path;

use crate::directory::Directory;

/// The identity of a file or directory. The same path may later lead to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(crate) fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }

    /// The identity of the entry with this name itself; a symbolic link is not followed.
    ///
    /// # Errors
    /// The entry cannot be examined, or does not exist.
    pub fn at(path: &Path) -> io::Result<Self> {
        let (directory, name) = Directory::of(path)?;
        Ok(directory.entry(&name)?.ok_or(io::ErrorKind::NotFound)?.identity)
    }

    /// Whether this is the file, as the system's tables name it: the numbers of its device and the file.
    pub(crate) fn is(self, major: u32, minor: u32, inode: u64) -> bool {
        #[cfg(unix)]
        {
            let device = self.device as rustix::fs::Dev;
            self.inode == inode && rustix::fs::major(device) == major && rustix::fs::minor(device) == minor
        }
        #[cfg(not(unix))]
        {
            let _ = (major, minor, inode);
            false
        }
    }
}
