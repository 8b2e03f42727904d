//! The way to a file or a directory, walked name by name, so that no symbolic link of another user leads where that user wants.
//!
//! * A link of ours or of root is followed.
//! * On the way to a directory in which something will change, a link of any other user is refused: its owner could exchange it.
//! * On the way to a file or a directory that is only read, such a link is followed where its owner could read, too: a shared cache of
//!   models consists of such links. It is refused before anything else, because a command could publish what only we may read.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use crate::users;

/// A directory that was reached by its path.
#[derive(Debug)]
pub struct Reached {
    /// The open directory.
    pub file: File,
    /// Whether it can be listed and synced, and not only searched.
    pub is_readable: bool,
    /// Whether no name on the way to it can be exchanged by a user whom we do not trust.
    pub is_guarded: bool,
}

#[cfg(target_os = "linux")]
pub use linux::reach;
#[cfg(target_os = "linux")]
pub(crate) use linux::{list, metadata, open, real_path};

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStringExt;
    use std::path::Component;

    use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};

    use super::*;

    /// As many links as the system follows.
    const MAX_LINKS: usize = 40;
    /// Permission for every user to read a file.
    const OTHERS_READ: u32 = 0o004;
    /// Permission for every user to pass through a directory.
    const OTHERS_SEARCH: u32 = 0o001;

    /// What the caller will do at the end of the way.
    #[derive(Clone, Copy, PartialEq)]
    enum Purpose {
        /// Change what is there.
        Change,
        /// Read a file, or only find the end of the way.
        Read,
        /// List a directory.
        List,
    }

    /// The end of a way.
    struct End {
        directory: File,
        /// The name of a file in it; none where the path leads to the directory itself.
        file: Option<OsString>,
        /// The whole way without links, from where it began.
        path: PathBuf,
        is_guarded: bool,
    }

    /// Opens the directory at a path, in which something will be changed.
    ///
    /// # Errors
    /// It does not exist or is none; a symbolic link of another user is on the way.
    pub fn reach(path: &Path) -> io::Result<Reached> {
        let End { directory, file: None, is_guarded, .. } = walk(path, Purpose::Change)? else {
            return Err(io::ErrorKind::NotADirectory.into());
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&directory, ".", flags, Mode::empty()) {
            Ok(file) => Ok(Reached { file: file.into(), is_readable: true, is_guarded }),
            Err(rustix::io::Errno::ACCESS) => Ok(Reached { file: directory, is_readable: false, is_guarded }),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the file at a path to read it, without waiting.
    pub(crate) fn open(path: &Path) -> io::Result<File> {
        let end = walk(path, Purpose::Read)?;
        let name = end.file.as_deref().unwrap_or(OsStr::new("."));
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(openat(&end.directory, name, flags, Mode::empty())?.into())
    }

    /// The metadata of what is at a path.
    pub(crate) fn metadata(path: &Path) -> io::Result<Metadata> {
        let end = walk(path, Purpose::Read)?;
        let Some(name) = end.file else { return end.directory.metadata() };
        let found = openat(&end.directory, &name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        File::from(found).metadata()
    }

    /// The names in the directory at a path.
    pub(crate) fn list(path: &Path) -> io::Result<impl Iterator<Item = io::Result<OsString>> + use<>> {
        let End { directory, file: None, .. } = walk(path, Purpose::List)? else {
            return Err(io::ErrorKind::NotADirectory.into());
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let listed = Dir::new(openat(&directory, ".", flags, Mode::empty())?)?;
        let names = listed.map(|entry| Ok(OsString::from_vec(entry?.file_name().to_bytes().into())));
        Ok(names.filter(|name| !name.as_ref().is_ok_and(|name| name == "." || name == "..")))
    }

    /// The absolute path without links.
    pub(crate) fn real_path(path: &Path) -> io::Result<PathBuf> {
        Ok(walk(&std::path::absolute(path)?, Purpose::Read)?.path)
    }

    fn walk(path: &Path, purpose: Purpose) -> io::Result<End> {
        let mut here = begin(path)?;
        let (mut left, mut links, mut is_guarded, mut leader) = (names(path), 0, true, None);
        let mut so_far = PathBuf::from(if path.is_absolute() { "/" } else { "" });
        while let Some(name) = left.pop() {
            let at = fstat(&here)?;
            is_guarded &= users::keeps_names(at.st_uid, at.st_mode);
            let found: File =
                openat(&here, &name, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())?.into();
            let stat = fstat(&found)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    expect_open_to(leader.as_ref(), &stat, OTHERS_SEARCH)?;
                    here = found;
                    if name == ".." {
                        so_far.pop();
                    } else {
                        so_far.push(name);
                    }
                }
                FileType::Symlink if links == MAX_LINKS => return Err(rustix::io::Errno::LOOP.into()),
                FileType::Symlink => {
                    links += 1;
                    if !users::is_trusted(stat.st_uid) {
                        if purpose == Purpose::Change {
                            return Err(refused(&name, stat.st_uid, "who could exchange it"));
                        }
                        leader = Some((stat.st_uid, name));
                    }
                    let target = OsString::from_vec(readlinkat(&found, "", Vec::new())?.into_bytes());
                    if Path::new(&target).is_absolute() {
                        here = begin(target.as_ref())?;
                        so_far = PathBuf::from("/");
                    }
                    left.extend(names(target.as_ref()));
                }
                _ if left.is_empty() => {
                    expect_open_to(leader.as_ref(), &stat, OTHERS_READ)?;
                    so_far.push(&name);
                    return Ok(End { directory: here, file: Some(name), path: so_far, is_guarded });
                }
                _ => return Err(io::ErrorKind::NotADirectory.into()),
            }
        }
        let at = fstat(&here)?;
        is_guarded &= users::keeps_names(at.st_uid, at.st_mode);
        if purpose == Purpose::List {
            expect_open_to(leader.as_ref(), &at, OTHERS_READ)?;
        }
        Ok(End { directory: here, file: None, path: so_far, is_guarded })
    }

    fn begin(path: &Path) -> io::Result<File> {
        let start = if path.is_absolute() { "/" } else { "." };
        Ok(openat(CWD, start, OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY, Mode::empty())?.into())
    }

    /// The names on the way, the last one first.
    fn names(path: &Path) -> Vec<OsString> {
        let inner = path.components().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
        inner.rev().map(|part| part.as_os_str().to_owned()).collect()
    }

    /// Refuses what the user whose link led here may not use.
    fn expect_open_to(leader: Option<&(u32, OsString)>, found: &Stat, permission: u32) -> io::Result<()> {
        match leader {
            Some((user, name)) if found.st_uid != *user && found.st_mode & permission == 0 => {
                Err(refused(name, *user, "who may not read what is there"))
            }
            _ => Ok(()),
        }
    }

    fn refused(name: &OsStr, user: u32, why: &str) -> io::Error {
        let name = name.display();
        let reason =
            format!("`{name}` on the way is a symbolic link of user {user}, {why}; name the path that it leads to");
        io::Error::new(io::ErrorKind::PermissionDenied, reason)
    }
}

/// Opens the directory at a path. This system cannot open a link itself, so links of other users are followed.
///
/// # Errors
/// It does not exist, or is none.
#[cfg(all(unix, not(target_os = "linux")))]
pub fn reach(path: &Path) -> io::Result<Reached> {
    let file = File::open(if path.as_os_str().is_empty() { Path::new(".") } else { path })?;
    let at = rustix::fs::fstat(&file)?;
    if !file.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(Reached { file, is_readable: true, is_guarded: users::keeps_names(at.st_uid, u32::from(at.st_mode)) })
}

#[cfg(all(unix, not(target_os = "linux")))]
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    Ok(file.into())
}

