//! Names of this program's own for unfinished files, and the removal of files that a killed process left under them.
//!
//! ```text
//! .train_low_mem-tmp-0123456789abcdef                a file before it gets its name
//! .train_low_mem-tmp-0123456789abcdef-part-model     a directory that will be `model`, or was and is being removed
//! .train_low_mem-tmp-0123456789abcdef-old-model      the replaced `model`, for the instant before the new one has its name
//! .train_low_mem-tmp-0123456789abcdef-run            a dry run, see [`crate::Scratch`]
//! ```
//!
//! Invariants:
//! * A name is made with `O_CREAT | O_EXCL | O_NOFOLLOW` or `mkdir`, so it never refers to an older file.
//! * Only names of exactly these patterns are ever removed, and in a directory only files that a run writes. Any other
//!   file in it stays, or moves to the directory that takes its place.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use heap::{TEMPORARY_PREFIX, create_new, with_temporary_name};

use crate::directories::{parent_of, sync_directory};
use crate::error::{Error, Result};
use crate::own_files::OwnFiles;

const ID_DIGITS: usize = 16;
const PART: &str = "-part-";
const OLD: &str = "-old-";
/// Suffix of the directory of a dry run.
pub(crate) const RUN: &str = "-run";

/// The kind of entry under a temporary name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file.
    File,
    /// A directory that is being filled, or removed, with the name that it will have, or had.
    Part(String),
    /// A directory that had this name, and gets it back if the name is free.
    Old(String),
    /// A dry run.
    Run,
}

/// The kind of entry under `name`, if it is a temporary name.
pub(crate) fn kind_of(name: &OsStr) -> Option<Kind> {
    let rest = name.to_str()?.strip_prefix(TEMPORARY_PREFIX)?;
    let (id, rest) = rest.split_at_checked(ID_DIGITS)?;
    if !id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let of = |prefix: &str| rest.strip_prefix(prefix).filter(|name| !name.is_empty()).map(str::to_owned);
    match rest {
        "" => Some(Kind::File),
        RUN => Some(Kind::Run),
        _ => of(PART).map(Kind::Part).or_else(|| of(OLD).map(Kind::Old)),
    }
}

/// Whether a run gives this name to unfinished files.
pub fn is_temporary_name(name: &OsStr) -> bool {
    kind_of(name).is_some()
}

/// An empty file in `parent`, open for writing.
pub(crate) fn create_file(parent: &Path) -> Result<(PathBuf, File)> {
    with_temporary_name(parent, &[], create_new).map_err(|e| Error::io("create a file in", parent, e))
}

/// An empty directory in `parent` for a dry run.
pub(crate) fn create_run_directory(parent: &Path) -> Result<PathBuf> {
    let made = with_temporary_name(parent, &[OsStr::new(RUN)], |path| fs::create_dir(path));
    Ok(made.map_err(|e| Error::io("create a directory in", parent, e))?.0)
}

/// A new, empty directory beside `target`. The caller fills it and gives it to [`commit_directory`].
///
/// # Errors
/// I/O errors.
pub fn create_directory(target: &Path) -> Result<PathBuf> {
    let parent = parent_of(target);
    let made = with_temporary_name(&parent, &[OsStr::new(PART), target.file_name().unwrap_or_default()], |path| {
        fs::create_dir(path)
    });
    Ok(made.map_err(|e| Error::io("create a directory in", &parent, e))?.0)
}

/// Gives a filled temporary directory its name, in one step even if the name is taken. The old directory is then removed,
/// except for foreign files in it: they move to the new directory.
///
/// # Errors
/// I/O errors. The old directory then still has the name and nothing is left of `temporary`, or only the last sync failed.
pub fn commit_directory(temporary: &Path, target: &Path, own: &OwnFiles) -> Result<()> {
    let replaced = take_name(temporary, target).inspect_err(|_| drop(remove_own_directory(temporary, own)))?;
    sync_directory(&parent_of(target))?;
    if let Some(old) = replaced {
        // The next start removes the rest with other leftovers.
        let _ = remove_replaced(&old, target, own).or_else(|_| remove_replaced(&old, target, own));
    }
    Ok(())
}

/// Gives a filled directory its name. Returns the new path of the directory that had the name.
pub(crate) fn take_name(temporary: &Path, target: &Path) -> Result<Option<PathBuf>> {
    sync_directory(temporary)?;
    match fs::symlink_metadata(target) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            fs::rename(temporary, target).map_err(|e| Error::io("rename a finished directory to", target, e))?;
            return Ok(None);
        }
        Err(e) => return Err(Error::io("examine", target, e)),
    }
    if exchange(temporary, target).is_ok() {
        return Ok(Some(temporary.to_owned()));
    }
    // This file system cannot swap two names: for an instant neither has the name, but both directories are on the disk.
    // A process killed in that instant leaves both; [`remove_leftovers`] gives the old one its name back.
    let old = rename_to_temporary(target, OLD)?;
    if let Err(e) = fs::rename(temporary, target) {
        let _ = fs::rename(&old, target);
        return Err(Error::io("rename a finished directory to", target, e));
    }
    Ok(Some(old))
}

