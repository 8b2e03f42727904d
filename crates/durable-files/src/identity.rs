//! The identity of the file or directory behind a path.

use std::path::Path;
use std::{fs, io};

/// The identity of the file or directory behind a path. The same path may later lead to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// The identity of an open file.
    pub fn of(file: &fs::Metadata) -> Self {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Identity { device: file.dev(), inode: file.ino() }
        }
        #[cfg(not(unix))]
        {
            let _ = file;
            Identity { device: 0, inode: 0 }
        }
    }

    /// The identity of the entry with this name itself; a symbolic link is not followed.
    ///
    /// # Errors
    /// The entry cannot be examined.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&fs::symlink_metadata(path)?))
    }
}
