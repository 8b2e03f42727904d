//! An open directory. Its entries are made, opened, renamed and removed through its descriptor, so that it stays the same
//! directory whatever another user does with the path that led to it.
//!
//! Invariants:
//! * The path is walked once, name by name; links of other users are not followed.
//! * No entry is opened through a symbolic link, and no opening waits for a pipe.
//! * A file that is appended to is a regular one with a single name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use heap::{TEMPORARY_PREFIX, with_temporary_name};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::system::{self, Entry, How, Kind, Taken};

/// Permissions of a new file, before the umask.
const FILE_MODE: u32 = 0o666;
/// Permissions of a new directory, before the umask.
const DIRECTORY_MODE: u32 = 0o777;
/// Permissions of a file that is ours alone.
const PRIVATE_FILE_MODE: u32 = 0o600;
/// Permission for every user to make names in a directory.
const OTHERS_WRITE: u32 = 0o002;
/// Digits of a temporary name.
pub(crate) const ID_DIGITS: usize = 16;
/// The suffix of the directory of a dry run.
pub(crate) const RUN: &str = "-run";
/// Permissions of a directory that is ours alone.
pub(crate) const PRIVATE_MODE: u32 = 0o700;

/// An open directory.
#[derive(Clone, Debug)]
pub struct Directory {
    file: Arc<File>,
    path: PathBuf,
    is_readable: bool,
    is_guarded: bool,
}

impl Directory {
    /// Opens the directory at a path.
    ///
    /// # Errors
    /// It does not exist or is none; a symbolic link of another user is on the way.
    pub fn open(path: &Path) -> io::Result<Self> {
        let reached = regular_file::reach(path)?;
        let (is_readable, is_guarded) = (reached.is_readable, reached.is_guarded);
        Ok(Self { file: Arc::new(reached.file), path: path.to_owned(), is_readable, is_guarded })
    }

