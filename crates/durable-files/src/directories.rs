//! Durable directories: after a directory is made, or a name in it changes, it is synced.

use std::io;
use std::path::{Path, PathBuf};

use crate::directory::{Directory, parent_of};
use crate::error::{Error, Result};

/// Makes a directory and its missing parents, each durable in its own parent. Returns the directories that it made,
/// outermost first.
///
/// # Errors
/// I/O errors. Directories that were made before the error stay.
pub fn create_directories(path: &Path) -> Result<Vec<PathBuf>> {
    create_directories_with(path, |parent| parent.sync())
}

fn create_directories_with(path: &Path, mut sync: impl FnMut(&Directory) -> io::Result<()>) -> Result<Vec<PathBuf>> {
    let mut missing = Vec::new();
    for directory in path.ancestors().filter(|path| !path.as_os_str().is_empty()) {
        match Directory::open(directory) {
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::NotFound => missing.push(directory),
            Err(e) => return Err(Error::io("create", directory, e)),
        }
    }
    let mut made = Vec::new();
    for path in missing.into_iter().rev() {
        let failed = |e| Error::io("create", path, e);
        let Some(name) = path.file_name() else { continue };
        let parent = Directory::open(&parent_of(path)).map_err(failed)?;
        match parent.make_directory(name, false) {
            // Another process made the directory first, and syncs it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && parent.directory(name).is_ok() => continue,
            created => created.map_err(failed)?,
        }
        made.push(path.to_owned());
        match sync(&parent) {
            // A directory that can be written and not read cannot be synced.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced.map_err(|e| Error::io("sync", parent.path(), e))?,
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_directory_that_is_made_is_synced_into_the_one_above_it_as_each_one_on_the_way() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        let mut synced = Vec::new();
        let mut make = || {
            create_directories_with(&path, |directory| {
                synced.push(directory.path().to_owned());
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
