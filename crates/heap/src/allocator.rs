//! The allocator that a program installs: small blocks from mimalloc, large ones as pages that are reused and bounded.

use std::alloc::{GlobalAlloc, Layout};
#[cfg(target_os = "linux")]
use std::ffi::c_ulong;
use std::ffi::{c_int, c_long};
use std::sync::OnceLock;

// Miri cannot call into C, and WebAssembly has none.
#[cfg(not(any(miri, target_family = "wasm")))]
use mimalloc::MiMalloc as SmallBlocks;
#[cfg(any(miri, target_family = "wasm"))]
use std::alloc::System as SmallBlocks;

use crate::count;
use crate::large;
use crate::page::{self, IS_SUPPORTED, LARGE_BYTES};
use crate::pages::{self, Held};

/// Small blocks from mimalloc, large ones as pages that are reused and bounded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

/// The page size is this or a divisor of it on every system; no tensor has a larger alignment.
const MAX_ALIGNMENT: usize = 4096;

static ON_ALLOCATION_FAILURE: OnceLock<fn(usize)> = OnceLock::new();

/// Sets a function that is called with the bytes of an allocation that the system refused, before the caller of the allocator learns of it.
/// Most callers cannot continue, and the standard library then ends the process with a signal. `f` may end the process with a better
/// message. It must not allocate. Only the first call of this function counts.
pub fn on_allocation_failure(f: fn(usize)) {
    let _ = ON_ALLOCATION_FAILURE.set(f);
}

/// Returns the block. If it is null, calls the function of [`on_allocation_failure`] first.
fn told(block: *mut u8, bytes: usize) -> *mut u8 {
    if block.is_null()
        && let Some(f) = ON_ALLOCATION_FAILURE.get()
    {
        f(bytes);
    }
    block
}

fn is_large(layout: &Layout) -> bool {
    layout.size() >= LARGE_BYTES && layout.align() <= MAX_ALIGNMENT && IS_SUPPORTED
}

