//! Counts of requests to the allocator, while counting is on. Otherwise a count is a load and a branch that is never
//! taken.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

/// Requests to [`Allocator`](crate::Allocator) while it was counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// The number of allocations.
    pub calls: u64,
    /// The bytes that were allocated, freed or not.
    pub bytes: u64,
}

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
/// Bytes allocated minus bytes freed since counting began: negative if blocks from before are freed.
static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK_LIVE: AtomicI64 = AtomicI64::new(0);

/// Switches the count of [`Allocator`](crate::Allocator) on or off; it starts switched off.
pub fn count_allocations(on: bool) {
    if on {
        LIVE.store(0, Relaxed);
        PEAK_LIVE.store(0, Relaxed);
    }
    IS_COUNTING.store(on, Relaxed);
}

/// Returns the most bytes that [`Allocator`](crate::Allocator) had given out at a time since counting began, without blocks from before.
pub fn peak_live() -> u64 {
    u64::try_from(PEAK_LIVE.load(Relaxed)).unwrap_or(0)
}

/// Returns the count of [`Allocator`](crate::Allocator) so far, over all threads.
pub fn allocations() -> Allocations {
    Allocations { calls: CALLS.load(Relaxed), bytes: BYTES.load(Relaxed) }
}

/// Notes that `bytes` bytes were allocated.
pub(crate) fn count(bytes: usize) {
    if IS_COUNTING.load(Relaxed) {
        CALLS.fetch_add(1, Relaxed);
        BYTES.fetch_add(bytes as u64, Relaxed);
        let bytes = bytes.cast_signed() as i64;
        PEAK_LIVE.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
    }
}

/// Notes that a block was resized in place.
pub(crate) fn count_resized(old: usize, new: usize) {
    if IS_COUNTING.load(Relaxed) {
        LIVE.fetch_add(new.cast_signed() as i64 - old.cast_signed() as i64, Relaxed);
    }
}

/// Notes that a block of `bytes` bytes was freed.
pub(crate) fn count_freed(bytes: usize) {
    if IS_COUNTING.load(Relaxed) {
        LIVE.fetch_sub(bytes.cast_signed() as i64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = 1 << 40;

    #[test]
    fn nothing_is_counted_unless_someone_wants_to_know() {
        // Other tests allocate at the same time, so a count has a lower bound only.
        let before = allocations();
        count(1);
        assert_eq!(allocations(), before);
        count_allocations(true);
        count(300);
        // More bytes than other tests ever free.
        count(MANY);
        count_freed(MANY);
        count_resized(200, 300);
        count_allocations(false);
        let after = allocations();
        assert!(after.calls >= before.calls + 2, "{before:?}, {after:?}");
        assert!(after.bytes >= before.bytes + (MANY + 300) as u64, "{before:?}, {after:?}");
        assert!(peak_live() >= MANY as u64 / 2, "{} bytes", peak_live());
    }
}
