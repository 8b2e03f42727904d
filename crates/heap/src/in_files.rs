//! Blocks that lie in a file: pages of a shared mapping. They are resident while they are used. A caller that will not use them for a while
//! has them leave memory; the file keeps their contents.
//!
//! The disk sets room aside for the whole file before the first block. So a full disk is an error at that time, and not a signal when a
//! page is written. [`sigbus`] handles a file that loses its pages nevertheless.
//!
//! A file that exists already, such as a file of weights, can be mapped for reading: its blocks lie where its values lie.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ahead;
use crate::anonymous_file::{anonymous_file, shown_path};
use crate::page::{self, IS_SUPPORTED, LARGE_BYTES, PAGE_BYTES, whole_pages};
use crate::pages;
use crate::sigbus;
use crate::waiting::counting_wait;

/// Room for large blocks in a file without a name.
#[derive(Debug)]
pub struct FileMemory {
    mapping: Arc<Mapping>,
    /// The offset of the next block. For a file that is only read, its end: a caller names the place of each block.
    end: AtomicUsize,
}

/// A file, and all of it as memory. It lives as long as any block in it.
#[derive(Debug)]
struct Mapping {
    file: File,
    /// The address; unspecified if the file has no bytes.
    start: usize,
    bytes: usize,
    access: system::Access,
    watch: Option<sigbus::Watch>,
}

thread_local! {
    /// The file of this thread's next large blocks; null for memory.
    static WHERE: Cell<*const FileMemory> = const { Cell::new(std::ptr::null()) };

    /// The place of this thread's next large block in a file that is only read: offset and bytes.
    static PLACE: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

impl FileMemory {
    /// Room for blocks of `sizes` bytes in a file in `directory`, which no other process can see.
    ///
    /// # Errors
    /// The file cannot be made, or the disk or the process's addresses have no room for it.
    pub fn create(directory: &Path, sizes: impl Iterator<Item = usize>) -> io::Result<FileMemory> {
        let file = anonymous_file(directory)?;
        let mut large = sizes.filter(|&size| size >= LARGE_BYTES && IS_SUPPORTED);
        let bytes = large.try_fold(0usize, |sum, size| sum.checked_add(whole_pages(size)?));
        let bytes = bytes.ok_or(io::ErrorKind::FileTooLarge)?;
        reserve(&file, bytes as u64)?;
        let mapping = Arc::new(Mapping::new(file, bytes, &shown_path(directory), system::Access::Change)?);
        Ok(FileMemory { mapping, end: AtomicUsize::new(0) })
    }

    /// Maps all of an existing file, to be read in place ([`FileMemory::block_at`]). `path` is for messages.
    ///
    /// The system shows the file's contents of that time, so nothing should write to the file while it is mapped. A file that is shortened
    /// ends the process as [`exit_on_sigbus`](crate::exit_on_sigbus) describes.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub fn of_file(file: File, path: &Path) -> io::Result<FileMemory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mapping = Arc::new(Mapping::new(file, bytes, path, system::Access::Read)?);
        Ok(FileMemory { mapping, end: AtomicUsize::new(bytes) })
    }

    /// Returns a vector without elements whose capacity, `count` elements, is the file's bytes from `offset` on. It must not be written to:
    /// the system would kill the process. `None` if [`Allocator`](crate::Allocator) is not the program's allocator, or if the place cannot
    /// be a block: too small, outside of the file, not aligned for the elements, or in use.
    pub fn block_at<T>(&self, offset: usize, count: usize) -> Option<Vec<T>> {
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| bytes >= LARGE_BYTES)?;
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.mapping.bytes);
        if self.mapping.access != system::Access::Read || !is_inside || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        PLACE.set(Some((offset, bytes)));
        let block = self.allocating(|| Vec::<T>::with_capacity(count));
        PLACE.set(None);
        let is_there = block.as_ptr().addr() == self.mapping.start + offset && block.capacity() == count;
        is_there.then_some(block)
    }

    /// Calls `f`. Large blocks that `f` allocates on this thread lie in the file for as long as they live, if
    /// [`Allocator`](crate::Allocator) is the program's allocator and the file has room.
    pub fn allocating<R>(&self, f: impl FnOnce() -> R) -> R {
        /// Restores the previous value when `f` ends or panics.
        struct Before(*const FileMemory);
        impl Drop for Before {
            fn drop(&mut self) {
                WHERE.set(self.0);
            }
        }
        let _before = Before(WHERE.replace(self));
        f()
    }

    /// Returns the next `bytes` bytes of the file, which are whole pages of zeros, as memory, and their place.
    fn take(&self, bytes: usize) -> Option<(*mut u8, InFile)> {
        if let Some((offset, exactly)) = PLACE.take().filter(|_| self.mapping.access == system::Access::Read) {
            let mapping = Arc::clone(&self.mapping);
            let place = InFile { mapping, offset, bytes: exactly, is_counted: false };
            let block = std::ptr::with_exposed_provenance_mut(self.mapping.start + offset);
            return (whole_pages(exactly) == Some(bytes)).then_some((block, place));
        }
        let offset = self.end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |end| {
            end.checked_add(bytes).filter(|&end| end <= self.mapping.bytes)
        });
        let mapping = Arc::clone(&self.mapping);
        let place = InFile { mapping, offset: offset.ok()?, bytes, is_counted: false };
        Some((std::ptr::with_exposed_provenance_mut(self.mapping.start + place.offset), place))
    }
}

