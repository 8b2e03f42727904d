//! The time that this process has spent on files that replace memory: reading, writing, and waiting for their disk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

static NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// Counts the time of `f`. Work on several threads is counted once, around all of them.
pub fn counting_wait<T>(f: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = f();
    let nanoseconds = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    NANOSECONDS.fetch_add(nanoseconds, Ordering::Relaxed);
    result
}

/// Counts the mean time that threads have waited in parallel. `all` is the sum over the threads.
pub fn count_waits(all: Duration, threads: u32) {
    let nanoseconds = u64::try_from((all / threads.max(1)).as_nanos()).unwrap_or(u64::MAX);
    NANOSECONDS.fetch_add(nanoseconds, Ordering::Relaxed);
}

/// Returns the time that was counted since the process began.
pub fn waited() -> Duration {
    Duration::from_nanos(NANOSECONDS.load(Ordering::Relaxed))
}
