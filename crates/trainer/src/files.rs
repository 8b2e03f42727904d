//! Files and directories that are whole or absent: the only place in the house that writes small files.
//!
//! Invariants:
//! * A name never points at half a file or half a directory: everything is written under a temporary name in the same
//!   directory, synced, and renamed.
//! * What a crash leaves behind starts with [`TEMPORARY_PREFIX`], and the next holder of the run's lock removes it.
//!
//! ```no_run
//! trainer::write_atomic("runs/tiny/resolved.toml".as_ref(), b"[run]\n")?;
//! # Ok::<(), trainer::Error>(())
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// What the name of every unfinished file and directory starts with.
pub const TEMPORARY_PREFIX: &str = ".tmp-";
/// What the temporary name ends with of a finished directory that had to make way for its successor.
const OLD_SUFFIX: &str = ".old";

/// Writes `bytes` to `path` so that a reader, or the next start after a crash, sees the old file or the new, never a part.
///
/// # Errors
/// [`Error::DiskFull`], or [`Error::Io`] for anything else. The old file is then intact.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = parent_of(path);
    // `tempfile` makes private files; these are for everyone whom the umask allows.
    #[cfg(unix)]
    let permissions = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY_PREFIX);
    #[cfg(unix)]
    builder.permissions(permissions);
    let mut file = builder.tempfile_in(&parent).map_err(|e| Error::io("create a file in", &parent, e))?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(|e| Error::io("write", path, e))?;
    file.persist(path).map_err(|e| Error::io("replace", path, e.error))?;
    sync_directory(&parent)
}

/// Makes a directory's entries durable. Without it a rename can be undone by a power cut.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|e| Error::io("sync", path, e))
}

/// A fresh, empty directory beside `target`, to be filled and then given to [`commit_directory`].
pub(crate) fn temporary_directory(target: &Path) -> Result<PathBuf> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let path = parent_of(target).join(format!("{TEMPORARY_PREFIX}{name}"));
    remove_directory(&path)?;
    fs::create_dir_all(&path).map_err(|e| Error::io("create", &path, e))?;
    Ok(path)
}

/// Gives a filled temporary directory its name, in one step also where the name is taken, then removes what had it.
pub(crate) fn commit_directory(temporary: &Path, target: &Path) -> Result<()> {
    let parent = parent_of(target);
    sync_directory(temporary)?;
    let taken = target.exists();
    if !taken {
        fs::rename(temporary, target).map_err(|e| Error::io("rename a finished directory to", target, e))?;
    } else if exchange(temporary, target).is_err() {
        // A file system that cannot swap two names: for an instant neither has the name, but both are on the disk.
        // A process killed in that instant leaves both; [`remove_leftovers`] gives the old one its name back.
        let mut old = temporary.as_os_str().to_owned();
        old.push(OLD_SUFFIX);
        let old = PathBuf::from(old);
        remove_directory(&old)?;
        fs::rename(target, &old).map_err(|e| Error::io("move out of the way", target, e))?;
        fs::rename(temporary, target).map_err(|e| Error::io("rename a finished directory to", target, e))?;
        sync_directory(&parent)?;
        return remove_directory(&old);
    }
    sync_directory(&parent)?;
    if taken { remove_directory(temporary) } else { Ok(()) }
}

/// Swaps two names in one step.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    {
        let _ = (a, b);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Removes a directory and everything in it; one that is not there is fine.
pub(crate) fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Removes what a killed process left unfinished in `directory`. Only for who is its one writer.
pub(crate) fn remove_leftovers(directory: &Path) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|e| Error::io("list", directory, e))?,
    };
    for entry in entries {
        let entry = entry.map_err(|e| Error::io("list", directory, e))?;
        if !entry.file_name().to_string_lossy().starts_with(TEMPORARY_PREFIX) {
            continue;
        }
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let moved_away = name.strip_prefix(TEMPORARY_PREFIX).and_then(|name| name.strip_suffix(OLD_SUFFIX));
            match moved_away.map(|name| directory.join(name)) {
                Some(target) if !target.exists() => {
                    fs::rename(&path, &target).map_err(|e| Error::io("give its name back to", &target, e))?;
                    sync_directory(directory)?;
                }
                _ => remove_directory(&path)?,
            }
        } else {
            fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
        }
    }
    Ok(())
}

fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
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

/// The length and the SHA-256 of a file, read in small pieces.
pub(crate) fn checksum(path: &Path) -> io::Result<(u64, String)> {
    let mut writer = HashingWriter::new(io::sink());
    io::copy(&mut io::BufReader::with_capacity(1 << 18, File::open(path)?), &mut writer)?;
    let (_, bytes, sha256) = writer.finish();
    Ok((bytes, sha256))
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
    fn a_directory_killed_between_two_renames_gets_its_name_back() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        let temporary = temporary_directory(&target).unwrap();
        let mut old = temporary.as_os_str().to_owned();
        old.push(OLD_SUFFIX);
        fs::create_dir(&old).unwrap();
        fs::write(PathBuf::from(&old).join("weights"), "old").unwrap();
        remove_leftovers(directory.path()).unwrap();
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"old");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn committing_a_directory_replaces_the_one_that_had_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("model");
        for content in ["old", "new"] {
            let temporary = temporary_directory(&target).unwrap();
            fs::write(temporary.join("weights"), content).unwrap();
            commit_directory(&temporary, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("weights")).unwrap(), content);
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn leftovers_are_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("metrics.jsonl"), "").unwrap();
        fs::write(directory.path().join(".tmp-abc"), "").unwrap();
        fs::create_dir(directory.path().join(".tmp-step-00000001")).unwrap();
        fs::write(directory.path().join(".tmp-step-00000001/model.safetensors"), "half").unwrap();
        remove_leftovers(directory.path()).unwrap();
        remove_leftovers(&directory.path().join("absent")).unwrap();
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["metrics.jsonl"]);
    }

    #[test]
    fn the_checksum_taken_while_writing_is_that_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut writer = HashingWriter::new(File::create(&path).unwrap());
        writer.write_all(b"abc").unwrap();
        let (_, bytes, sha256) = writer.finish();
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(checksum(&path).unwrap(), (bytes, sha256));
    }
}
