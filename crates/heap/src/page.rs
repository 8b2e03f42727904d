//! Pages: how large they are, which blocks are made of them, and how they come from the system and go back.

/// Blocks from this size on are pages of their own.
///
/// mimalloc keeps a page of 512 KiB to 4 MiB for every size class and thread above 10 KiB; tensors of short samples lie
/// there in as many sizes as samples have lengths, and what is kept then exceeds what is used. `docs/LOG.md` has numbers.
pub const LARGE_BYTES: usize = 16 << 10;

/// Whether this system has pages that can be mapped; elsewhere every block is mimalloc's.
pub(crate) const IS_SUPPORTED: bool = cfg!(all(unix, target_pointer_width = "64"));

/// Blocks are multiples of this: x86-64's page, and the largest page of the other machines.
pub(crate) const PAGE_BYTES: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };

/// `size` rounded up to whole pages; nothing where that would overflow.
pub(crate) fn whole_pages(size: usize) -> Option<usize> {
    size.checked_next_multiple_of(PAGE_BYTES)
}

/// Whether blocks of these sizes have the same pages.
pub(crate) fn is_same_block(size: usize, new_size: usize) -> bool {
    whole_pages(size) == whole_pages(new_size)
}

#[cfg(all(unix, target_pointer_width = "64"))]
pub(crate) mod system {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// Fresh pages of zeros, or null.
    pub(crate) fn map(bytes: usize) -> *mut u8 {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at a place of the kernel's choice touches nothing that exists.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        mapped.map_or(std::ptr::null_mut(), <*mut _>::cast)
    }

    /// # Safety
    /// The range was mapped by this process, and nothing in it is used any more.
    pub(crate) unsafe fn unmap(start: usize, bytes: usize) {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the caller's promise. It can fail only where the kernel cannot split a mapping any
        // further; then the pages stay mapped and unused.
        let _ = unsafe { munmap(start, bytes) };
    }
}

#[cfg(not(all(unix, target_pointer_width = "64")))]
pub(crate) mod system {
    pub(crate) fn map(_: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    /// # Safety
    /// None needed: nothing was mapped.
    pub(crate) unsafe fn unmap(_: usize, _: usize) {}
}
