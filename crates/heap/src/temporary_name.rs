//! Unique names for files that are not finished yet, or that are to have no name.
//!
//! Invariant: a file under such a name is new. The name never stands for an existing file or link.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

/// Temporary names of this program begin with this, and no other program's names do. 16 hexadecimal digits follow.
pub const TEMPORARY_PREFIX: &str = ".train_low_mem-tmp-";

/// The most names that are tried. Each is drawn at random, so that two names are the same only by intent.
const TRIES: usize = 64;

/// Makes a file or directory in `parent` under a new temporary name, which ends with the parts of `ending`. `make` must fail with
/// [`io::ErrorKind::AlreadyExists`] if a name is taken.
///
/// # Errors
/// Those of `make`.
pub fn with_temporary_name<T>(
    parent: &Path,
    ending: &[&OsStr],
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    for _ in 0..TRIES {
        // Keys of the system's random source: a clock or a process id would repeat in containers.
        let mut name = OsString::from(format!("{TEMPORARY_PREFIX}{:016x}", RandomState::new().build_hasher().finish()));
        ending.iter().for_each(|part| name.push(part));
        let path = parent.join(name);
        match make(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((path, made?)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Creates a new file for writing. Never follows a symbolic link.
///
/// # Errors
/// The name is taken, or the file cannot be made.
pub fn create_new(path: &Path) -> io::Result<File> {
    create(path, File::options().write(true))
}

/// Creates a new file for reading and writing that only its owner may open.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    create(path, &mut options)
}

fn create(path: &Path, options: &mut std::fs::OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    options.create_new(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_there_already_is_not_opened_even_if_it_is_a_link() {
        let make = |path: &Path| std::fs::create_dir(path);
        let (directory, ()) = with_temporary_name(&std::env::temp_dir(), &[], make).unwrap();
        let (precious, link) = (directory.join("precious"), directory.join("link"));
        std::fs::write(&precious, "my only copy").unwrap();
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        for (path, make) in
            [(&precious, create_new as fn(&Path) -> io::Result<File>), (&link, create_new), (&link, create_private)]
        {
            assert_eq!(make(path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        }
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(directory.join("nothing"), &link).unwrap();
        assert!(create_new(&link).is_err(), "nothing is made where a dangling link leads");
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "my only copy");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