impl Mapping {
    fn new(file: File, bytes: usize, path: &Path, access: system::Access) -> io::Result<Mapping> {
        let start = if bytes == 0 { 0 } else { system::map(&file, bytes, access)? };
        let watch = (bytes > 0).then(|| sigbus::watch(start..start + bytes, path));
        Ok(Mapping { file, start, bytes, access, watch })
    }

    /// Returns an error if the file is shorter than it was made. Writing to such a file would make it longer again, with zeros in
    /// place of the lost bytes.
    fn check_length(&self) -> io::Result<()> {
        match self.file.metadata()?.len() {
            len if len < self.bytes as u64 => {
                let problem = format!("the file was shortened from {} to {len} bytes", self.bytes);
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses can be reused.
        self.watch = None;
        if self.bytes > 0 {
            // SAFETY: this mapping has these addresses. Every block and every extent of it holds an `Arc` of this, so none is left.
            unsafe { page::system::unmap(self.start, self.bytes) };
        }
    }
}

/// A place in a file that a block lies in.
#[derive(Clone, Debug)]
struct InFile {
    mapping: Arc<Mapping>,
    offset: usize,
    /// Whole pages, except in a file that is only read.
    bytes: usize,
    /// Whether the block counts as live, because it was made resident.
    is_counted: bool,
}

impl InFile {
    /// Gives the pages of an unused block back. No other block will lie there.
    fn free(self) {
        let InFile { mapping, offset, bytes, is_counted } = self;
        system::page_out(Extent { mapping, offset, bytes, elements: PhantomData }.pages());
        if is_counted {
            pages::leave(bytes);
        }
    }

    /// Returns the part of the block, which begins at `block`, that holds `elements`. `None` if they are not in the block.
    fn part<'a>(&self, block: usize, elements: &'a [u8]) -> Option<Extent<'a>> {
        let (skip, bytes) = (elements.as_ptr().addr().checked_sub(block)?, elements.len());
        let is_inside = skip.checked_add(bytes)? <= self.bytes;
        let mapping = Arc::clone(&self.mapping);
        is_inside.then_some(Extent { mapping, offset: self.offset + skip, bytes, elements: PhantomData })
    }
}

/// Blocks by address, and their places in files. They count as live while they are known to be resident.
// The map's nodes are allocated while it is locked; they are small, so they come from mimalloc and never ask for this lock again.
static BLOCKS: Mutex<BTreeMap<usize, InFile>> = Mutex::new(BTreeMap::new());

/// Whether any block was ever in a file. Most runs have none, and need no look-up.
static HAS_BLOCKS: AtomicBool = AtomicBool::new(false);

fn blocks() -> MutexGuard<'static, BTreeMap<usize, InFile>> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a block of `bytes` bytes, which are whole pages of zeros, in the file of this thread's blocks, if the file has room.
pub(crate) fn allocate(bytes: usize) -> Option<*mut u8> {
    let memory = WHERE.get();
    // SAFETY: the pointer is set only during `allocating`, on this thread, which borrows its target.
    let (block, place) = unsafe { memory.as_ref() }?.take(bytes)?;
    HAS_BLOCKS.store(true, Ordering::Relaxed);
    let (start, mut blocks) = (block.expose_provenance(), blocks());
    // A place of a file that is only read could be asked for twice.
    let before = blocks.range(..start + place.bytes).next_back();
    if before.is_some_and(|(other, there)| other + there.bytes > start) {
        return None;
    }
    blocks.insert(start, place);
    Some(block)
}

