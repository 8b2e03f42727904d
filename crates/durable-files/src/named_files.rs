//! A directory of files whose names the caller gives, such as a model in another program's format. It appears as a whole.
//!
//! Invariant: only files of these names are ever removed. Others in a directory that is replaced move to the new one.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::directory::Directory;
use crate::error::{Error, Result};
use crate::new_directory::NewDirectory;

const BUFFER_BYTES: usize = 1 << 20;

/// A directory under a temporary name that is being filled. If it is dropped before it is finished, nothing is left of it.
#[derive(Debug)]
pub struct NamedFiles {
    target: PathBuf,
    new: NewDirectory,
    names: Vec<String>,
    is_done: bool,
}

impl NamedFiles {
    /// Begins a directory that will be `target`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(target: &Path) -> Result<NamedFiles> {
        let new = NewDirectory::create(target)?;
        Ok(NamedFiles { target: target.to_owned(), new, names: Vec::new(), is_done: false })
    }

    /// Writes one of the files.
    ///
    /// # Errors
    /// I/O errors, and errors of `write`.
    pub fn write<E: From<Error>>(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let file = self.new.create_file(name.as_ref());
        let file = file.map_err(|e| Error::io("create", &self.new.path().join(name), e))?;
        self.names.push(name.to_owned());
        let mut sink = BufWriter::with_capacity(BUFFER_BYTES, file);
        write(&mut sink)?;
        let synced = sink.flush().and_then(|()| sink.get_ref().sync_all());
        Ok(synced.map_err(|e| Error::io("write", &self.target.join(name), e))?)
    }

    /// The total length of the files that were written.
    ///
    /// # Errors
    /// I/O errors.
    pub fn bytes(&self) -> Result<u64> {
        self.names.iter().try_fold(0, |sum, name| {
            let length = self.new.directory().length(name.as_ref());
            Ok(sum + length.map_err(|e| Error::io("examine", &self.new.path().join(name), e))?)
        })
    }

    /// Gives the directory its name. From a directory that had the name, files of the same names are removed and all others move over.
    ///
    /// # Errors
    /// I/O errors. The old directory then still has the name, or only the last sync failed.
    pub fn commit(mut self) -> Result<()> {
        let replaced = self.new.take_name()?;
        self.is_done = true;
        if let Some(old) = replaced {
            // A file that cannot be moved stays where it is, under the temporary name.
            let _ = self.empty(&old);
        }
        Ok(())
    }

    fn empty(&self, old: &OsStr) -> io::Result<()> {
        let parent = self.new.parent();
        let left: Directory = parent.directory(old)?;
        for name in left.names()? {
            match self.names.iter().any(|own| name == **own) {
                true => left.remove_file(&name)?,
                false => left.rename_to_free(&name, self.new.directory(), &name)?,
            }
        }
        parent.remove_directory(old)
    }
}

impl Drop for NamedFiles {
    fn drop(&mut self) {
        if !self.is_done {
            self.names.iter().for_each(|name| drop(self.new.directory().remove_file(name.as_ref())));
            self.new.abandon();
        }
    }
}

/// Writes a file of any length, which gets its name only once it is whole.
///
/// # Errors
/// I/O errors, and errors of `write`. A file that had the name then still has it.
pub fn write_whole<E: From<Error>>(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let file = crate::AtomicFile::create(path)?;
    let mut sink: BufWriter<&File> = BufWriter::with_capacity(BUFFER_BYTES, file.file());
    write(&mut sink)?;
    sink.flush().map_err(|e| Error::io("write", path, e))?;
    drop(sink);
    Ok(file.commit()?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn fill(directory: &mut NamedFiles, text: &str) -> Result<()> {
        for name in ["model.bin", "config.json"] {
            directory.write(name, |sink| {
                sink.write_all(text.as_bytes()).map_err(|e| Error::io("write", Path::new(name), e))
            })?;
        }
        Ok(())
    }

    #[test]
    fn a_directory_is_there_whole_or_not_at_all_and_keeps_what_others_put_into_it() {
        let scratch = tempfile::tempdir().unwrap();
        let target = scratch.path().join("export");
        let mut directory = NamedFiles::create(&target).unwrap();
        fill(&mut directory, "one").unwrap();
        drop(directory);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
        let mut directory = NamedFiles::create(&target).unwrap();
        fill(&mut directory, "one").unwrap();
        directory.commit().unwrap();
        fs::write(target.join("README.md"), "mine").unwrap();
        let mut directory = NamedFiles::create(&target).unwrap();
        fill(&mut directory, "two").unwrap();
        directory.commit().unwrap();
        assert_eq!(fs::read_to_string(target.join("model.bin")).unwrap(), "two");
        assert_eq!(fs::read_to_string(target.join("README.md")).unwrap(), "mine");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&target).unwrap().count(), 3);
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("model.gguf");
        write_whole(&path, |sink| sink.write_all(b"old").map_err(|e| Error::io("write", &path, e))).unwrap();
        let failed = write_whole(&path, |_| Err(Error::io("write", &path, io::ErrorKind::StorageFull.into())));
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    }
}
