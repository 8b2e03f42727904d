//! A directory that is filled under a temporary name, and then gets its name in one step.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::directory::{Directory, parent_of};
use crate::error::{Error, Result};
use crate::leftovers::{remove_own_directory, remove_replaced};
use crate::own_files::OwnFiles;
use crate::temporary::{self, OLD, PART};

/// A new directory beside the one that it will be. It is locked, so that no other process takes it for a leftover. Dropping it does not
/// remove it: only the caller knows its files.
#[derive(Debug)]
pub struct NewDirectory {
    parent: Directory,
    name: OsString,
    directory: Directory,
    target: OsString,
    target_path: PathBuf,
}

impl NewDirectory {
    /// Begins an empty directory that will be `target`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create(target: &Path) -> Result<Self> {
        let failed = |e| Error::io("create a directory in", &parent_of(target), e);
        let (parent, target_name) = Directory::open_parent(target).map_err(failed)?;
        let (name, directory) = temporary::create_directory(&parent, Some(&target_name)).map_err(failed)?;
        Ok(Self { parent, name, directory, target: target_name, target_path: target.to_owned() })
    }

    /// The path of the unfinished directory, for messages.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Creates a file in it.
    ///
    /// # Errors
    /// I/O errors.
    pub fn create_file(&self, name: &OsStr) -> io::Result<File> {
        self.directory.create(name)
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Removes it, if it is empty.
    pub(crate) fn abandon(&self) {
        let _ = self.parent.remove_directory(&self.name);
    }

    pub(crate) fn parent(&self) -> &Directory {
        &self.parent
    }

    /// Removes it with its own files.
    ///
    /// # Errors
    /// I/O errors.
    pub fn remove(&self, own: &OwnFiles) -> io::Result<()> {
        remove_own_directory(&self.parent, &self.name, &self.directory, own)
    }

    /// Gives the filled directory its name, in one step even if the name is taken. The old directory is then removed,
    /// except for foreign files in it: they move to the new directory.
    ///
    /// # Errors
    /// I/O errors. The old directory then still has the name and nothing is left of the new one, or only the last sync failed.
    pub fn commit(&self, own: &OwnFiles) -> Result<()> {
        let replaced = self.take_name().inspect_err(|_| drop(self.remove(own)))?;
        if let Some(old) = replaced {
            let remove = || remove_replaced(&self.parent, &old, &self.target, own);
            // The next start removes the rest with other leftovers.
            let _ = remove().or_else(|_| remove());
        }
        Ok(())
    }

    /// Gives the directory its name. Returns the new name of the directory that had it.
    pub(crate) fn take_name(&self) -> Result<Option<OsString>> {
        let (parent, target) = (&self.parent, &self.target);
        self.directory.sync().map_err(|e| Error::io("sync", self.path(), e))?;
        let rename = || parent.rename(&self.name, target);
        let named = |e| Error::io("rename a finished directory to", &self.target_path, e);
        let replaced = match parent.entry(target).map_err(|e| Error::io("examine", &self.target_path, e))? {
            None => rename().map(|()| None).map_err(named)?,
            Some(_) if parent.exchange(&self.name, target).is_ok() => Some(self.name.clone()),
            Some(_) => {
                // This file system cannot swap two names: for an instant neither has the name, but both directories are on the disk. A
                // process killed in that instant leaves both; `remove_leftovers` gives the old one its name back.
                let old = rename_to_temporary(parent, target, OLD).map_err(|e| moved(&self.target_path, e))?;
                if let Err(e) = rename() {
                    let _ = parent.rename(&old, target);
                    return Err(named(e));
                }
                Some(old)
            }
        };
        parent.sync().map_err(|e| Error::io("sync", parent.path(), e))?;
        Ok(replaced)
    }
}

/// Removes a checkpoint or a model. Its name goes first, so that a process killed meanwhile leaves a leftover and nothing torn.
///
/// # Errors
/// I/O errors.
pub fn retire_directory(path: &Path, own: &OwnFiles) -> Result<()> {
    let (parent, name) = Directory::open_parent(path).map_err(|e| Error::io("open", path, e))?;
    let old = rename_to_temporary(&parent, &name, PART).map_err(|e| moved(path, e))?;
    let removed = parent.directory(&old).and_then(|directory| remove_own_directory(&parent, &old, &directory, own));
    removed.map_err(|e| Error::io("remove", path, e))
}

fn moved(path: &Path, error: io::Error) -> Error {
    Error::io("move out of the way", path, error)
}

/// Renames an entry to a temporary name, which is returned.
fn rename_to_temporary(parent: &Directory, name: &OsStr, ending: &str) -> io::Result<OsString> {
    let rename = |new: &OsStr| parent.rename_to_free(name, parent, new);
    Ok(parent.with_temporary_name(&[OsStr::new(ending), name], rename)?.0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::leftovers::{Others, remove_leftovers};

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    const OWN: OwnFiles = OwnFiles {
        is_own: |name| name == "config.json" || name == "model.safetensors",
        listed: |_| Vec::new(),
        list: "manifest.json",
    };

    #[test]
    fn committing_a_directory_replaces_the_one_that_had_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        for content in ["old", "new"] {
            let temporary = NewDirectory::create(&target).unwrap();
            fs::write(temporary.path().join("config.json"), content).unwrap();
            temporary.commit(&OWN).unwrap();
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
        let temporary = NewDirectory::create(&target).unwrap();
        fs::write(temporary.path().join("config.json"), "new").unwrap();
        temporary.commit(&OWN).unwrap();
        assert_eq!(names(directory.path()), ["model"]);
        assert_eq!(names(&target), ["README.md", "config.json", "onnx"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "new");
        assert_eq!(fs::read_to_string(target.join("onnx/model.onnx")).unwrap(), "mine, too");
    }

    #[test]
    fn a_directory_killed_between_two_renames_gets_its_name_back() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        let new = NewDirectory::create(&target).unwrap();
        fs::create_dir(&target).unwrap();
        fs::write(target.join("config.json"), "old").unwrap();
        let (parent, name) = Directory::open_parent(&target).unwrap();
        rename_to_temporary(&parent, &name, OLD).unwrap();
        fs::write(new.path().join("config.json"), "new").unwrap();
        drop(new);
        remove_leftovers(directory.path(), &OWN, Others::None).unwrap();
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "old");
        assert_eq!(names(directory.path()), ["model"]);
    }
}
