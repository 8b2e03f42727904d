//! A model's own file, whose weights are used where they lie, and which must stay as it is meanwhile.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use heap::FileMemory;

use crate::error::{Error, Result};

/// A mapped file of weights, and its state at that time.
#[derive(Debug)]
pub(crate) struct StoredFile {
    /// The file as memory.
    pub memory: FileMemory,
    file: File,
    path: PathBuf,
    state: FileState,
}

/// The part of a file's metadata that changes with its contents.
#[derive(Debug, PartialEq, Eq)]
struct FileState {
    bytes: u64,
    modified: Option<SystemTime>,
    /// The device and the number of the file there, where the system has such numbers.
    file: (u64, u64),
}

impl FileState {
    fn new(metadata: &Metadata) -> FileState {
        #[cfg(unix)]
        let file = (std::os::unix::fs::MetadataExt::dev(metadata), std::os::unix::fs::MetadataExt::ino(metadata));
        #[cfg(not(unix))]
        let file = (0, 0);
        FileState { bytes: metadata.len(), modified: metadata.modified().ok(), file }
    }
}

impl StoredFile {
    /// Maps a file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn map(file: &File, path: &Path) -> Result<StoredFile> {
        let open = || {
            let state = FileState::new(&file.metadata()?);
            let memory = FileMemory::of_file(file.try_clone()?, path)?;
            Ok(StoredFile { memory, file: file.try_clone()?, path: path.to_owned(), state })
        };
        open().map_err(Error::io(path))
    }

    /// Refuses a file that was changed since it was mapped, or whose name has another file now: what was computed before belongs to other
    /// weights than what comes next. A file whose name is gone keeps its contents.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Io`].
    pub fn check_unchanged(&self) -> Result<()> {
        let is_same = |metadata: &Metadata| FileState::new(metadata) == self.state;
        let is_named_so = regular_file::metadata(&self.path).map_or(true, |named| is_same(&named));
        match is_named_so && is_same(&self.file.metadata().map_err(Error::io(&self.path))?) {
            true => Ok(()),
            false => Err(Error::Changed { path: self.path.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_file_that_is_changed_or_replaced_is_noticed_and_one_that_is_removed_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("values");
        let map = || {
            std::fs::write(&path, [1; 64]).unwrap();
            StoredFile::map(&File::open(&path).unwrap(), &path).unwrap()
        };
        let is_noticed = |mapped: &StoredFile| {
            let error = mapped.check_unchanged().unwrap_err();
            assert!(matches!(&error, Error::Changed { path } if path.ends_with("values")), "{error}");
        };
        let mapped = map();
        mapped.check_unchanged().unwrap();
        let later = SystemTime::now() + Duration::from_secs(7);
        File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        is_noticed(&mapped);
        let mapped = map();
        File::options().append(true).open(&path).unwrap().set_len(65).unwrap();
        is_noticed(&mapped);
        let mapped = map();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        mapped.check_unchanged().unwrap();
        std::fs::write(&path, [1; 64]).unwrap();
        is_noticed(&mapped);
    }
}
