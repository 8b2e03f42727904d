//! The files that a program writes into directories: only these are ever removed with a directory.

use std::ffi::OsStr;

use crate::directory::Directory;

/// How to recognise the files of a directory that the caller fills, such as those of a model.
#[derive(Clone, Copy, Debug)]
pub struct OwnFiles {
    /// Whether it gives this name to a file.
    pub is_own: fn(&OsStr) -> bool,
    /// Further names, which a file in the directory lists: another version may have written it.
    pub listed: fn(&Directory) -> Vec<String>,
    /// The file with that list, which is removed last.
    pub list: &'static str,
}
