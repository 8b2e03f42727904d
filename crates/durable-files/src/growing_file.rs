//! A file that grows under a name of its own until it is whole. A command that was killed finds it again, and goes on where it ended.
//!
//! The name has a key: what the file's contents depend on. So a command with other settings never goes on with it.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::locks::lock_within;

/// A file that is not whole yet. It stays when this is dropped.
#[derive(Debug)]
pub struct GrowingFile {
    directory: Directory,
    name: OsString,
    growing: OsString,
    path: PathBuf,
    file: File,
}

impl GrowingFile {
    /// Opens what an earlier process with this key has written of the file that will be `path`, or begins it: `NAME.KEY.partial` beside it.
    ///
    /// # Errors
    /// I/O errors; [`Error::Busy`] while another process writes it.
    pub fn open(path: &Path, key: u64) -> Result<Self> {
        let failed = |e| Error::io("create a file in", &crate::directory::parent_of(path), e);
        let (directory, name) = Directory::open_parent(path).map_err(failed)?;
        let mut growing = name.clone();
        growing.push(format!(".{key:016x}.partial"));
        let path = directory.path().join(&growing);
        let file = directory.append(&growing).map_err(|e| Error::io("open", &path, e))?;
        lock_within(&file, &path, Duration::ZERO)?;
        Ok(Self { directory, name, growing, path, file })
    }

    /// Where it grows.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, to read it and to append to it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Removes the file, when what was made of it is in place.
    ///
    /// # Errors
    /// I/O errors.
    pub fn remove(self) -> Result<()> {
        self.directory.remove_file(&self.growing).map_err(|e| Error::io("remove", &self.path, e))
    }

    /// Gives the whole file its name. A file that had the name is replaced.
    ///
    /// # Errors
    /// I/O errors.
    pub fn commit(self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, e))?;
        self.directory.rename(&self.growing, &self.name).map_err(|e| Error::io("replace", &self.path, e))?;
        self.directory.sync().map_err(|e| Error::io("sync", self.directory.path(), e))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn it_is_found_again_by_its_key_and_gets_its_name_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("answers");
        GrowingFile::open(&path, 7).unwrap().file().write_all(b"one").unwrap();
        let again = GrowingFile::open(&path, 7).unwrap();
        assert!(GrowingFile::open(&path, 7).is_err_and(|error| matches!(error, Error::Busy { .. })));
        assert_eq!(GrowingFile::open(&path, 8).unwrap().file().metadata().unwrap().len(), 0);
        let mut text = String::new();
        again.file().rewind().unwrap();
        again.file().read_to_string(&mut text).unwrap();
        assert_eq!(text, "one");
        again.file().write_all(b" two").unwrap();
        assert!(!path.exists());
        again.commit().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one two");
        let other = GrowingFile::open(&path, 8).unwrap();
        let growing = other.path().to_owned();
        other.remove().unwrap();
        assert!(!growing.exists() && path.exists());
    }
}
