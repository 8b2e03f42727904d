//! Names of this program's own for unfinished files.
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
//! * The file or directory is locked for as long as it is being filled. One whose lock is free has no owner.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;

use heap::TEMPORARY_PREFIX;

use crate::directory::{Directory, ID_DIGITS, RUN};
use crate::locks::try_lock;

pub(crate) const PART: &str = "-part-";
pub(crate) const OLD: &str = "-old-";

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

/// An empty file in this directory, open for writing, and locked.
pub(crate) fn create_file(parent: &Directory) -> io::Result<(OsString, File)> {
    loop {
        let (name, file) = parent.with_temporary_name(&[], |name| parent.create(name))?;
        if lock_new(parent, &name, &file)? {
            return Ok((name, file));
        }
    }
}

/// An empty directory in this one, open and locked: for a dry run, or to become `target`.
pub(crate) fn create_directory(parent: &Directory, target: Option<&OsStr>) -> io::Result<(OsString, Directory)> {
    let ending = target.map_or([OsStr::new(RUN), OsStr::new("")], |target| [OsStr::new(PART), target]);
    loop {
        let make = |name: &OsStr| parent.make_directory(name, target.is_none());
        let (name, ()) = parent.with_temporary_name(&ending, make)?;
        let made = match parent.directory(&name) {
            // A process that looks for leftovers came between making and opening.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            made => made?,
        };
        if lock_new(parent, &name, made.file())? {
            return Ok((name, made));
        }
    }
}

/// Locks a new entry. False if a process that looks for leftovers came between making and locking, and removed it.
fn lock_new(parent: &Directory, name: &OsStr, file: &File) -> io::Result<bool> {
    // On a file system without locks no process can take the lock, so none removes the entry.
    let _ = try_lock(file);
    parent.has(name, file)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
