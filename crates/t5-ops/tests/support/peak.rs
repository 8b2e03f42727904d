//! The most bytes that a piece of work holds, as the allocator counts them. The allocator has to be [`heap::Allocator`].

/// The most buffers that a thread makes in products and keeps.
const BUFFERS: usize = 8;

/// Returns the most bytes that `work` holds besides earlier allocations. The first run allocates memory that stays, such as the threads'
/// buffers of products. On a busy machine a thread may do its first work later, so `work` is repeated until no more memory stays.
pub fn held_at_the_peak(mut work: impl FnMut()) -> u64 {
    for _ in 0..=BUFFERS * t5_ops::threads() {
        heap::release_unused();
        let before = heap::held().live;
        work();
        let held = heap::held();
        if held.live == before {
            return (held.peak_live - before) as u64;
        }
    }
    panic!("more stays each time")
}
