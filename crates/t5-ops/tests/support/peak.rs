//! The most that a piece of work holds, as the allocator counts it. The allocator has to be [`heap::Allocator`].

/// Buffers that a thread makes in products and keeps, at most.
const BUFFERS: usize = 8;

/// The most that `work` holds beside what was there before, in bytes. The first time it makes what stays, such as the threads' buffers of
/// products. On a busy machine a thread may do its first work later: the work counts when nothing more stays.
pub fn held_at_the_peak(mut work: impl FnMut()) -> u64 {
    for _ in 0..=BUFFERS * t5_ops::threads() {
        heap::release_unused();
        let before = heap::held().live;
        work();
        let held = heap::held();
        if held.live == before {
            return (held.most_live - before) as u64;
        }
    }
    panic!("more stays each time")
}
