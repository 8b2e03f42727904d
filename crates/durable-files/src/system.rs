//! The system's calls on names in an open directory. Nothing in this crate uses a path below a directory in any other way.
//!
//! `rustix` and not `cap-std`: it is in the tree already, it has the flags that matter here (`RENAME_EXCHANGE`, `O_PATH`,
//! `O_NONBLOCK`), and `cap-std` would also hide owners and link counts, which are what is checked.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;

use crate::identity::Identity;

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A pipe, a socket or a device.
    Other,
}

/// An entry of a directory itself; symbolic links are not followed.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its kind.
    pub kind: Kind,
    /// The user that it belongs to.
    pub owner: u32,
    /// Its permissions.
    pub mode: u32,
    /// The number of its names.
    pub links: u64,
    /// Bytes that it takes on the disk.
    pub written: u64,
    /// The file behind it.
    pub identity: Identity,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// To read it.
    Read,
    /// To read and write it.
    ReadWrite,
    /// To append to it, and to make it where there is none.
    Append,
    /// To read and write it, where there is none.
    New,
}

/// What a rename does where the new name is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It replaces the entry.
    Replace,
    /// It fails.
    Keep,
    /// The entries swap their names.
    Exchange,
}

#[cfg(unix)]
pub(crate) use unix::*;

#[cfg(unix)]
mod unix {
    use std::os::unix::ffi::OsStringExt;

    use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RawMode, Stat};

    use super::*;

    fn entry(stat: &Stat) -> Entry {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Kind::File,
            FileType::Directory => Kind::Directory,
            FileType::Symlink => Kind::Link,
            _ => Kind::Other,
        };
        #[allow(clippy::useless_conversion, clippy::unnecessary_cast, reason = "the types differ between systems")]
        let (device, inode, links, blocks, mode) = (
            stat.st_dev as u64,
            stat.st_ino as u64,
            stat.st_nlink as u64,
            stat.st_blocks as u64,
            Mode::from_raw_mode(stat.st_mode).bits() as u32,
        );
        let (written, identity) = (blocks.saturating_mul(512), Identity::new(device, inode));
        Entry { kind, owner: stat.st_uid, mode, links, written, identity }
    }

    pub(crate) fn examine(file: &File) -> io::Result<Entry> {
        Ok(entry(&rustix::fs::fstat(file)?))
    }

    pub(crate) fn examine_at(directory: &File, name: &OsStr) -> io::Result<Entry> {
        Ok(entry(&rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?))
    }

    pub(crate) fn open_at(directory: &File, name: &OsStr, how: How, mode: u32) -> io::Result<File> {
        let flags = match how {
            How::Read => OFlags::RDONLY,
            How::ReadWrite => OFlags::RDWR,
            How::Append => OFlags::RDWR | OFlags::APPEND | OFlags::CREATE,
            How::New => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
        };
        // A pipe must not wait for its other end.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(mode as RawMode))?.into())
    }

    pub(crate) fn open_directory_at(directory: &File, name: &OsStr) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?.into())
    }

    pub(crate) fn make_directory_at(directory: &File, name: &OsStr, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(mode as RawMode))?)
    }

    pub(crate) fn remove_at(directory: &File, name: &OsStr, is_directory: bool) -> io::Result<()> {
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        Ok(rustix::fs::unlinkat(directory, name, flags)?)
    }

    pub(crate) fn rename_at(from: &File, old: &OsStr, to: &File, new: &OsStr, taken: Taken) -> io::Result<()> {
        #[cfg(any(target_os = "linux", target_vendor = "apple"))]
        if taken != Taken::Replace {
            use rustix::fs::RenameFlags;
            let flags = if taken == Taken::Keep { RenameFlags::NOREPLACE } else { RenameFlags::EXCHANGE };
            match rustix::fs::renameat_with(from, old, to, new, flags) {
                // Not supported by the file system.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::NOTSUP) => {}
                renamed => return Ok(renamed?),
            }
        }
        match (taken, examine_at(to, new)) {
            (Taken::Exchange, _) => return Err(io::ErrorKind::Unsupported.into()),
            // The names are random, or the directory has one writer.
            (Taken::Keep, Ok(_)) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Taken::Keep, Err(error)) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(rustix::fs::renameat(from, old, to, new)?)
    }

    pub(crate) fn names_in(directory: &File) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(directory)? {
            let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    pub(crate) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode as RawMode))?)
    }
}

/// A page in a browser has no files.
#[cfg(not(unix))]
mod none {
    use super::*;

    fn unsupported<T>() -> io::Result<T> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn examine(_: &File) -> io::Result<Entry> {
        unsupported()
    }

    pub(crate) fn examine_at(_: &File, _: &OsStr) -> io::Result<Entry> {
        unsupported()
    }

    pub(crate) fn open_at(_: &File, _: &OsStr, _: How, _: u32) -> io::Result<File> {
        unsupported()
    }

    pub(crate) fn open_directory_at(_: &File, _: &OsStr) -> io::Result<File> {
        unsupported()
    }

    pub(crate) fn make_directory_at(_: &File, _: &OsStr, _: u32) -> io::Result<()> {
        unsupported()
    }

    pub(crate) fn remove_at(_: &File, _: &OsStr, _: bool) -> io::Result<()> {
        unsupported()
    }

    pub(crate) fn rename_at(_: &File, _: &OsStr, _: &File, _: &OsStr, _: Taken) -> io::Result<()> {
        unsupported()
    }

    pub(crate) fn names_in(_: &File) -> io::Result<Vec<OsString>> {
        unsupported()
    }

    pub(crate) fn set_mode(_: &File, _: u32) -> io::Result<()> {
        unsupported()
    }
}
#[cfg(not(unix))]
pub(crate) use none::*;
