//! The rate of a kernel: operations a second that no product exceeds.

use super::kernel::{Kernel, packed_rows};
use super::panels::Buffer;

/// Operations a second of the kernel alone, on the calling thread: one block over and over, with its panels in the
/// first-level cache. No work of this kernel on this machine is faster.
///
/// # Safety
///
/// The machine has the instructions of the kernel.
pub(super) unsafe fn block_rate<K: Kernel>() -> f64 {
    /// Depth along K: 16 KiB of bf16 or 12 to 32 KiB of f32 on each side.
    const DEEP: usize = 256;
    /// The number of blocks that are timed together, and of repetitions. The best counts, because other work on the machine only slows a
    /// run down.
    const BLOCKS: usize = 2000;
    const TIMES: usize = 9;
    let zeros = |len: usize| {
        let mut lines = Buffer::new::<K::Cell>(len);
        // Bytes of zero are a zero of any cell.
        lines.clear();
        lines
    };
    let (a, b) = (zeros(K::ROWS * DEEP), zeros(K::COLS * DEEP));
    let mut c = vec![0f32; K::ROWS * K::COLS];
    let (a, b) = (packed_rows::<K>(a.read().as_ptr()), b.read::<K::Cell>().as_ptr());
    // SAFETY: by the caller's promise.
    let kernel = unsafe { K::enter() };
    let mut best = f64::MAX;
    for _ in 0..TIMES {
        let start = std::time::Instant::now();
        for _ in 0..BLOCKS {
            // SAFETY: panels of `DEEP` and a whole block.
            unsafe { kernel.block(a, b, DEEP, std::hint::black_box(c.as_mut_ptr()), K::COLS, true) };
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    (2 * K::ROWS * K::COLS * DEEP * BLOCKS) as f64 / best
}