/// A page in a browser has no directories.
///
/// # Errors
/// Always.
#[cfg(not(unix))]
pub fn reach(_: &Path) -> io::Result<Reached> {
    let _ = users::ours();
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(unix))]
pub(crate) fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn metadata(path: &Path) -> io::Result<Metadata> {
    std::fs::metadata(path)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn list(path: &Path) -> io::Result<impl Iterator<Item = io::Result<std::ffi::OsString>> + use<>> {
    Ok(std::fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn real_path(path: &Path) -> io::Result<PathBuf> {
    std::fs::canonicalize(path)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};
    use std::path::PathBuf;

    use super::*;

    /// Some user who is neither we nor root.
    const OTHER: u32 = 65534;

    /// A directory that everyone may read, with `public` and, in a directory of ours alone, `private`; and a link of `OTHER` to each, if
    /// we may make one.
    fn scene() -> Option<(tempfile::TempDir, PathBuf)> {
        let scene = tempfile::tempdir().unwrap();
        let root = scene.path().to_owned();
        fs::create_dir(root.join("ours")).unwrap();
        for (path, mode) in [("", 0o755), ("ours", 0o700)] {
            fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        for file in ["public", "closed", "ours/private"] {
            fs::write(root.join(file), file).unwrap();
            let mode = if file == "closed" { 0o600 } else { 0o644 };
            fs::set_permissions(root.join(file), fs::Permissions::from_mode(mode)).unwrap();
        }
        for (link, target) in [("a", "public"), ("b", "closed"), ("c", "ours/private"), ("d", "ours"), ("e", ".")] {
            symlink(target, root.join(link)).unwrap();
            if lchown(root.join(link), Some(OTHER), Some(OTHER)).is_err() || users::is_trusted(OTHER) {
                return None;
            }
        }
        Some((scene, root))
    }

    #[test]
    fn a_link_of_another_user_is_followed_to_what_that_user_may_read_and_no_further() {
        let Some((_scene, root)) = scene() else { return };
        let read = |name: &str| crate::read_to_string(&root.join(name), 100);
        assert_eq!(read("a").unwrap(), "public");
        assert_eq!(read("e/public").unwrap(), "public");
        for refused in ["b", "c", "d/private", "e/closed"] {
            let error = read(refused).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{refused}: {error}");
            assert!(error.to_string().contains("is a symbolic link of user 65534"), "{error}");
        }
        // Its length and times are what that user could not see, either.
        assert_eq!(crate::metadata(&root.join("a")).unwrap().len(), 6);
        assert!(crate::metadata(&root.join("e")).unwrap().is_dir());
        assert_eq!(crate::metadata(&root.join("c")).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        lchown(root.join("closed"), Some(OTHER), None).unwrap();
        assert_eq!(read("b").unwrap(), "closed", "it is a file of theirs");
        symlink("ours/private", root.join("mine")).unwrap();
        assert_eq!(read("mine").unwrap(), "ours/private");
    }

    #[test]
    fn names_of_a_directory_are_those_that_the_user_of_the_link_could_list() {
        let Some((_scene, root)) = scene() else { return };
        let names = |name: &str| {
            let mut names: Vec<PathBuf> = crate::list(&root.join(name))?.collect::<io::Result<_>>()?;
            names.sort();
            Ok::<_, io::Error>(names)
        };
        assert_eq!(names("ours").unwrap(), [root.join("ours/private")]);
        assert_eq!(names("e").unwrap().len(), 8);
        assert_eq!(names("public").unwrap_err().kind(), io::ErrorKind::NotADirectory);
        for mode in [0o700, 0o711] {
            fs::set_permissions(root.join("ours"), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(names("d").unwrap_err().kind(), io::ErrorKind::PermissionDenied, "{mode:o}");
        }
        fs::set_permissions(root.join("ours"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(names("d").unwrap(), [root.join("d/private")]);
    }

    #[test]
    fn a_real_path_is_that_of_the_system_where_no_other_user_led() {
        let Some((_scene, root)) = scene() else { return };
        symlink(root.join("ours"), root.join("mine")).unwrap();
        for name in ["", "public", "ours/../public", "mine", "mine/private", "mine/..", "e/public", "a"] {
            let path = root.join(name);
            assert_eq!(crate::real_path(&path).unwrap(), fs::canonicalize(&path).unwrap(), "{name}");
        }
        assert_eq!(crate::real_path(Path::new(".")).unwrap(), fs::canonicalize(".").unwrap());
        for refused in ["c", "d", "d/private"] {
            assert_eq!(crate::real_path(&root.join(refused)).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        assert_eq!(crate::real_path(&root.join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn no_link_of_another_user_leads_to_a_directory_that_will_be_changed() {
        let Some((_scene, root)) = scene() else { return };
        assert!(reach(&root.join("e")).unwrap_err().to_string().contains("who could exchange it"));
        assert_eq!(reach(&root.join("public")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        symlink("ours", root.join("mine")).unwrap();
        reach(&root.join("mine")).unwrap();
        reach(&root.join("ours/../mine")).unwrap();
    }
}