// SAFETY: a block's layout determines which of the two allocators it belongs to, and callers give the layout
// unchanged to every call about the block. Each of the two keeps the contract for its own blocks.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count::count(layout.size());
        let block = match is_large(&layout) {
            true => large::allocate(layout.size()).0,
            // SAFETY: the caller's promise about the layout covers mimalloc's requirement.
            false => unsafe { SmallBlocks.alloc(layout) },
        };
        told(block, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count::count(layout.size());
        if !is_large(&layout) {
            // SAFETY: as in `alloc`.
            return told(unsafe { SmallBlocks.alloc_zeroed(layout) }, layout.size());
        }
        let (block, is_zero) = large::allocate(layout.size());
        if !block.is_null() && !is_zero {
            // SAFETY: the block has at least `layout.size()` bytes, and no other code knows it yet.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        told(block, layout.size())
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count::count_freed(layout.size());
        match is_large(&layout) {
            // SAFETY: the caller frees a block of this layout, so `allocate` made it for this size.
            true => unsafe { large::free(block, layout.size()) },
            // SAFETY: as in `alloc`; the block came from there, because its layout is small.
            false => unsafe { SmallBlocks.dealloc(block, layout) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the new size makes a valid layout with the old alignment.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (is_large(&layout), is_large(&new_layout)) {
            (false, false) => {
                count::count(new_size);
                // SAFETY: as in `alloc`; both blocks are mimalloc's.
                let new = told(unsafe { SmallBlocks.realloc(block, layout, new_size) }, new_size);
                count::count_freed(layout.size());
                new
            }
            (true, true) if page::is_same_block(layout.size(), new_size) => {
                count::count_resized(layout.size(), new_size);
                block
            }
            _ => {
                // SAFETY: by the caller's promises about both layouts.
                let new = unsafe { self.alloc(new_layout) };
                if !new.is_null() {
                    // SAFETY: both blocks have that many bytes, and a block just made overlaps no other.
                    unsafe { new.copy_from_nonoverlapping(block, layout.size().min(new_size)) };
                    // SAFETY: the caller gives up the old block.
                    unsafe { self.dealloc(block, layout) };
                }
                new
            }
        }
    }
}

unsafe extern "C" {
    /// From mimalloc's C interface; `libmimalloc-sys` declares it only together with a hundred others.
    fn mi_collect(force: bool);
    /// From mimalloc's C interface: sets one of its options, by number.
    fn mi_option_set(option: c_int, value: c_long);
    /// From the C library: sets attributes of a process on Linux.
    #[cfg(target_os = "linux")]
    fn prctl(option: c_int, ...) -> c_int;
}

/// Disables huge pages for this process from here on; does nothing on systems without them. Call this first in `main`.
///
/// mimalloc asks for huge pages for the whole of its arena. A first touch, or the kernel's gathering of small pages at any later moment,
/// then makes 2 MiB resident at a time, even if less is in use: a run's resident set moved by 4 MiB between two steps.
pub fn disable_huge_pages() {
    #[cfg(target_os = "linux")]
    {
        const SET_THP_DISABLE: c_int = 41;
        let [yes, unused]: [c_ulong; 2] = [1, 0];
        // SAFETY: this option takes four numbers and no pointer. A kernel that does not know it changes nothing.
        unsafe { prctl(SET_THP_DISABLE, yes, unused, unused, unused) };
    }
}

/// Has the allocator return pages of small blocks to the system soon after the last of their blocks was freed. Call it first in `main`.
///
/// mimalloc keeps such pages for a second. Meanwhile blocks of other sizes take new pages: over hostile text a run's arena grew by 1 MiB in
/// 40 steps.
pub fn return_small_pages_soon() {
    if !cfg!(any(miri, target_family = "wasm")) {
        const PURGE_DELAY: c_int = 15;
        // Without a delay, steps of many short tensors take 4 % more processor time.
        const MILLISECONDS: c_long = 10;
        // SAFETY: it sets a number that mimalloc reads, and may be called at any time.
        unsafe { mi_option_set(PURGE_DELAY, MILLISECONDS) }
    }
}

/// Returns memory that was freed, but kept for reuse, to the operating system, on every thread of the pool.
///
/// Has no effect if the binary has not installed [`Allocator`].
pub fn release_unused() {
    release_small();
    pages::release();
}

/// [`release_unused`] for small blocks only: tensors' pages stay, so that the next step faults in nothing.
pub fn release_small() {
    let collect = || {
        if !cfg!(miri) {
            // SAFETY: `mi_collect` has no preconditions; it may be called from any thread at any time.
            unsafe { mi_collect(true) }
        }
    };
    rayon::broadcast(|_| collect());
    collect();
}

/// Returns the memory of large blocks now, and the most that was live at one time since [`release_unused`].
pub fn held() -> Held {
    pages::held()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releasing_unused_memory_is_safe_without_the_allocator_installed() {
        release_unused();
    }

    #[test]
    fn a_block_keeps_its_bytes_while_it_grows_and_shrinks_across_the_border() {
        let sizes = [1000, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES, LARGE_BYTES - 1, 70, 5 * LARGE_BYTES];
        // SAFETY: every block is used with the layout that it has at that time, within its size, and freed once.
        unsafe {
            let mut layout = Layout::from_size_align(64, 64).unwrap();
            let mut block = Allocator.alloc(layout);
            (0..64).for_each(|i| block.add(i).write(i as u8));
            for size in sizes {
                block = Allocator.realloc(block, layout, size);
                layout = Layout::from_size_align(size, 64).unwrap();
                assert_eq!(block as usize % 64, 0);
                block.add(size - 1).write(7);
                assert!((0..63).all(|i| block.add(i).read() == i as u8), "at {size} bytes");
            }
            Allocator.dealloc(block, layout);
        }
    }

    #[test]
    fn zeroed_blocks_are_zero_when_their_pages_were_used_before() {
        let layout = Layout::from_size_align(2 * LARGE_BYTES, 8).unwrap();
        for _ in 0..3 {
            // SAFETY: the block is used within its size and freed once with its layout.
            unsafe {
                let block = Allocator.alloc_zeroed(layout);
                assert!((0..layout.size()).all(|i| block.add(i).read() == 0));
                block.write_bytes(0xff, layout.size());
                Allocator.dealloc(block, layout);
            }
        }
    }
}
