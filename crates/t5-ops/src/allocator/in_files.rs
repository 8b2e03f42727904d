//! Blocks that lie in a file: pages of a shared mapping. They are resident while they are used, and whoever knows that
//! they will not be for a while has them leave memory; the file keeps what they hold.
//!
//! The file has its full length before the first block, so that a full disk is an error then, and not a signal
//! when a page is written.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{LARGE_BYTES, pages};
use crate::nameless_file::file_without_name;

/// Room for large blocks in a file without a name.
#[derive(Debug)]
pub struct FileMemory {
    file: Arc<File>,
    bytes: usize,
    end: AtomicUsize,
}

thread_local! {
    /// Where this thread's next large blocks lie, if not in memory.
    static WHERE: Cell<*const FileMemory> = const { Cell::new(std::ptr::null()) };
}

impl FileMemory {
    /// Room for blocks of `sizes` bytes in a file in `directory`, where nobody else can see it.
    ///
    /// # Errors
    /// The file cannot be made, or the disk has no room for it.
    pub fn create(directory: &Path, sizes: impl Iterator<Item = usize>) -> io::Result<FileMemory> {
        let file = file_without_name(directory)?;
        let large = sizes.filter(|&size| size >= LARGE_BYTES).filter_map(pages::whole_pages);
        let bytes = large.sum();
        reserve(&file, bytes as u64)?;
        Ok(FileMemory { file: Arc::new(file), bytes, end: AtomicUsize::new(0) })
    }

    /// Calls `f`. Large blocks that it allocates on this thread lie in the file for as long as they live, where
    /// [`Allocator`](super::Allocator) is the program's, and the file has room.
    pub fn allocating<R>(&self, f: impl FnOnce() -> R) -> R {
        /// Sets back what was set before, however `f` ends.
        struct Before(*const FileMemory);
        impl Drop for Before {
            fn drop(&mut self) {
                WHERE.set(self.0);
            }
        }
        let _before = Before(WHERE.replace(self));
        f()
    }

    /// The next `bytes` bytes of the file, which are whole pages of zeros, as memory; and where they are.
    fn take(&self, bytes: usize) -> Option<(*mut u8, InFile)> {
        let start = self.end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |end| {
            Some(end + bytes).filter(|&end| end <= self.bytes)
        });
        let start = start.ok()?;
        let block = system::map(&self.file, start, bytes);
        (!block.is_null()).then(|| (block, InFile { file: Arc::clone(&self.file), start: start as u64, bytes }))
    }
}

/// A place in a file that a block lies in.
#[derive(Clone, Debug)]
pub(super) struct InFile {
    file: Arc<File>,
    start: u64,
    /// Whole pages.
    pub(super) bytes: usize,
}

/// A block of `bytes` bytes in the file that this thread's blocks lie in.
pub(super) fn take(bytes: usize) -> Option<(*mut u8, InFile)> {
    let memory = WHERE.get();
    // SAFETY: it is set only while `allocating`, on this thread, borrows what it points to.
    unsafe { memory.as_ref() }?.take(bytes)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        // Not every file system can.
        Err(Errno::OPNOTSUPP) => file.set_len(bytes),
        result => Ok(result?),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)
}

/// Bytes that are written before they are waited for, where anything is: whole pages.
const PIECE_BYTES: usize = 4 << 20;

/// The pages of a block in a file.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    pub(super) start: usize,
    pub(super) place: InFile,
}

impl Stretch {
    /// The pages of the block that begins at `address`, if it lies in a file.
    pub(crate) fn at(address: usize) -> Option<Stretch> {
        pages::in_file(address)
    }

    /// Has the system read what is not in its page cache, without waiting for it.
    pub(crate) fn read_ahead(&self) {
        system::read_ahead(self);
    }

    /// Makes all pages resident: at once where the system can, or by touching each.
    pub(crate) fn page_in(&self) {
        system::page_in(self);
    }

    /// Has all pages leave the resident set. What they hold stays in the system's page cache, or comes back from the disk.
    pub(crate) fn page_out(&self) {
        system::page_out(self);
    }

    /// Reads the block's first bytes without making its pages resident.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        system::read(&self.place.file, self.place.start, bytes)
    }

    /// Writes the block's first bytes without making its pages resident. If asked to, waits for the disk piece by piece.
    pub(crate) fn write(&self, bytes: &[u8], waits: bool) -> io::Result<()> {
        for (number, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
            let offset = number * PIECE_BYTES;
            system::write(&self.place.file, self.place.start + offset as u64, piece)?;
            if waits {
                system::write_back(self, offset, piece.len())?;
            }
        }
        Ok(())
    }
}

#[cfg(all(unix, target_pointer_width = "64"))]
mod system {
    use std::ffi::c_void;
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, msync};

    use super::Stretch;

    /// A stretch of a file as memory, or null.
    pub(super) fn map(file: &File, start: usize, bytes: usize) -> *mut u8 {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists. Nobody else can open the
        // file, which has no name, so that nobody shortens it or writes to it.
        let mapped = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, start as u64) };
        mapped.map_or(std::ptr::null_mut(), <*mut _>::cast)
    }

    /// Whether the system took the advice: if not that costs time or memory, nothing else.
    fn advise(stretch: &Stretch, advice: Advice) -> bool {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(stretch.start);
        // SAFETY: the stretch is mapped from a file and shared; none of the advice that is given here changes what its pages
        // hold.
        unsafe { madvise(start, stretch.place.bytes, advice) }.is_ok()
    }

    pub(super) fn read_ahead(stretch: &Stretch) {
        advise(stretch, Advice::WillNeed);
    }

    #[cfg(target_os = "linux")]
    pub(super) fn page_in(stretch: &Stretch) {
        // Linux has it since 5.14.
        if !advise(stretch, Advice::LinuxPopulateRead) {
            touch(stretch);
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn page_in(stretch: &Stretch) {
        touch(stretch);
    }

    fn touch(stretch: &Stretch) {
        const SMALLEST_PAGE: usize = 4 << 10;
        for page in (0..stretch.place.bytes).step_by(SMALLEST_PAGE) {
            let first = std::ptr::with_exposed_provenance::<u8>(stretch.start + page);
            // SAFETY: the stretch is mapped, and every byte is a value of its type.
            unsafe { first.read_volatile() };
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn page_out(stretch: &Stretch) {
        advise(stretch, Advice::LinuxDontNeed);
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn page_out(_: &Stretch) {}

    /// Waits until what was written to the bytes from `offset` on is on the disk.
    pub(super) fn write_back(stretch: &Stretch, offset: usize, bytes: usize) -> io::Result<()> {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(stretch.start + offset);
        // SAFETY: the stretch is mapped; its pages keep what they hold.
        Ok(unsafe { msync(start, bytes, MsyncFlags::SYNC) }?)
    }

    pub(super) fn read(file: &File, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        file.read_exact_at(bytes, start)
    }

    pub(super) fn write(file: &File, start: u64, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, start)
    }
}

#[cfg(not(all(unix, target_pointer_width = "64")))]
mod system {
    use std::fs::File;
    use std::io;

    use super::Stretch;

    pub(super) fn map(_: &File, _: usize, _: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    pub(super) fn read_ahead(_: &Stretch) {}

    pub(super) fn page_in(_: &Stretch) {}

    pub(super) fn page_out(_: &Stretch) {}

    pub(super) fn write_back(_: &Stretch, _: usize, _: usize) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn read(_: &File, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn write(_: &File, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
