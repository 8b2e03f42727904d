//! A file without a name: only this process can use it, and it disappears however the process ends.
//!
//! If the file system can make such files (`O_TMPFILE`), the file never has a name. Otherwise it has a temporary name
//! ([`TEMPORARY_PREFIX`](crate::TEMPORARY_PREFIX)), which is removed at once.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::temporary_name::{create_private, with_temporary_name};

/// Makes a new file in `directory` to read and write. It has no name by the time it is returned.
///
/// # Errors
/// The file cannot be made, or its name cannot be removed.
pub fn anonymous_file(directory: &Path) -> io::Result<File> {
    // File systems without support return various errors, so after any error a name is tried.
    open_tmpfile(directory).or_else(|_| create_and_unlink(directory))
}

/// Returns the text for a file without a name in `directory`, in messages.
pub fn shown_path(directory: &Path) -> PathBuf {
    directory.join("<offload file>")
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_tmpfile(directory: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;

    use rustix::fs::OFlags;

    // With O_EXCL the file can never get a name later.
    let flags = (OFlags::TMPFILE | OFlags::EXCL).bits() as i32;
    File::options().read(true).write(true).mode(0o600).custom_flags(flags).open(directory)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open_tmpfile(_: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

fn create_and_unlink(directory: &Path) -> io::Result<File> {
    let (path, file) = with_temporary_name(directory, &[], create_private)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::PathBuf;

    use super::*;

    /// An empty directory, which is removed at the end.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let make = |path: &Path| std::fs::create_dir(path);
            Directory(with_temporary_name(&std::env::temp_dir(), &[name.as_ref()], make).unwrap().0)
        }

        fn names(&self) -> usize {
            std::fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_made_at_the_same_time_are_different_files_and_leave_no_names() {
        for make in [anonymous_file, create_and_unlink] {
            let directory = Directory::new("many");
            let files: Vec<File> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|_| scope.spawn(|| (0..25).map(|_| make(&directory.0).unwrap()).collect::<Vec<_>>()))
                    .collect();
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let inodes: BTreeSet<u64> = files.iter().map(|file| file.metadata().unwrap().ino()).collect();
            assert_eq!((inodes.len(), directory.names()), (200, 0));
            let (first, second) = (&files[0], &files[1]);
            first.write_all_at(b"first", 0).unwrap();
            second.write_all_at(b"other", 0).unwrap();
            let mut read = [0; 5];
            first.read_exact_at(&mut read, 0).unwrap();
            assert_eq!((&read, first.metadata().unwrap().mode() & 0o777), (b"first", 0o600));
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error_of_its_own_kind() {
        let nowhere = std::env::temp_dir().join("no-such-directory-of-files");
        assert_eq!(anonymous_file(&nowhere).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
