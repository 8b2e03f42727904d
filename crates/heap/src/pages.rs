//! Blocks that are whole pages: mapped, reused, and unmapped before there are more than were ever live.
//!
//! Invariant: `live + free <= peak_live`, all in bytes of whole pages. Pages of files that were made resident are live until they have
//! left: free pages are unmapped to make room for them, as for a block.

use std::sync::{Mutex, PoisonError};

use crate::page::{PAGE_BYTES, system, whole_pages};
use crate::ranges::FreeRanges;

/// Memory of large blocks, in bytes of whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// In blocks that are in use. Blocks in files count while they are resident.
    pub live: usize,
    /// Freed, and kept for reuse.
    pub free: usize,
    /// The most that was live at one time since memory was last released.
    pub peak_live: usize,
}

/// Every page of large blocks.
struct Pages {
    live: usize,
    peak_live: usize,
    free: FreeRanges,
}

// The map of free ranges allocates its nodes while this is locked. The nodes are small, so they come from mimalloc and
// never ask for this lock again.
static PAGES: Mutex<Pages> = Mutex::new(Pages::new());

fn with<R>(f: impl FnOnce(&mut Pages) -> R) -> R {
    f(&mut PAGES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A block of at least `size` bytes, and whether it is known to be zero. Null if there is no memory.
pub(crate) fn allocate(size: usize) -> (*mut u8, bool) {
    with(|pages| pages.allocate(size))
}

/// Frees a block.
///
/// # Safety
/// `block` came from [`allocate`] for a size of as many pages, and is no longer used.
pub(crate) unsafe fn free(block: *mut u8, size: usize) {
    with(|pages| pages.take_back(block, size));
}

/// Counts bytes of a file as live, because they are about to become resident.
pub(crate) fn enter(bytes: usize) {
    with(|pages| pages.enter(bytes.next_multiple_of(PAGE_BYTES)));
}

/// No longer counts bytes of a file as live, because they are no longer resident.
pub(crate) fn leave(bytes: usize) {
    with(|pages| pages.live -= bytes.next_multiple_of(PAGE_BYTES));
}

/// Unmaps all free ranges, and resets the peak of live bytes.
pub(crate) fn release() {
    with(Pages::release);
}

/// Returns the current counts.
pub(crate) fn held() -> Held {
    with(|pages| pages.held())
}

impl Pages {
    const fn new() -> Self {
        Self { live: 0, peak_live: 0, free: FreeRanges::new() }
    }

    fn allocate(&mut self, size: usize) -> (*mut u8, bool) {
        let Some(bytes) = whole_pages(size) else { return (std::ptr::null_mut(), false) };
        if let Some(start) = self.free.take(bytes) {
            self.count(bytes);
            return (std::ptr::with_exposed_provenance_mut(start), false);
        }
        self.make_room(bytes);
        let mut block = system::map(bytes);
        if block.is_null() {
            self.give_back(usize::MAX);
            block = system::map(bytes);
        }
        if !block.is_null() {
            block.expose_provenance();
            self.count(bytes);
        }
        (block, true)
    }

    /// Unmaps free ranges until `bytes` more can be live within the invariant.
    fn make_room(&mut self, bytes: usize) {
        let held = self.live + self.free.bytes() + bytes;
        self.give_back(held.saturating_sub(self.peak_live.max(self.live + bytes)));
    }

    fn enter(&mut self, bytes: usize) {
        self.make_room(bytes);
        self.count(bytes);
    }

    fn take_back(&mut self, block: *mut u8, size: usize) {
        let bytes = size.next_multiple_of(PAGE_BYTES);
        self.live -= bytes;
        self.free.insert(block.expose_provenance(), bytes);
    }

    fn release(&mut self) {
        self.give_back(usize::MAX);
        self.peak_live = self.live;
    }

    fn held(&self) -> Held {
        Held { live: self.live, free: self.free.bytes(), peak_live: self.peak_live }
    }

    fn count(&mut self, bytes: usize) {
        self.live += bytes;
        self.peak_live = self.peak_live.max(self.live);
    }

    /// Unmaps free ranges until `bytes` bytes are unmapped or no range is left.
    fn give_back(&mut self, mut bytes: usize) {
        while bytes > 0
            && let Some((start, length)) = self.free.give_up(bytes)
        {
            // SAFETY: `system::map` mapped the free ranges, and nothing uses them.
            unsafe { system::unmap(start, length) };
            bytes = bytes.saturating_sub(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_never_exceeds_the_most_that_was_live() {
        let mut pages = Pages::new();
        let mut blocks: Vec<(*mut u8, usize)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let n = (random >> 40) as usize;
            if blocks.len() > 40 || (n.is_multiple_of(3) && !blocks.is_empty()) {
                let (block, size) = blocks.swap_remove(n % blocks.len());
                pages.take_back(block, size);
            } else {
                let size = 1 + n % (1 << 20);
                let (block, _) = pages.allocate(size);
                // SAFETY: the block is new and has `size` bytes.
                unsafe { block.write_bytes(1, size) };
                blocks.push((block, size));
            }
            let held = pages.held();
            assert!(held.live + held.free <= held.peak_live, "{held:?}");
        }
        for (block, size) in blocks {
            pages.take_back(block, size);
        }
        pages.release();
        assert_eq!(pages.held(), Held::default());
    }

    #[test]
    fn free_pages_make_room_for_those_of_a_file() {
        let mut pages = Pages::new();
        let of = |pages: &Pages| (pages.live, pages.free.bytes(), pages.peak_live);
        let (block, _) = pages.allocate(4 << 20);
        pages.take_back(block, 4 << 20);
        pages.enter(1 << 20);
        assert_eq!(of(&pages), (1 << 20, 3 << 20, 4 << 20));
        let (block, _) = pages.allocate(2 << 20);
        pages.take_back(block, 2 << 20);
        // There is room for both.
        pages.enter(1 << 20);
        assert_eq!(of(&pages), (2 << 20, 2 << 20, 4 << 20));
        pages.enter(3 << 20);
        assert_eq!(of(&pages), (5 << 20, 0, 5 << 20));
        pages.live -= 5 << 20;
        pages.release();
    }

    #[test]
    fn a_freed_block_is_handed_out_again_without_new_pages() {
        let mut pages = Pages::new();
        let (first, is_zero) = pages.allocate(1 << 20);
        assert!(is_zero);
        pages.take_back(first, 1 << 20);
        let (again, is_zero) = pages.allocate(300 << 10);
        assert_eq!((again, is_zero), (first, false));
        pages.take_back(again, 300 << 10);
        pages.release();
    }
}