/// Removes a checkpoint or a model. Its name goes first, so that a process killed meanwhile leaves a leftover and nothing torn.
///
/// # Errors
/// I/O errors.
pub fn retire_directory(directory: &Path, own: &OwnFiles) -> Result<()> {
    let moved = rename_to_temporary(directory, PART)?;
    remove_own_directory(&moved, own).map_err(|e| Error::io("remove", directory, e))
}

/// Renames a directory to a temporary name. Returns its new path.
fn rename_to_temporary(directory: &Path, ending: &str) -> Result<PathBuf> {
    let parent = parent_of(directory);
    let ending = [OsStr::new(ending), directory.file_name().unwrap_or_default()];
    let moved = with_temporary_name(&parent, &ending, |path| rename_to_free_name(directory, path));
    Ok(moved.map_err(|e| Error::io("move out of the way", directory, e))?.0)
}

/// Renames a file, unless the new name is taken.
///
/// # Errors
/// I/O errors; [`io::ErrorKind::AlreadyExists`].
pub fn rename_to_free_name(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // Not supported by the file system. The names are random, or the directory has one writer.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            renamed => return Ok(renamed?),
        }
    }
    match fs::symlink_metadata(to) {
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
        Err(e) => Err(e),
    }
}

/// Swaps two names in one step.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    {
        let _ = (a, b);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The names in `directory` that are none of its own files.
///
/// # Errors
/// The directory cannot be listed.
pub fn foreign_names(directory: &Path, own: &OwnFiles) -> io::Result<Vec<OsString>> {
    let mut foreign = Vec::new();
    let listed = (own.listed)(directory);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = !entry.file_type()?.is_dir()
            && ((own.is_own)(&name) || kind_of(&name) == Some(Kind::File) || listed.iter().any(|n| **n == *name));
        if !is_ours {
            foreign.push(name);
        }
    }
    foreign.sort();
    Ok(foreign)
}

/// Removes a directory that was replaced by `successor`. Foreign files in it move there, or stay.
fn remove_replaced(old: &Path, successor: &Path, own: &OwnFiles) -> io::Result<()> {
    if fs::symlink_metadata(old)?.file_type().is_symlink() {
        return fs::remove_file(old);
    }
    for name in foreign_names(old, own)? {
        rename_to_free_name(&old.join(&name), &successor.join(&name))?;
    }
    remove_own_directory(old, own)
}

/// Removes the own files in a directory, and the directory once it is empty. Tries again after one error:
/// this save may be the last one, and nothing would remove the rest later.
///
/// # Errors
/// I/O errors.
pub fn remove_own_directory(directory: &Path, own: &OwnFiles) -> io::Result<()> {
    match remove_own_directory_once(directory, own) {
        Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => match remove_own_directory_once(directory, own) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        },
        removed => removed,
    }
}