/// Gives back the pages of an unused block; returns false if it lies in no file.
pub(crate) fn free(block: *mut u8) -> bool {
    if !HAS_BLOCKS.load(Ordering::Relaxed) {
        return false;
    }
    let place = blocks().remove(&block.addr());
    place.map(InFile::free).is_some()
}

/// Has the disk set aside room for the file, and gives the file its length.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Err(Errno::INTR) => {}
            // Some file systems cannot.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return write_zeros(file, bytes),
            result => return Ok(result?),
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    write_zeros(file, bytes)
}

/// Writes `bytes` zeros and waits for the disk. A sparse file would take its room page by page, as pages are used, and a full disk would
/// then be a signal.
fn write_zeros(mut file: &File, bytes: u64) -> io::Result<()> {
    use io::Write;
    let zeros = vec![0; PIECE_BYTES.min(bytes as usize)];
    let mut left = bytes;
    while left > 0 {
        let piece = left.min(zeros.len() as u64);
        file.write_all(&zeros[..piece as usize])?;
        // As in `ExtentMut::write`: there may be no memory for bytes that are not on the disk yet.
        file.sync_data()?;
        left -= piece;
    }
    Ok(())
}

/// Bytes that are read ahead at a time, or written before each wait for the disk: whole pages.
const PIECE_BYTES: usize = 4 << 20;

/// Borrowed bytes that lie in a file, and their place in the file.
///
/// The borrow keeps the block alive and unchanged for as long as this lives.
#[derive(Debug)]
pub struct Extent<'a> {
    mapping: Arc<Mapping>,
    offset: usize,
    bytes: usize,
    elements: PhantomData<&'a [u8]>,
}

impl<'a> Extent<'a> {
    /// Returns the place of the elements if they lie in a file. They may be a part of a block.
    pub fn find(elements: &'a [u8]) -> Option<Extent<'a>> {
        if !HAS_BLOCKS.load(Ordering::Relaxed) {
            return None;
        }
        let blocks = blocks();
        let (&block, place) = blocks.range(..=elements.as_ptr().addr()).next_back()?;
        place.part(block, elements)
    }

    /// Returns the number of bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the part of `bytes` bytes from byte `start` on. `None` if the extent ends before that.
    pub fn part(&self, start: usize, bytes: usize) -> Option<Extent<'a>> {
        let is_inside = start.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let mapping = Arc::clone(&self.mapping);
        is_inside.then_some(Extent { mapping, offset: self.offset + start, bytes, elements: PhantomData })
    }

    /// Has the system read the bytes that are not in its page cache, without waiting.
    pub fn read_ahead(&self) {
        let (pages, mapping) = (self.pages(), Arc::clone(&self.mapping));
        ahead::request(move || {
            // The mapping lives until all reads were requested.
            let (_mapping, (start, bytes)) = (mapping, pages);
            for first in (0..bytes).step_by(PIECE_BYTES) {
                system::read_ahead((start + first, PIECE_BYTES.min(bytes - first)));
            }
        });
    }

    /// Makes all pages resident: at once if the system can, or by touching each.
    pub fn page_in(&self) {
        if let Some(bytes) = self.count(true) {
            pages::enter(bytes);
        }
        counting_wait(|| {
            if !system::page_in(self.pages()) {
                self.touch();
            }
        });
    }

    /// Removes all pages from the resident set. Their contents stay in the system's page cache, or are read from the disk again.
    pub fn page_out(&self) {
        system::page_out(self.pages_around());
        if let Some(bytes) = self.count(false) {
            pages::leave(bytes);
        }
    }

    /// Notes whether the block is counted, and returns its bytes if that is a change. A part of a block stands for all of it.
    fn count(&self, is_counted: bool) -> Option<usize> {
        let mut blocks = blocks();
        let (_, place) = blocks.range_mut(..=self.mapping.start + self.offset).next_back()?;
        (std::mem::replace(&mut place.is_counted, is_counted) != is_counted).then_some(place.bytes)
    }

