//! Regular files, opened and read without surprises.
//!
//! A path that a user, a config or a damaged checkpoint names may be a pipe, a device or a directory. Opening a pipe waits
//! for a writer, and reading a device may never end. Here:
//!
//! * Only regular files are opened, after symbolic links are followed. Everything else is an error at once.
//! * A symbolic link of another user leads only to what that user may read, too (see [`reach`] for directories that will be changed).
//! * Directories are listed, and paths are made real, along the same way: a path without links would hide who led there.
//! * A whole file is read into memory only up to a length that the caller gives.
//!
//! ```
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("state.json");
//! # std::fs::write(&path, "{}").unwrap();
//! assert_eq!(regular_file::read(&path, 1 << 20)?, b"{}");
//! assert!(regular_file::read(&path, 1).is_err());
//! assert!(regular_file::open(directory.path()).is_err());
//! # Ok::<(), std::io::Error>(())
//! ```

mod users;
mod walk;

use std::fs::{File, FileType, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

pub use users::{is_trusted, keeps_names, ours};
pub use walk::{Reached, reach};

/// Opens a regular file to read it.
///
/// # Errors
/// Errors of the system; [`io::ErrorKind::InvalidInput`] for a directory, a pipe, a socket or a device, which is then not
/// opened, or not read; [`io::ErrorKind::PermissionDenied`] if a link of another user leads to a file that this user may not read.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening a device can have effects, so the kind of the file is asked first.
    expect_regular(metadata(path)?.file_type())?;
    let file = walk::open(path)?;
    // The name may refer to another file by now.
    expect_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// The metadata of a file or a directory, which is not opened.
///
/// # Errors
/// There is none; [`io::ErrorKind::PermissionDenied`] if a link of another user leads where this user may not go.
pub fn metadata(path: &Path) -> io::Result<Metadata> {
    walk::metadata(path)
}

/// The paths of a directory's entries, in no order.
///
/// # Errors
/// It is none, or cannot be listed; [`io::ErrorKind::PermissionDenied`] if a link of another user leads to a directory that this user
/// may not list.
pub fn list(directory: &Path) -> io::Result<impl Iterator<Item = io::Result<PathBuf>> + use<>> {
    let base = directory.to_owned();
    Ok(walk::list(directory)?.map(move |name| Ok(base.join(name?))))
}

/// The absolute path of a file or a directory without symbolic links.
///
/// # Errors
/// There is none; [`io::ErrorKind::PermissionDenied`] if a link of another user leads where this user may not go.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    walk::real_path(path)
}

/// Whether a file that begins with these bytes is a pointer of Git LFS: a few lines that Git writes in place of a large file that it did
/// not fetch. Source: <https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>.
pub fn is_lfs_pointer(beginning: &[u8]) -> bool {
    beginning.starts_with(b"version https://git-lfs")
}

/// Reads a whole regular file of at most `max_bytes`.
///
/// # Errors
/// Errors of [`open`] and of reading; [`io::ErrorKind::FileTooLarge`] for a longer file.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let too_long = || {
        let reason = format!("expected at most {max_bytes} bytes, got more");
        io::Error::new(io::ErrorKind::FileTooLarge, reason)
    };
    if length > max_bytes {
        return Err(too_long());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    // A file may grow while it is read.
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes { Err(too_long()) } else { Ok(bytes) }
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] for a text that is not UTF-8.
pub fn read_to_string(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8: {}", error.utf8_error())))
}

fn expect_regular(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a regular file, got {}", name_of(kind))))
}

fn name_of(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_block_device() || kind.is_char_device() {
            return "a device";
        }
    }
    if kind.is_dir() { "a directory" } else { "something else" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[cfg(unix)]
    #[test]
    fn a_pipe_a_device_and_a_directory_are_errors_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        let cases = [
            (pipe.as_path(), "a pipe"),
            (Path::new("/dev/zero"), "a device"),
            (&link, "a device"),
            (directory.path(), "a directory"),
        ];
        for (path, expected) in cases {
            for error in [open(path).unwrap_err(), read(path, 10).unwrap_err(), read_to_string(path, 10).unwrap_err()] {
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
                assert!(error.to_string().contains(expected), "{error}");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_file_is_that_file_and_a_loop_is_the_systems_error() {
        let directory = tempfile::tempdir().unwrap();
        let [file, link, circle] = ["file", "link", "circle"].map(|name| directory.path().join(name));
        fs::write(&file, "text").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::symlink(&circle, &circle).unwrap();
        assert_eq!(read_to_string(&link, 4).unwrap(), "text");
        let error = read(&circle, 4).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()), "{error}");
        assert_eq!(read(&directory.path().join("absent"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn no_more_is_read_than_the_caller_allows() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(read(&path, 1 << 20).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        file.set_len(5).unwrap();
        assert_eq!(read(&path, 5).unwrap(), [0; 5]);
        assert_eq!(read(&path, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn text_that_is_not_utf8_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, [b'a', 0xff]).unwrap();
        assert_eq!(read_to_string(&path, 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