/// Removes the files once. The list goes last: it names the files of another version.
fn remove_own_directory_once(directory: &Path, own: &OwnFiles) -> io::Result<()> {
    let foreign = foreign_names(directory, own)?;
    let list = OsStr::new(own.list);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name());
    }
    names.sort_by_key(|name| name == list);
    for name in names.iter().filter(|name| !foreign.contains(name)) {
        match fs::remove_file(directory.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    fs::remove_dir(directory)
}

/// Removes the unfinished files of a killed process in `directory`. If the process was killed between two renames, gives the replaced
/// directory its name back. Only for the directory's one writer. A file that cannot be removed stays, and does no harm.
///
/// # Errors
/// The directory cannot be listed, or a name cannot be given back.
pub fn remove_leftovers(directory: &Path, own: &OwnFiles) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|e| Error::io("list", directory, e))?,
    };
    for entry in entries {
        let entry = entry.map_err(|e| Error::io("list", directory, e))?;
        let Some(kind) = kind_of(&entry.file_name()) else { continue };
        let Ok(found) = entry.file_type() else { continue };
        let path = entry.path();
        match kind {
            Kind::File if found.is_file() => drop(fs::remove_file(&path)),
            Kind::Old(name) if found.is_dir() && is_absent(&directory.join(&name)) => {
                let target = directory.join(name);
                rename_to_free_name(&path, &target).map_err(|e| Error::io("give its name back to", &target, e))?;
                sync_directory(directory)?;
            }
            Kind::Part(name) | Kind::Old(name) if found.is_dir() => {
                let target = directory.join(name);
                drop(if is_absent(&target) {
                    remove_own_directory(&path, own)
                } else {
                    remove_replaced(&path, &target, own)
                });
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: OwnFiles = OwnFiles {
        is_own: |name| name == "config.json" || name == "model.safetensors",
        listed: |_| Vec::new(),
        list: "manifest.json",
    };

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_names_of_our_patterns_are_ours() {
        let check = |name: &str, expected: Option<Kind>| assert_eq!(kind_of(OsStr::new(name)), expected, "{name}");
        check(".train_low_mem-tmp-0123456789abcdef", Some(Kind::File));
        check(".train_low_mem-tmp-0123456789abcdef-run", Some(Kind::Run));
        check(".train_low_mem-tmp-0123456789abcdef-part-model", Some(Kind::Part("model".to_owned())));
        check(".train_low_mem-tmp-0123456789abcdef-old-a-old-b", Some(Kind::Old("a-old-b".to_owned())));
        for foreign in [
            ".tmp-step-00000001",
            ".train_low_mem-tmp-",
            ".train_low_mem-tmp-thesis",
            ".train_low_mem-tmp-0123456789ABCDEF",
            ".train_low_mem-tmp-0123456789abcdef0",
            ".train_low_mem-tmp-0123456789abcde\u{e9}",
            ".train_low_mem-tmp-0123456789abcdef-part-",
            ".train_low_mem-tmp-0123456789abcdef-notes",
            ".train_low_mem-dry-run-abc",
        ] {
            check(foreign, None);
        }
    }

    #[test]
    fn committing_a_directory_replaces_the_one_that_had_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        for content in ["old", "new"] {
            let temporary = create_directory(&target).unwrap();
            fs::write(temporary.join("config.json"), content).unwrap();
            commit_directory(&temporary, &target, &OWN).unwrap();
            assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), content);
            assert_eq!(names(directory.path()), ["model"]);
        }
    }

    #[test]
    fn what_others_put_into_a_directory_is_in_the_one_that_replaces_it() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        fs::create_dir_all(target.join("onnx")).unwrap();
        for (name, content) in [("config.json", "old"), ("README.md", "mine"), ("onnx/model.onnx", "mine, too")] {
            fs::write(target.join(name), content).unwrap();
        }
        let temporary = create_directory(&target).unwrap();
        fs::write(temporary.join("config.json"), "new").unwrap();
        commit_directory(&temporary, &target, &OWN).unwrap();
        assert_eq!(names(directory.path()), ["model"]);
        assert_eq!(names(&target), ["README.md", "config.json", "onnx"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "new");
        assert_eq!(fs::read_to_string(target.join("onnx/model.onnx")).unwrap(), "mine, too");
    }

    #[test]
    fn a_directory_killed_between_two_renames_gets_its_name_back() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        let new = create_directory(&target).unwrap();
        fs::create_dir(&target).unwrap();
        fs::write(target.join("config.json"), "old").unwrap();
        rename_to_temporary(&target, OLD).unwrap();
        fs::write(new.join("config.json"), "new").unwrap();
        remove_leftovers(directory.path(), &OWN).unwrap();
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "old");
        assert_eq!(names(directory.path()), ["model"]);
    }

    #[test]
    fn leftovers_are_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let others = [".tmp-abc", ".train_low_mem-tmp-thesis", "metrics.jsonl"];
        others.iter().for_each(|name| fs::write(root.join(name), "").unwrap());
        let (file, _) = create_file(root).unwrap();
        let half = create_directory(&root.join("step-00000001")).unwrap();
        fs::write(half.join("model.safetensors"), "half").unwrap();
        // Entries whose kind does not fit their temporary name.
        fs::create_dir(root.join(".train_low_mem-tmp-ffffffffffffffff")).unwrap();
        fs::write(root.join(".train_low_mem-tmp-ffffffffffffffff-part-model"), "").unwrap();
        // A temporary directory with a foreign file in it.
        let with_thesis = create_directory(&root.join("step-00000002")).unwrap();
        fs::write(with_thesis.join("chapter1"), "my only copy").unwrap();
        remove_leftovers(root, &OWN).unwrap();
        remove_leftovers(&root.join("absent"), &OWN).unwrap();
        assert!(!file.exists() && !half.exists());
        assert_eq!(fs::read_to_string(with_thesis.join("chapter1")).unwrap(), "my only copy");
        assert_eq!(names(root).len(), 6, "{:?}", names(root));
    }
}