    /// Reads the elements without making their pages resident.
    ///
    /// # Panics
    /// If `bytes` has another length than the elements.
    ///
    /// # Errors
    /// The file was shortened, or its disk failed.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        counting_wait(|| self.read_untimed(bytes))
    }

    /// [`Extent::read`] for one of several threads. It counts no time: the caller counts once for all threads ([`crate::count_waits`]).
    ///
    /// # Panics
    /// As [`Extent::read`].
    ///
    /// # Errors
    /// As [`Extent::read`].
    pub fn read_untimed(&self, bytes: &mut [u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), self.bytes, "bytes to read into");
        self.mapping.check_length()?;
        system::read(&self.mapping.file, self.offset as u64, bytes).or_else(|error| match error.kind() {
            // The file was shortened meanwhile.
            io::ErrorKind::UnexpectedEof => self.mapping.check_length().and(Err(error)),
            _ => Err(error),
        })
    }

    /// Returns the address and bytes of the pages that the elements lie on. Advice about a neighbour's pages does no harm.
    fn pages(&self) -> (usize, usize) {
        let first = self.offset / PAGE_BYTES * PAGE_BYTES;
        let end = (self.offset + self.bytes).next_multiple_of(PAGE_BYTES);
        (self.mapping.start + first, end - first)
    }

    /// Returns the address and bytes of these pages, with neighbours that may have been mapped with them: the system maps whole pieces of
    /// its page cache.
    fn pages_around(&self) -> (usize, usize) {
        const PIECE: usize = 2 << 20;
        let ((start, bytes), mapping) = (self.pages(), &self.mapping);
        let end = mapping.start + mapping.bytes.next_multiple_of(PAGE_BYTES);
        let first = (start / PIECE * PIECE).max(mapping.start);
        (first, (start + bytes).next_multiple_of(PIECE).min(end) - first)
    }

    fn touch(&self) {
        const SMALLEST_PAGE: usize = 4 << 10;
        for byte in (0..self.bytes).step_by(SMALLEST_PAGE).chain(self.bytes.checked_sub(1)) {
            let byte = std::ptr::with_exposed_provenance::<u8>(self.mapping.start + self.offset + byte);
            // SAFETY: it is one of the elements' bytes, which are mapped and borrowed.
            unsafe { byte.read_volatile() };
        }
    }
}

/// Like [`Extent`], for bytes that no other code reads or writes while this lives, so they may be changed in the file.
#[derive(Debug)]
pub struct ExtentMut<'a>(Extent<'a>, PhantomData<&'a mut [u8]>);

