//! The system calls that touch files: their numbers, their names, and the arguments that name the file.

/// The arguments that name a call's file, and the argument with its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A path.
    Path,
    /// A directory and a path.
    At,
    /// A text, a directory and a path: `symlinkat`.
    TextAt,
    /// Two paths.
    TwoPaths,
    /// A directory and a path, twice.
    TwoAt,
    /// An open file.
    File,
    /// Two open files: the first and the second argument, or the first and the third.
    TwoFiles(usize),
    /// An open file, a buffer and its length; reads the file.
    Read,
    /// An open file, a buffer and its length; writes the file.
    Write,
    /// An open file, a list of buffers and their number; reads the file.
    ReadVector,
    /// An open file, a list of buffers and their number; writes the file.
    WriteVector,
    /// `mmap`: the fifth argument is an open file.
    Map,
    /// `msync`: an address in a mapping.
    Address,
}

/// A system call.
#[derive(Debug)]
pub struct Call {
    /// The number on this architecture.
    pub number: i64,
    /// The call's name.
    pub name: &'static str,
    /// The arguments that name its file.
    pub shape: Shape,
}

const fn call(number: i64, name: &'static str, shape: Shape) -> Call {
    Call { number, name, shape }
}

/// Every call that is counted.
#[cfg(target_arch = "x86_64")]
pub const CALLS: &[&[Call]] = &[EVERYWHERE, OLDER];
/// Every call that is counted.
#[cfg(not(target_arch = "x86_64"))]
pub const CALLS: &[&[Call]] = &[EVERYWHERE];

const EVERYWHERE: &[Call] = &[
    call(libc::SYS_openat, "openat", Shape::At),
    call(libc::SYS_openat2, "openat2", Shape::At),
    call(libc::SYS_read, "read", Shape::Read),
    call(libc::SYS_pread64, "pread", Shape::Read),
    call(libc::SYS_readv, "readv", Shape::ReadVector),
    call(libc::SYS_preadv, "preadv", Shape::ReadVector),
    call(libc::SYS_preadv2, "preadv2", Shape::ReadVector),
    call(libc::SYS_write, "write", Shape::Write),
    call(libc::SYS_pwrite64, "pwrite", Shape::Write),
    call(libc::SYS_writev, "writev", Shape::WriteVector),
    call(libc::SYS_pwritev, "pwritev", Shape::WriteVector),
    call(libc::SYS_pwritev2, "pwritev2", Shape::WriteVector),
    call(libc::SYS_copy_file_range, "copy_file_range", Shape::TwoFiles(2)),
    call(libc::SYS_sendfile, "sendfile", Shape::TwoFiles(1)),
    call(libc::SYS_renameat2, "renameat2", Shape::TwoAt),
    call(libc::SYS_unlinkat, "unlinkat", Shape::At),
    call(libc::SYS_mkdirat, "mkdirat", Shape::At),
    call(libc::SYS_mknodat, "mknodat", Shape::At),
    call(libc::SYS_linkat, "linkat", Shape::TwoAt),
    call(libc::SYS_symlinkat, "symlinkat", Shape::TextAt),
    call(libc::SYS_fsync, "fsync", Shape::File),
    call(libc::SYS_fdatasync, "fdatasync", Shape::File),
    call(libc::SYS_syncfs, "syncfs", Shape::File),
    call(libc::SYS_sync_file_range, "sync_file_range", Shape::File),
    call(libc::SYS_ftruncate, "ftruncate", Shape::File),
    call(libc::SYS_truncate, "truncate", Shape::Path),
    call(libc::SYS_fallocate, "fallocate", Shape::File),
    call(libc::SYS_mmap, "mmap", Shape::Map),
    call(libc::SYS_msync, "msync", Shape::Address),
    call(libc::SYS_newfstatat, "fstatat", Shape::At),
    call(libc::SYS_fstat, "fstat", Shape::File),
    call(libc::SYS_statx, "statx", Shape::At),
    call(libc::SYS_statfs, "statfs", Shape::Path),
    call(libc::SYS_fstatfs, "fstatfs", Shape::File),
    call(libc::SYS_faccessat, "faccessat", Shape::At),
    call(libc::SYS_faccessat2, "faccessat2", Shape::At),
    call(libc::SYS_readlinkat, "readlinkat", Shape::At),
    call(libc::SYS_getdents64, "getdents", Shape::File),
    call(libc::SYS_flock, "flock", Shape::File),
    call(libc::SYS_fchmod, "fchmod", Shape::File),
    call(libc::SYS_fchmodat, "fchmodat", Shape::At),
    call(libc::SYS_utimensat, "utimensat", Shape::At),
];

/// Calls that newer architectures have only in the `at` form.
#[cfg(target_arch = "x86_64")]
const OLDER: &[Call] = &[
    call(libc::SYS_open, "open", Shape::Path),
    call(libc::SYS_creat, "creat", Shape::Path),
    call(libc::SYS_rename, "rename", Shape::TwoPaths),
    call(libc::SYS_renameat, "renameat", Shape::TwoAt),
    call(libc::SYS_unlink, "unlink", Shape::Path),
    call(libc::SYS_rmdir, "rmdir", Shape::Path),
    call(libc::SYS_mkdir, "mkdir", Shape::Path),
    call(libc::SYS_mknod, "mknod", Shape::Path),
    call(libc::SYS_link, "link", Shape::TwoPaths),
    call(libc::SYS_symlink, "symlink", Shape::TwoPaths),
    call(libc::SYS_stat, "stat", Shape::Path),
    call(libc::SYS_lstat, "lstat", Shape::Path),
    call(libc::SYS_access, "access", Shape::Path),
    call(libc::SYS_readlink, "readlink", Shape::Path),
    call(libc::SYS_chmod, "chmod", Shape::Path),
];

/// All calls, in one sequence.
pub fn all() -> impl Iterator<Item = &'static Call> {
    CALLS.iter().copied().flatten()
}
