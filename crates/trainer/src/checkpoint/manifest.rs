//! A manifest: the list of a directory's files with their lengths and checksums. The manifest is written last and makes a directory a
//! checkpoint. A checkpoint that does not agree with its manifest is torn.

use std::io;
use std::path::Path;

use durable_files::Directory;
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

/// The files of a checkpoint, except the manifest itself.
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

    /// The total length of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Reads the manifest of `directory`.
    ///
    /// # Errors
    /// [`Error::Torn`] if there is no manifest or its contents are none, [`Error::Unreadable`] if it could not be read,
    /// [`Error::LaterFormat`].
    pub fn read(directory: &Path) -> Result<Self> {
        let text = read_bounded(directory, MANIFEST_FILE, MAX_MANIFEST_BYTES)?;
        Self::parse(&directory.join(MANIFEST_FILE), &text)
    }

    /// Reads the manifest of an open directory.
    pub(super) fn read_in(directory: &Directory) -> Result<Self> {
        let path = directory.path().join(MANIFEST_FILE);
        let text = directory.read(MANIFEST_FILE.as_ref(), MAX_MANIFEST_BYTES);
        Self::parse(&path, &text.map_err(|e| Error::unreadable(&path, e))?)
    }

    fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        expect_format(path, text, FORMAT)?;
        let manifest: Manifest =
            serde_json::from_slice(text).map_err(|e| Error::torn(path, format!("not a manifest ({e})")))?;
        // No path may leave the directory.
        if let Some(file) =
            manifest.files.iter().find(|file| Path::new(&file.name).file_name() != Some(file.name.as_ref()))
        {
            return Err(Error::torn(path, format!("expected plain file names, got `{}`", file.name)));
        }
        Ok(manifest)
    }

    /// Checks that every file is there and has its length: all that can be checked without reading them.
    ///
    /// # Errors
    /// [`Error::Torn`] or [`Error::Unreadable`], naming the file.
    pub fn verify_lengths(&self, directory: &Path) -> Result<()> {
        for file in &self.files {
            let path = directory.join(&file.name);
            let found = regular_file::metadata(&path).map_err(|e| not_read(directory, &path, e))?;
            if !found.is_file() {
                return Err(Error::unreadable(
                    &path,
                    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"),
                ));
            }
            if found.len() != file.bytes {
                return Err(Error::torn(&path, format!("expected {} bytes, got {}", file.bytes, found.len())));
            }
        }
        Ok(())
    }

    /// Checks every byte of every file. Returns false if `interrupted`, which is asked every few milliseconds, ended that early.
    ///
    /// # Errors
    /// [`Error::Torn`] or [`Error::Unreadable`], naming the file.
    pub fn verify(&self, directory: &Path, interrupted: &dyn Fn() -> bool) -> Result<bool> {
        self.verify_lengths(directory)?;
        for file in &self.files {
            let path = directory.join(&file.name);
            let sum = files::checksum(&path, file.bytes, interrupted).map_err(|e| not_read(directory, &path, e))?;
            let Some((bytes, sha256)) = sum else { return Ok(false) };
            self.check(directory, &ManifestEntry { name: file.name.clone(), bytes, sha256 })?;
        }
        Ok(true)
    }

    /// Checks one file, of which `read` has the measured length and checksum.
    pub(super) fn check(&self, directory: &Path, read: &ManifestEntry) -> Result<()> {
        let expected = self.files.iter().find(|file| file.name == read.name);
        if let Some(expected) = expected.filter(|expected| *expected != read) {
            let reason = format!("damaged: expected SHA-256 {}, got {}", expected.sha256, read.sha256);
            return Err(Error::torn(&directory.join(&read.name), reason));
        }
        Ok(())
    }
}

/// Reads a small file of a checkpoint.
pub(super) fn read_bounded(directory: &Path, name: &str, max_bytes: u64) -> Result<Vec<u8>> {
    let path = directory.join(name);
    regular_file::read(&path, max_bytes).map_err(|e| not_read(directory, &path, e))
}

/// Tells whether a file of a checkpoint is missing, which makes the checkpoint torn, or could not be read, which may have any reason.
///
/// A file is missing if the system reports it absent while the directory that should contain it is there. A dangling
/// link, or a directory that was removed, is neither.
fn not_read(directory: &Path, path: &Path, error: io::Error) -> Error {
    let says_absent = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    let is_missing = says_absent(&error)
        && durable_files::Identity::at(path).is_err_and(|e| says_absent(&e))
        && Directory::open(directory).and_then(|there| there.names()).is_ok();
    if is_missing { Error::torn(path, "missing") } else { Error::unreadable(path, error) }
}

/// Refuses a file that declares a later format than `known`, whatever else is in it.
pub(super) fn expect_format(path: &Path, text: &[u8], known: u32) -> Result<()> {
    #[derive(Deserialize)]
    struct Format {
        format: u64,
    }
    match serde_json::from_slice(text) {
        Ok(Format { format }) if format > u64::from(known) => {
            Err(Error::LaterFormat { path: path.to_owned(), format, known })
        }
        Ok(Format { format }) if format < u64::from(known) => {
            Err(Error::torn(path, format!("expected format {known}, got {format}")))
        }
        // If the text is no JSON, the code that reads the rest reports that.
        _ => Ok(()),
    }
}