impl<'a> ExtentMut<'a> {
    /// Returns the place of the elements if they lie in a file. Any bytes must be valid values of the elements.
    pub fn find(elements: &'a mut [u8]) -> Option<ExtentMut<'a>> {
        // The system will write to the same memory without the compiler's knowledge.
        let _ = elements.as_mut_ptr().expose_provenance();
        Extent::find(elements).map(|extent| ExtentMut(extent, PhantomData))
    }

    /// Replaces the elements without making their pages resident. With `waits`, waits for the disk piece by piece.
    /// # Panics
    /// If `bytes` has another length than the elements.
    ///
    /// # Errors
    /// The file was shortened, or its disk failed.
    pub fn write(&mut self, bytes: &[u8], waits: bool) -> io::Result<()> {
        let ExtentMut(Extent { mapping, offset, bytes: expected, .. }, _) = self;
        assert_eq!(bytes.len(), *expected, "bytes to write");
        for (number, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
            let offset = *offset + number * PIECE_BYTES;
            mapping.check_length()?;
            counting_wait(|| {
                system::write(&mapping.file, offset as u64, piece)?;
                let first = offset / PAGE_BYTES * PAGE_BYTES;
                if waits { system::write_back(mapping.start + first, offset + piece.len() - first) } else { Ok(()) }
            })?;
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

    /// The purpose of a mapping.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Access {
        /// To change a file of this process's own.
        Change,
        /// To read a file that other processes know.
        Read,
    }

    /// Maps the file's first bytes, and returns the address.
    pub(crate) fn map(file: &File, bytes: usize, access: Access) -> io::Result<usize> {
        let (access, flags) = match access {
            Access::Change => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED),
            Access::Read => (ProtFlags::READ, MapFlags::PRIVATE),
        };
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory. A file that is changed has no name: only
        // this process writes to it, and only where its bytes are not borrowed. A file that is read holds numbers, and every pattern of
        // bits is a number. Another process that writes to it meanwhile changes the numbers, and nothing else.
        let mapped = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) };
        Ok(mapped?.expose_provenance())
    }

    /// Advises the system about pages of a mapping, and returns whether it took the advice. Ignored advice costs time or memory, nothing
    /// else.
    fn advise((start, bytes): (usize, usize), advice: Advice) -> bool {
        // SAFETY: none of the advice given here changes the contents of a file's pages: mappings are shared, or never written to.
        unsafe { madvise(std::ptr::with_exposed_provenance_mut::<c_void>(start), bytes, advice) }.is_ok()
    }

    pub(crate) fn read_ahead(pages: (usize, usize)) {
        advise(pages, Advice::WillNeed);
    }

    /// Linux has this since 5.14.
    #[cfg(target_os = "linux")]
    pub(crate) fn page_in(pages: (usize, usize)) -> bool {
        advise(pages, Advice::LinuxPopulateRead)
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn page_in(_: (usize, usize)) -> bool {
        false
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn page_out(pages: (usize, usize)) {
        advise(pages, Advice::LinuxDontNeed);
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn page_out(_: (usize, usize)) {}

    /// Waits until bytes written to pages of a mapping are on the disk.
    pub(crate) fn write_back(start: usize, bytes: usize) -> io::Result<()> {
        // SAFETY: the contents of the pages do not change.
        Ok(unsafe { msync(std::ptr::with_exposed_provenance_mut::<c_void>(start), bytes, MsyncFlags::SYNC) }?)
    }

    pub(crate) fn read(file: &File, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        file.read_exact_at(bytes, start)
    }

    pub(crate) fn write(file: &File, start: u64, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, start)
    }
}

#[cfg(not(all(unix, target_pointer_width = "64")))]
mod system {
    use std::fs::File;
    use std::io;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Access {
        Change,
        Read,
    }

    pub(crate) fn map(_: &File, _: usize, _: Access) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn read_ahead(_: (usize, usize)) {}

    pub(crate) fn page_in(_: (usize, usize)) -> bool {
        false
    }

    pub(crate) fn page_out(_: (usize, usize)) {}

    pub(crate) fn write_back(_: usize, _: usize) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn read(_: &File, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn write(_: &File, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_reserved_is_written_in_full() {
        let file = anonymous_file(&std::env::temp_dir()).unwrap();
        let bytes = 2 * PIECE_BYTES as u64 + 5;
        write_zeros(&file, bytes).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), bytes);
        #[cfg(unix)]
        assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 >= bytes, "the disk has set it all aside");
    }

    #[test]
    fn sizes_that_no_file_can_have_are_an_error() {
        let sizes = [isize::MAX as usize, isize::MAX as usize, 2 << 20, usize::MAX];
        for sizes in [&sizes[..1], &sizes[..3], &sizes[3..]] {
            assert!(FileMemory::create(&std::env::temp_dir(), sizes.iter().copied()).is_err(), "{sizes:?}");
        }
    }

    #[test]
    fn only_what_lies_inside_of_a_block_is_a_part_of_it() {
        let memory = FileMemory::create(&std::env::temp_dir(), [2 * LARGE_BYTES].into_iter()).unwrap();
        let Some((block, place)) = memory.take(2 * LARGE_BYTES) else { return };
        // SAFETY: pages of zeros that nothing else uses.
        let bytes = unsafe { std::slice::from_raw_parts(block.cast_const(), 2 * LARGE_BYTES) };
        let at = block.addr();
        let extent = place.part(at, &bytes[5000..5007]).unwrap();
        assert_eq!((extent.offset, extent.bytes), (5000, 7));
        assert!(place.part(at, &bytes[1..]).is_some());
        assert!(place.part(at + 1, bytes).is_none(), "it begins before the block");
        assert!(place.part(at - 1, bytes).is_none(), "it ends behind the block");
        assert!(memory.take(1).is_none(), "the file is full");
    }
}
