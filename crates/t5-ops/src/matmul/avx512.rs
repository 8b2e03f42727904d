//! The AVX512-BF16 kernel: the same packed operands as AMX, multiplied by `vdpbf16ps`.
//!
//! A block of 32 x 32 is done in four groups of 8 rows: 16 accumulators of 16 columns; a pair of A along K is
//! broadcast, a line of B holds that pair of K for 16 columns.
//!
//! For machines whose `vdpbf16ps` is at full rate (AMD since Zen 4). On Sapphire Rapids it is at half the rate
//! of f32 FMA, but there AMX is used.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};

use super::packed::{Kernel, Line};

/// Rows whose sums are kept in registers at a time.
const GROUP: usize = 8;

pub(super) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    unsafe fn enter() -> Self {
        Self
    }

    unsafe fn block(&self, a: *const Line, b: *const Line, steps: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // SAFETY: the caller promises that the machine has the instructions and that the operands are there.
        unsafe { block(a, b, steps, c, stride, accumulate) }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block(a: *const Line, b: *const Line, steps: usize, c: *mut f32, stride: usize, accumulate: bool) {
    for group in 0..32 / GROUP {
        let mut sums = [[_mm512_setzero_ps(); 2]; GROUP];
        for step in 0..steps {
            // Tiles alternate: rows (columns) 0 to 15 of the panel, then 16 to 31; 16 lines each.
            let tile = group * GROUP / 16;
            // SAFETY: the caller promises `steps` times two tiles at `a` and at `b`.
            let (a, b) =
                unsafe { (a.add((step * 2 + tile) * 16 + group * GROUP % 16).cast::<i32>(), b.add(step * 32)) };
            for pair in 0..16 {
                // SAFETY: lines `pair` of the two tiles of B.
                let columns: [__m512bh; 2] = unsafe { [*b.add(pair).cast(), *b.add(16 + pair).cast()] };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: pair `pair` of line `row` of the group; a line is 16 pairs.
                    let pair = _mm512_set1_epi32(unsafe { *a.add(row * 16 + pair) });
                    // SAFETY: 64 bytes reinterpreted.
                    let pair: __m512bh = unsafe { std::mem::transmute(pair) };
                    sums[0] = _mm512_dpbf16_ps(sums[0], pair, columns[0]);
                    sums[1] = _mm512_dpbf16_ps(sums[1], pair, columns[1]);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (half, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller promises 32 rows of 32 elements, `stride` apart.
                unsafe {
                    let target = c.add((group * GROUP + row) * stride + half * 16);
                    let before: __m512 = if accumulate { _mm512_loadu_ps(target) } else { _mm512_setzero_ps() };
                    _mm512_storeu_ps(target, _mm512_add_ps(before, sum));
                }
            }
        }
    }
}
