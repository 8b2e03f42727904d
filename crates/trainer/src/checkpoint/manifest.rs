//! A manifest: the list of a directory's files with their lengths and checksums. Written last, it makes a directory a
//! checkpoint; what does not agree with it is torn.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files;

/// The manifest's own name.
pub const MANIFEST_FILE: &str = "manifest.json";

/// A manifest larger than this is damage, not a list of seven files.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

const FORMAT: u32 = 1;

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// Its name, without directories.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
}

/// The files of a checkpoint, the manifest itself excepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// The files, in the order of their writing.
    pub files: Vec<ManifestEntry>,
}

impl Manifest {
    pub(super) fn new(files: Vec<ManifestEntry>) -> Self {
        Manifest { format: FORMAT, files }
    }

    /// The length of all files together.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Reads the manifest of `directory`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where there is none, or none that can be read.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST_FILE);
        let length = fs::metadata(&path).map_err(|e| Error::checkpoint(&path, format!("no manifest ({e})")))?.len();
        if length > MAX_MANIFEST_BYTES {
            return Err(Error::checkpoint(&path, format!("expected a manifest, got {length} bytes")));
        }
        let text = fs::read(&path).map_err(|e| Error::checkpoint(&path, format!("unreadable ({e})")))?;
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|e| Error::checkpoint(&path, format!("not a manifest ({e})")))?;
        if manifest.format != FORMAT {
            let reason = format!("expected manifest format {FORMAT}, got {}", manifest.format);
            return Err(Error::checkpoint(&path, reason));
        }
        // No path may leave the directory.
        if let Some(file) =
            manifest.files.iter().find(|file| Path::new(&file.name).file_name() != Some(file.name.as_ref()))
        {
            return Err(Error::checkpoint(&path, format!("expected plain file names, got `{}`", file.name)));
        }
        Ok(manifest)
    }

    /// Checks that every file is there and as long as it should be: what can be seen without reading them.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the file.
    pub fn verify_lengths(&self, directory: &Path) -> Result<()> {
        for file in &self.files {
            let path = directory.join(&file.name);
            let length = fs::metadata(&path).map_err(|e| Error::checkpoint(&path, format!("missing ({e})")))?.len();
            if length != file.bytes {
                return Err(Error::checkpoint(&path, format!("expected {} bytes, got {length}", file.bytes)));
            }
        }
        Ok(())
    }

    /// Checks every byte of every file.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the file.
    pub fn verify(&self, directory: &Path) -> Result<()> {
        self.verify_lengths(directory)?;
        for file in &self.files {
            let path = directory.join(&file.name);
            let (bytes, sha256) =
                files::checksum(&path).map_err(|e| Error::checkpoint(&path, format!("unreadable ({e})")))?;
            self.check(directory, &ManifestEntry { name: file.name.clone(), bytes, sha256 })?;
        }
        Ok(())
    }

    /// Checks what was read of one file.
    pub(super) fn check(&self, directory: &Path, read: &ManifestEntry) -> Result<()> {
        let expected = self.files.iter().find(|file| file.name == read.name);
        if let Some(expected) = expected.filter(|expected| *expected != read) {
            let reason = format!("damaged: expected SHA-256 {}, got {}", expected.sha256, read.sha256);
            return Err(Error::checkpoint(&directory.join(&read.name), reason));
        }
        Ok(())
    }
}
