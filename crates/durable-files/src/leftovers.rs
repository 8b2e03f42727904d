//! Unfinished files of processes that were killed, and their removal.
//!
//! Invariants:
//! * Only names of the patterns of [`crate::temporary`] are removed, only entries of this user, and only once their locks are
//!   free. In a directory, only own files are: any other file in it stays, or moves to the directory that takes its place.
//! * Nothing is removed from a directory in which another user could give such a name to something else.

use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::locks::try_lock;
use crate::own_files::OwnFiles;
use crate::system::{self, How, Kind as EntryKind};
use crate::temporary::{Kind, kind_of};

/// Who may still be filling an entry whose lock cannot be asked for, because the file system has no locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Nobody: the caller is the directory's one writer.
    None,
    /// Another process.
    Possible,
}

/// Removes the unfinished files that killed processes of this user left in `directory`. If one was killed between two renames, gives
/// the replaced directory its name back. An entry that cannot be removed stays, and does no harm.
///
/// # Errors
/// The directory cannot be listed, or a name cannot be given back.
pub fn remove_leftovers(directory: &Path, own: &OwnFiles, others: Others) -> Result<()> {
    let opened = match Directory::open(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(|e| Error::io("open", directory, e))?,
    };
    if !opened.keeps_names() {
        return Ok(());
    }
    for name in opened.names().map_err(|e| Error::io("list", directory, e))? {
        let Some(kind) = kind_of(&name) else { continue };
        let Ok(Some(entry)) = opened.entry(&name) else { continue };
        if !entry.is_ours() {
            continue;
        }
        match kind {
            Kind::File if entry.kind == EntryKind::File => {
                let held = opened.open_file(&name, How::ReadWrite);
                if held.is_ok_and(|file| is_dead(&opened, &name, &file, others)) {
                    let _ = opened.remove_file(&name);
                }
            }
            Kind::Part(target) | Kind::Old(target) if entry.kind == EntryKind::Directory => {
                let Ok(left) = opened.directory(&name) else { continue };
                if is_dead(&opened, &name, left.file(), others) {
                    settle(&opened, &name, &left, target.as_ref(), matches!(kind_of(&name), Some(Kind::Old(_))), own)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether no process fills the open entry any more. The lock then stays taken until the file is closed.
pub(crate) fn is_dead(parent: &Directory, name: &OsStr, file: &File, others: Others) -> bool {
    let is_free = match try_lock(file) {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => others == Others::None,
    };
    is_free && parent.has(name, file).unwrap_or(false)
}

/// Gives a replaced directory its name back if that is free, or removes what was left.
fn settle(
    parent: &Directory,
    name: &OsStr,
    left: &Directory,
    target: &OsStr,
    was_replaced: bool,
    own: &OwnFiles,
) -> Result<()> {
    let Ok(there) = parent.entry(target) else { return Ok(()) };
    let path = parent.path().join(target);
    match there {
        None if was_replaced => {
            parent.rename_to_free(name, parent, target).map_err(|e| Error::io("give its name back to", &path, e))?;
            parent.sync().map_err(|e| Error::io("sync", parent.path(), e))?;
        }
        None => drop(remove_own_directory(parent, name, left, own)),
        Some(_) => drop(remove_replaced(parent, name, target, own)),
    }
    Ok(())
}

/// Removes a directory that `successor` replaced. Foreign files in it move there, or stay.
pub(crate) fn remove_replaced(parent: &Directory, old: &OsStr, successor: &OsStr, own: &OwnFiles) -> io::Result<()> {
    if parent.entry(old)?.is_some_and(|entry| entry.kind == EntryKind::Link) {
        return parent.remove_file(old);
    }
    let left = parent.directory(old)?;
    let foreign = foreign_names(&left, own)?;
    if !foreign.is_empty() {
        let successor = parent.directory(successor)?;
        foreign.iter().try_for_each(|name| left.rename_to_free(name, &successor, name))?;
    }
    remove_own_directory(parent, old, &left, own)
}

/// The names in a directory that are none of its own files.
///
/// # Errors
/// The directory cannot be listed.
pub fn foreign_names(directory: &Directory, own: &OwnFiles) -> io::Result<Vec<OsString>> {
    let mut foreign = Vec::new();
    let listed = (own.listed)(directory);
    for name in directory.names()? {
        let is_directory = directory.entry(&name)?.is_some_and(|entry| entry.kind == EntryKind::Directory);
        let is_named = (own.is_own)(&name) || kind_of(&name) == Some(Kind::File) || listed.iter().any(|n| **n == *name);
        if is_directory || !is_named {
            foreign.push(name);
        }
    }
    foreign.sort();
    Ok(foreign)
}

/// Removes the own files in the directory with this name, and the directory once it is empty. Tries again after one error:
/// this save may be the last one, and nothing would remove the rest later.
pub(crate) fn remove_own_directory(
    parent: &Directory,
    name: &OsStr,
    directory: &Directory,
    own: &OwnFiles,
) -> io::Result<()> {
    let once = || remove_own_directory_once(parent, name, directory, own);
    match once() {
        Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => match once() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        },
        removed => removed,
    }
}

/// Removes the files once. The list goes last: it names the files of another version.
fn remove_own_directory_once(
    parent: &Directory,
    name: &OsStr,
    directory: &Directory,
    own: &OwnFiles,
) -> io::Result<()> {
    let foreign = foreign_names(directory, own)?;
    let mut names = directory.names()?;
    names.sort_by_key(|name| name == own.list);
    for name in names.iter().filter(|name| !foreign.contains(name)) {
        match directory.remove_file(name) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    parent.remove_directory(name)
}

/// A file or directory that this process is filling. It can be removed from another thread, at the end of the process.
#[derive(Clone, Debug)]
pub struct Leftover {
    parent: Directory,
    name: OsString,
    identity: Option<crate::Identity>,
}

impl Leftover {
    pub(crate) fn new(parent: &Directory, name: &OsStr, file: &File) -> Self {
        let identity = system::examine(file).map(|entry| entry.identity).ok();
        Self { parent: parent.clone(), name: name.to_owned(), identity }
    }

    /// Removes it with all that is in it, if it still has its name. What cannot be removed stays, and does no harm.
    pub fn remove(&self) {
        let Ok(Some(entry)) = self.parent.entry(&self.name) else { return };
        if Some(entry.identity) != self.identity {
            return;
        }
        if entry.kind != EntryKind::Directory {
            let _ = self.parent.remove_file(&self.name);
        } else if let Ok(directory) = self.parent.directory(&self.name) {
            let _ = directory.remove_own(&|_| true).and_then(|()| self.parent.remove_directory(&self.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{AtomicFile, NewDirectory};

    const OWN: OwnFiles =
        OwnFiles { is_own: |name| name == "model.safetensors", listed: |_| Vec::new(), list: "manifest.json" };

    #[test]
    fn leftovers_are_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let id = ".train_low_mem-tmp-0123456789abcde";
        let others = [".tmp-abc", ".train_low_mem-tmp-thesis", "metrics.jsonl"];
        others.iter().for_each(|name| fs::write(root.join(name), "").unwrap());
        let half = root.join(format!("{id}1-part-step-00000001"));
        fs::create_dir(&half).unwrap();
        fs::write(half.join("model.safetensors"), "half").unwrap();
        fs::write(root.join(format!("{id}2")), "half").unwrap();
        // Entries whose kind does not fit their temporary name.
        fs::create_dir(root.join(format!("{id}3"))).unwrap();
        fs::write(root.join(format!("{id}4-part-model")), "").unwrap();
        // A temporary directory with a foreign file in it.
        let with_thesis = root.join(format!("{id}5-part-step-00000002"));
        fs::create_dir(&with_thesis).unwrap();
        fs::write(with_thesis.join("chapter1"), "my only copy").unwrap();
        remove_leftovers(root, &OWN, Others::Possible).unwrap();
        remove_leftovers(&root.join("absent"), &OWN, Others::Possible).unwrap();
        let left = fs::read_dir(root).unwrap().count();
        assert!(!half.exists() && left == 6, "{left}");
        assert_eq!(fs::read_to_string(with_thesis.join("chapter1")).unwrap(), "my only copy");
    }

    #[test]
    fn what_another_process_is_filling_stays_and_gets_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let (file, model) = (directory.path().join("rows"), directory.path().join("model"));
        let (half, new) = (AtomicFile::create(&file).unwrap(), NewDirectory::create(&model).unwrap());
        remove_leftovers(directory.path(), &OWN, Others::Possible).unwrap();
        half.commit().unwrap();
        new.commit(&OWN).unwrap();
        assert!(file.is_file() && model.is_dir());
    }

    #[test]
    fn a_pipe_or_a_link_under_a_temporary_name_is_neither_opened_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (precious, root) = (directory.path().join("precious"), directory.path().join("root"));
        fs::create_dir_all(precious.join("model")).unwrap();
        fs::write(precious.join("model.safetensors"), "my only copy").unwrap();
        fs::create_dir(&root).unwrap();
        for ending in ["1", "2-part-model", "3-old-model"] {
            let name = format!(".train_low_mem-tmp-0123456789abcde{ending}");
            std::os::unix::fs::symlink(&precious, root.join(name)).unwrap();
        }
        let pipe = root.join(".train_low_mem-tmp-0123456789abcde4");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        remove_leftovers(&root, &OWN, Others::None).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 4);
        assert_eq!(fs::read_to_string(precious.join("model.safetensors")).unwrap(), "my only copy");
    }

    #[test]
    fn a_directory_that_every_user_may_change_is_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let left = directory.path().join(".train_low_mem-tmp-0123456789abcdef");
        fs::write(&left, "half").unwrap();
        for (mode, stays) in [(0o777, true), (0o1777, false)] {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
            remove_leftovers(directory.path(), &OWN, Others::None).unwrap();
            assert_eq!(left.exists(), stays, "{mode:o}");
        }
    }
}
