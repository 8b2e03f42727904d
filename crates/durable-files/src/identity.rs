//! The identity of a file or directory.

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
