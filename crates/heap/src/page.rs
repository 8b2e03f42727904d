//! Pages: their size, the blocks that are made of them, and the calls that map and unmap them.

/// Blocks of at least this size are pages of their own.
///
/// mimalloc keeps a page of 512 KiB to 4 MiB for every size class and thread above 10 KiB. Tensors of short samples have as many sizes as
/// samples have lengths, so mimalloc would keep more than is used. `docs/LOG.md` has numbers.
pub const LARGE_BYTES: usize = 16 << 10;

/// Whether this system has pages that can be mapped; elsewhere every block is mimalloc's.
pub(crate) const IS_SUPPORTED: bool = cfg!(all(unix, target_pointer_width = "64"));

/// Blocks are multiples of this: the page of x86-64, and the largest page of other machines.
pub(crate) const PAGE_BYTES: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };

/// `size` rounded up to whole pages; `None` on overflow.
pub(crate) fn whole_pages(size: usize) -> Option<usize> {
    size.checked_next_multiple_of(PAGE_BYTES)
}

/// Whether blocks of these sizes take the same number of pages.
pub(crate) fn is_same_block(size: usize, new_size: usize) -> bool {
    whole_pages(size) == whole_pages(new_size)
}

#[cfg(all(unix, target_pointer_width = "64"))]
pub(crate) mod system {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// Fresh pages of zeros, or null.
    pub(crate) fn map(bytes: usize) -> *mut u8 {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address that the kernel chooses touches no other memory.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        mapped.map_or(std::ptr::null_mut(), <*mut _>::cast)
    }

    /// # Safety
    /// The range was mapped by this process, and nothing uses it any more.
    pub(crate) unsafe fn unmap(start: usize, bytes: usize) {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: by the caller's promise. The call fails only if the kernel cannot split a mapping any further; then the pages stay mapped
        // and unused.
        let _ = unsafe { munmap(start, bytes) };
    }
}

#[cfg(not(all(unix, target_pointer_width = "64")))]
pub(crate) mod system {
    pub(crate) fn map(_: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    /// # Safety
    /// None: nothing was mapped.
    pub(crate) unsafe fn unmap(_: usize, _: usize) {}
}