    /// Opens the directory that has this name, and returns the name in it.
    ///
    /// # Errors
    /// As [`Directory::open`]; [`io::ErrorKind::InvalidInput`] for a path that ends with no name, such as `..`.
    pub fn open_parent(path: &Path) -> io::Result<(Self, OsString)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        Ok((Self::open(&parent_of(path))?, name))
    }

    /// The directory of this user alone with this path. It is made where there is none.
    ///
    /// # Errors
    /// [`Error::NotOurs`] if the directory belongs to another user, or another user may write to it; I/O errors.
    pub fn private(path: &Path) -> Result<Self> {
        let failed = |error| Error::io("open", path, error);
        let (parent, name) = Self::open_parent(path).map_err(failed)?;
        match system::make_directory_at(&parent.file, &name, PRIVATE_MODE) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let not_ours = |got: String| Error::NotOurs { path: path.to_owned(), got };
        let entry = parent.entry(&name).map_err(failed)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        if entry.kind != Kind::Directory || entry.owner != regular_file::ours() {
            return Err(not_ours(entry.in_words()));
        }
        let directory = parent.directory(&name).map_err(failed)?;
        let own = system::examine(&directory.file).map_err(failed)?;
        if own.owner != regular_file::ours() || own.mode & 0o022 != 0 {
            return Err(not_ours(format!("a directory of user {} with the mode {:o}", own.owner, own.mode & 0o7777)));
        }
        if own.mode & 0o077 != 0 {
            system::set_mode(&directory.file, PRIVATE_MODE).map_err(failed)?;
        }
        Ok(directory)
    }

    /// The path that led here, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether no user whom we do not trust can exchange a name on the way here, or a name in here.
    pub fn is_guarded(&self) -> bool {
        self.is_guarded
    }

    /// Whether no user whom we do not trust can exchange a name in here.
    pub(crate) fn keeps_names(&self) -> bool {
        system::examine(&self.file).is_ok_and(|own| regular_file::keeps_names(own.owner, own.mode))
    }

    /// The identity of the directory.
    ///
    /// # Errors
    /// The directory cannot be examined.
    pub fn identity(&self) -> io::Result<Identity> {
        Ok(system::examine(&self.file)?.identity)
    }

    /// The open directory itself, for its lock.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The entry with this name; `None` where there is none.
    ///
    /// # Errors
    /// The entry cannot be examined.
    pub fn entry(&self, name: &OsStr) -> io::Result<Option<Entry>> {
        match system::examine_at(&self.file, name) {
            Ok(entry) => Ok(Some(entry)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether this open file has this name here.
    ///
    /// # Errors
    /// The entry cannot be examined.
    pub fn has(&self, name: &OsStr, file: &File) -> io::Result<bool> {
        let held = system::examine(file)?.identity;
        Ok(self.entry(name)?.is_some_and(|entry| entry.identity == held))
    }

    /// All names, in no order.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        system::names_in(&self.file)
    }

    /// Opens the directory with this name.
    ///
    /// # Errors
    /// It is none, or a symbolic link.
    pub fn directory(&self, name: &OsStr) -> io::Result<Self> {
        let file = system::open_directory_at(&self.file, name)?;
        let at = system::examine(&file)?;
        let is_guarded = self.is_guarded && regular_file::keeps_names(at.owner, at.mode);
        Ok(Self { file: Arc::new(file), path: self.path.join(name), is_readable: true, is_guarded })
    }

    /// Makes an empty directory, for others as the umask allows, or for this user alone.
    ///
    /// # Errors
    /// The name is taken, or the directory cannot be made.
    pub(crate) fn make_directory(&self, name: &OsStr, is_private: bool) -> io::Result<()> {
        system::make_directory_at(&self.file, name, if is_private { PRIVATE_MODE } else { DIRECTORY_MODE })
    }

    /// Creates a new file to read and write.
    ///
    /// # Errors
    /// The name is taken, or the file cannot be made.
    pub fn create(&self, name: &OsStr) -> io::Result<File> {
        self.create_with(name, if self.is_of_dry_run() { PRIVATE_FILE_MODE } else { FILE_MODE })
    }

    /// Whether it is the directory of a dry run, or is in one. Its files may be rows that are private.
    fn is_of_dry_run(&self) -> bool {
        let id = |name: &OsStr| Some(name.to_str()?.strip_prefix(TEMPORARY_PREFIX)?.strip_suffix(RUN)?.len());
        self.path.components().any(|part| id(part.as_os_str()) == Some(ID_DIGITS))
    }

    pub(crate) fn create_with(&self, name: &OsStr, mode: u32) -> io::Result<File> {
        system::open_at(&self.file, name, How::New, mode)
    }

    /// Makes an entry under a new temporary name that ends with these parts.
    pub(crate) fn with_temporary_name<T>(
        &self,
        ending: &[&OsStr],
        make: impl Fn(&OsStr) -> io::Result<T>,
    ) -> io::Result<(OsString, T)> {
        let (name, made) = with_temporary_name(Path::new(""), ending, |name| make(name.as_os_str()))?;
        Ok((name.into_os_string(), made))
    }

    /// Opens a regular file to read it, or to read and write it.
    pub(crate) fn open_file(&self, name: &OsStr, how: How) -> io::Result<File> {
        let refuse_link = |error: io::Error| match self.entry(name) {
            Ok(Some(entry)) if entry.kind != Kind::File => unexpected(&entry.in_words()),
            _ => error,
        };
        let file = system::open_at(&self.file, name, how, FILE_MODE).map_err(refuse_link)?;
        let entry = system::examine(&file)?;
        if entry.kind != Kind::File {
            return Err(unexpected(&entry.in_words()));
        }
        self.expect_not_planted(&entry)?;
        Ok(file)
    }

    /// Refuses a file of a user whom we do not trust in a directory where everyone may make files. The directory's owner is trusted there.
    fn expect_not_planted(&self, entry: &Entry) -> io::Result<()> {
        let own = system::examine(&self.file)?;
        if own.mode & OTHERS_WRITE == 0 || regular_file::is_trusted(entry.owner) || entry.owner == own.owner {
            return Ok(());
        }
        let reason = format!("expected a file of this user where everyone may make files, got {}", entry.in_words());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    }

    /// Reads a regular file of at most `max_bytes`.
    ///
    /// # Errors
    /// Errors of the system; [`io::ErrorKind::FileTooLarge`] for a longer file.
    pub fn read(&self, name: &OsStr, max_bytes: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name, How::Read)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > max_bytes { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
    }

    /// The length of a regular file.
    pub(crate) fn length(&self, name: &OsStr) -> io::Result<u64> {
        Ok(self.open_file(name, How::Read)?.metadata()?.len())
    }

    /// Opens a regular file to append to it and to read it, or makes one. A file with a second name is refused: the other name
    /// may be a file of someone else.
    ///
    /// # Errors
    /// Errors of the system; [`io::ErrorKind::InvalidInput`] for anything but a regular file with one name.
    pub fn append(&self, name: &OsStr) -> io::Result<File> {
        let file = self.open_file(name, How::Append)?;
        match system::examine(&file)?.links {
            1 => Ok(file),
            links => Err(unexpected(&format!("a file with {links} names (hard links)"))),
        }
    }

    /// Bytes that the files in here take on the disk, down to so many levels of directories, as far as they can be examined.
    pub fn written_bytes(&self, levels: u32) -> u64 {
        let below = |name: OsString| match self.entry(&name).ok()?? {
            Entry { kind: Kind::Directory, .. } if levels == 0 => None,
            Entry { kind: Kind::Directory, .. } => Some(self.directory(&name).ok()?.written_bytes(levels - 1)),
            Entry { kind: Kind::File, written, .. } => Some(written),
            _ => None,
        };
        self.names().into_iter().flatten().filter_map(below).sum()
    }

    /// Removes a file, or a symbolic link itself.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove_file(&self, name: &OsStr) -> io::Result<()> {
        system::remove_at(&self.file, name, false)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It cannot be removed, or is not empty.
    pub fn remove_directory(&self, name: &OsStr) -> io::Result<()> {
        system::remove_at(&self.file, name, true)
    }

    /// Renames an entry. It replaces a file that has the new name.
    pub(crate) fn rename(&self, old: &OsStr, new: &OsStr) -> io::Result<()> {
        system::rename_at(&self.file, old, &self.file, new, Taken::Replace)
    }

    /// Moves an entry to a name in this directory or another, unless that name is taken.
    ///
    /// # Errors
    /// Errors of the system; [`io::ErrorKind::AlreadyExists`].
    pub fn rename_to_free(&self, old: &OsStr, to: &Directory, new: &OsStr) -> io::Result<()> {
        system::rename_at(&self.file, old, &to.file, new, Taken::Keep)
    }

    /// Swaps two names in one step.
    pub(crate) fn exchange(&self, one: &OsStr, other: &OsStr) -> io::Result<()> {
        system::rename_at(&self.file, one, &self.file, other, Taken::Exchange)
    }

    /// Makes the entries durable. Without it a rename can be undone by a power cut.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.is_readable { self.file.sync_all() } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// Removes the entries for which `is_own` is true, at any depth, and the directories that are then empty. Directories of
    /// other users stay.
    pub(crate) fn remove_own(&self, is_own: &dyn Fn(&OsStr) -> bool) -> io::Result<()> {
        for name in self.names()? {
            let Some(entry) = self.entry(&name)?.filter(|_| is_own(&name)) else { continue };
            if entry.kind != Kind::Directory {
                self.remove_file(&name)?;
            } else if entry.owner == regular_file::ours() {
                self.directory(&name)?.remove_own(is_own)?;
                self.remove_directory(&name)?;
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Whether this user owns it.
    pub fn is_ours(&self) -> bool {
        self.owner == regular_file::ours()
    }

    /// For messages: its kind, and its owner if that is another user.
    pub fn in_words(&self) -> String {
        let kind = match self.kind {
            Kind::File => "a file",
            Kind::Directory => "a directory",
            Kind::Link => "a symbolic link",
            Kind::Other => "a pipe, a socket or a device",
        };
        if self.is_ours() { kind.to_owned() } else { format!("{kind} of user {}", self.owner) }
    }
}

impl Identity {
    /// The identity of the entry with this name itself; a symbolic link is not followed.
    ///
    /// # Errors
    /// The entry cannot be examined, or does not exist.
    pub fn at(path: &Path) -> io::Result<Self> {
        let (directory, name) = Directory::open_parent(path)?;
        Ok(directory.entry(&name)?.ok_or(io::ErrorKind::NotFound)?.identity)
    }
}

/// The directory that contains the name `path`.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn unexpected(got: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("expected a regular file, got {got}"))
}

/// Opens a regular file to append to it, or makes one, as [`Directory::append`].
///
/// # Errors
/// As [`Directory::open_parent`] and [`Directory::append`].
pub fn append(path: &Path) -> io::Result<File> {
    let (directory, name) = Directory::open_parent(path)?;
    directory.append(&name)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn a_file_that_another_user_planted_is_named_and_not_read() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path();
        fs::write(path.join("file"), "text").unwrap();
        symlink("file", path.join("link")).unwrap();
        let directory = Directory::open(path).unwrap();
        let refused = |name: &str| directory.read(name.as_ref(), 9).unwrap_err().to_string();
        assert_eq!(directory.read("file".as_ref(), 9).unwrap(), b"text");
        assert_eq!(refused("link"), "expected a regular file, got a symbolic link");
        if chown(path.join("file"), Some(65534), None).is_err() || regular_file::is_trusted(65534) {
            return;
        }
        for (mode, is_read) in [(0o755, true), (0o775, true), (0o777, false), (0o1777, false)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(directory.read("file".as_ref(), 9).is_ok(), is_read, "{mode:o}");
            assert_eq!(directory.append("file".as_ref()).is_ok(), is_read, "{mode:o}");
        }
        assert!(refused("file").contains("got a file of user 65534"), "{}", refused("file"));
        chown(path, Some(65534), None).unwrap();
        assert_eq!(directory.read("file".as_ref(), 9).unwrap(), b"text", "the directory is theirs");
    }
}
