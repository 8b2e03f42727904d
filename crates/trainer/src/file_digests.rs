//! Digests of files beside a run on which its result depends, such as the weights below an adapter.
//!
//! Reading such files again takes long, so a digest is kept with the file's stamp: while the stamp is the same, so are the contents. A file
//! that was moved or copied has another stamp, and is read again.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files;

/// The SHA-256 of a file, and its stamp at that time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// In hexadecimal.
    pub sha256: String,
    stamp: Stamp,
}

/// The metadata that changes with a file's contents. No program can set the time of the last change of its metadata back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    device: u64,
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// `None` where the system has no such numbers.
    #[cfg(unix)]
    fn from_metadata(file: &Metadata) -> Option<Stamp> {
        use std::os::unix::fs::MetadataExt;
        Some(Stamp {
            bytes: file.len(),
            device: file.dev(),
            inode: file.ino(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    #[cfg(not(unix))]
    fn from_metadata(_: &Metadata) -> Option<Stamp> {
        None
    }
}

/// Digests by file name.
pub type FileDigests = BTreeMap<String, FileDigest>;

/// The digests of files of different names. Those in `known` whose stamps have not changed are taken from there.
///
/// # Errors
/// A file cannot be read.
pub fn digests_of(paths: &[PathBuf], known: &FileDigests) -> Result<FileDigests> {
    paths.iter().map(|path| digest_of(path, known)).collect()
}

fn digest_of(path: &Path, known: &FileDigests) -> Result<(String, FileDigest)> {
    let failed = |error| Error::io("read", path, error);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stamp = Stamp::from_metadata(&regular_file::metadata(path).map_err(failed)?);
    let is_same = |known: &&FileDigest| Some(known.stamp) == stamp;
    if let Some(known) = known.get(&name).filter(is_same) {
        return Ok((name, known.clone()));
    }
    let sha256 = files::checksum(path, u64::MAX, &|| false).map_err(failed)?.map(|(_, sha256)| sha256);
    let none = Stamp { bytes: 0, device: 0, inode: 0, modified: (0, 0), changed: (0, 0) };
    Ok((name, FileDigest { sha256: sha256.unwrap_or_default(), stamp: stamp.unwrap_or(none) }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_digest_is_that_of_the_contents_and_is_kept_while_the_stamp_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights");
        fs::write(&path, "abc").unwrap();
        let of = |path: &PathBuf, known: &FileDigests| digests_of(std::slice::from_ref(path), known).unwrap();
        let mut first = of(&path, &FileDigests::new());
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(first["weights"].sha256, sha256);
        assert_eq!(of(&path, &first), first);
        // A file with the recorded stamp is not read again. A copy has another stamp, and is read.
        first.get_mut("weights").unwrap().sha256 = "known".to_owned();
        #[cfg(unix)]
        assert_eq!(of(&path, &first)["weights"].sha256, "known");
        let copy = directory.path().join("copy");
        fs::create_dir(&copy).unwrap();
        fs::copy(&path, copy.join("weights")).unwrap();
        assert_eq!(of(&copy.join("weights"), &first)["weights"].sha256, sha256);
        // The same length and the same time of the last write.
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, "abd").unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        assert_ne!(of(&path, &first)["weights"].sha256, "known");
        assert!(digests_of(&[directory.path().join("absent")], &first).is_err());
    }
}
