//! Large blocks: in the file of the thread's blocks, or in pages of their own.

use crate::page::whole_pages;
use crate::{in_files, pages};

/// A block of at least `size` bytes, and whether it is known to be zero. Null if there is no memory.
pub(crate) fn allocate(size: usize) -> (*mut u8, bool) {
    match whole_pages(size).and_then(in_files::allocate) {
        Some(block) => (block, true),
        None => pages::allocate(size),
    }
}

/// Frees a block.
///
/// # Safety
/// `block` came from [`allocate`] for a size of as many pages, and is no longer used.
pub(crate) unsafe fn free(block: *mut u8, size: usize) {
    if !in_files::free(block) {
        // SAFETY: by the caller's promise, and it lies in no file.
        unsafe { pages::free(block, size) };
    }
}
