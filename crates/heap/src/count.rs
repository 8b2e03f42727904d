//! What is asked of the allocator, counted while somebody wants to know. Otherwise a count is a load and a branch
//! that is never taken.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Requests to [`Allocator`](crate::Allocator) while it was counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// How often memory was asked for.
    pub calls: u64,
    /// How much, freed or not.
    pub bytes: u64,
}

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Switches the count of [`Allocator`](crate::Allocator) on or off; it starts switched off.
pub fn count_allocations(on: bool) {
    IS_COUNTING.store(on, Relaxed);
}

/// The count of [`Allocator`](crate::Allocator) so far, over all threads.
pub fn allocations() -> Allocations {
    Allocations { calls: CALLS.load(Relaxed), bytes: BYTES.load(Relaxed) }
}

/// Notes that `bytes` were asked for.
pub(crate) fn count(bytes: usize) {
    if IS_COUNTING.load(Relaxed) {
        CALLS.fetch_add(1, Relaxed);
        BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_counted_unless_someone_wants_to_know() {
        // Other tests ask the allocator for memory at the same time, so that a count can only be held from below.
        let before = allocations();
        count(1);
        assert_eq!(allocations(), before);
        count_allocations(true);
        count(300);
        count_allocations(false);
        let after = allocations();
        assert!(after.calls > before.calls && after.bytes >= before.bytes + 300, "{before:?}, {after:?}");
    }
}
