//! Files that are whole or absent: the only place in the house that writes small files.
//!
//! Invariants:
//! * A name never points at half a file: everything is written under a temporary name (see [`crate::temporary`]) in the same
//!   directory, synced, and renamed.
//! * What is made is on the disk with its name: after a rename, and after a directory is made, the directory that has the
//!   name is synced.
//!
//! ```no_run
//! trainer::write_atomic("runs/tiny/resolved.toml".as_ref(), b"[run]\n")?;
//! # Ok::<(), trainer::Error>(())
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::temporary;

/// Writes `bytes` to `path` so that a reader, or the next start after a crash, sees the old file or the new, never a part.
///
/// # Errors
/// [`Error::DiskFull`], or [`Error::Io`] for anything else. The old file is then intact, and nothing is left of the new one.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = parent_of(path);
    let (temporary, mut file) = temporary::create_file(&parent)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io("write", path, e));
    let renamed = written.and_then(|()| fs::rename(&temporary, path).map_err(|e| Error::io("replace", path, e)));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    sync_directory(&parent)
}

/// Makes a directory's entries durable. Without it a rename can be undone by a power cut.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|e| Error::io("sync", path, e))
}

/// Makes a directory and those above it that are missing, each durable in the one above it. Returns those that it made,
/// outermost first.
///
/// # Errors
/// I/O errors. Those made before stay.
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
            // Another process was faster, and syncs it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => continue,
            created => created.map_err(|e| Error::io("create", directory, e))?,
        }
        made.push(directory.to_owned());
        match sync(&parent_of(directory)) {
            // A directory may be one to write to and not to read; it cannot be synced then.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(made)
}

/// The directory that has the name `path`.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Which file or directory a path stands for. The same path may stand for another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Of an open file.
    pub(crate) fn of(file: &fs::Metadata) -> Self {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Identity { device: file.dev(), inode: file.ino() }
        }
        #[cfg(not(unix))]
        {
            let _ = file;
            Identity { device: 0, inode: 0 }
        }
    }

    /// Of what has this name itself, a symbolic link included.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&fs::symlink_metadata(path)?))
    }
}

/// A writer that knows the length and the SHA-256 of what went through it, so that nothing is read again to be summed.
pub(crate) struct HashingWriter<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        HashingWriter { inner, hash: Sha256::new(), bytes: 0 }
    }

    /// The writer, the number of bytes and their SHA-256 in hexadecimal.
    pub(crate) fn finish(self) -> (W, u64, String) {
        (self.inner, self.bytes, hexadecimal(&self.hash.finalize()))
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The length and the SHA-256 of a file of `bytes` bytes, read in small pieces; of a longer one, those of one byte more.
/// `None` where `interrupted` says so before the end.
///
/// # Errors
/// I/O errors; the file is not a regular one.
pub(crate) fn checksum(path: &Path, bytes: u64, interrupted: &dyn Fn() -> bool) -> io::Result<Option<(u64, String)>> {
    const PIECE_BYTES: usize = 1 << 18;
    let mut file = regular_file::open(path)?.take(bytes.saturating_add(1));
    let mut writer = HashingWriter::new(io::sink());
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        if interrupted() {
            return Ok(None);
        }
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => writer.write_all(&piece[..read])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let (_, bytes, sha256) = writer.finish();
    Ok(Some((bytes, sha256)))
}

/// The SHA-256 of bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_atomic_write_replaces_the_file_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_atomic(&path, b"old").unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_atomic_write_that_cannot_be_done_names_the_place() {
        let directory = tempfile::tempdir().unwrap();
        let error = write_atomic(&directory.path().join("absent/state.json"), b"").unwrap_err();
        assert!(matches!(&error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("absent"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn an_atomic_write_makes_a_file_that_others_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let (path, plain) = (directory.path().join("a"), directory.path().join("b"));
        write_atomic(&path, b"").unwrap();
        File::create(&plain).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
    }

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

    #[test]
    fn the_checksum_taken_while_writing_is_that_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut writer = HashingWriter::new(File::create(&path).unwrap());
        writer.write_all(b"abc").unwrap();
        let (_, bytes, sha256) = writer.finish();
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(checksum(&path, 3, &|| false).unwrap(), Some((bytes, sha256)));
        assert_eq!(checksum(&path, 1, &|| false).unwrap().unwrap().0, 2, "longer than it should be");
        assert_eq!(checksum(&path, 3, &|| true).unwrap(), None);
    }
}
