//! Durable directories: after a directory is made, or a name in it changes, it is synced.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Makes a directory's entries durable. Without it a rename can be undone by a power cut.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|e| Error::io("sync", path, e))
}

/// Makes a directory and its missing parents, each durable in its own parent. Returns the directories that it made,
/// outermost first.
///
/// # Errors
/// I/O errors. Directories that were made before the error stay.
pub fn create_directories(path: &Path) -> Result<Vec<PathBuf>> {
    create_directories_with(path, sync_directory)
}

fn create_directories_with(path: &Path, mut sync: impl FnMut(&Path) -> Result<()>) -> Result<Vec<PathBuf>> {
    let mut missing = Vec::new();
    for directory in path.ancestors().filter(|path| !path.as_os_str().is_empty()) {
        match fs::metadata(directory) {
            Ok(found) if found.is_dir() => break,
            Ok(_) => return Err(Error::io("create", directory, io::ErrorKind::NotADirectory.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => missing.push(directory),
            Err(e) => return Err(Error::io("create", directory, e)),
        }
    }
    let mut made = Vec::new();
    for directory in missing.into_iter().rev() {
        match fs::create_dir(directory) {
            // Another process made the directory first, and syncs it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => continue,
            created => created.map_err(|e| Error::io("create", directory, e))?,
        }
        made.push(directory.to_owned());
        match sync(&parent_of(directory)) {
            // A directory that can be written and not read cannot be synced.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(made)
}

/// The directory that contains the name `path`.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_made_is_synced_into_the_one_above_it_as_each_one_on_the_way() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        let mut synced = Vec::new();
        let mut make = || {
            create_directories_with(&path, |directory| {
                synced.push(directory.to_owned());
                Ok(())
            })
            .unwrap()
        };
        assert_eq!(make(), [root.path().join("a"), root.path().join("a/b"), path.clone()]);
        assert!(make().is_empty());
        assert_eq!(synced, [root.path().to_owned(), root.path().join("a"), root.path().join("a/b")]);
        fs::write(path.join("file"), "").unwrap();
        assert!(matches!(create_directories(&path.join("file/d")), Err(Error::Io { .. })));
    }
}
