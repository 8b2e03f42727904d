//! The AVX512-BF16 kernel: the packed operands of AMX, multiplied by `vdpbf16ps`.
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
use std::ops::Range;

use half::bf16;

use super::kernel::{Kernel, Rows, Side};
use super::matrix::Matrix;
use super::{pairs, tiles, turned};

/// Rows whose sums are kept in registers at a time.
const GROUP: usize = 8;

pub(super) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    type Cell = u16;
    const ROWS: usize = tiles::BLOCK;
    const COLS: usize = tiles::BLOCK;
    const STEP: usize = tiles::BLOCK;
    const DEPTH: usize = tiles::DEPTH;
    const SLICE: usize = tiles::SLICE;

    unsafe fn enter() -> Self {
        Self
    }

    fn direct(_: &Matrix) -> Option<Rows<u16>> {
        None
    }

    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        // SAFETY: the caller promises that the machine has the instructions.
        unsafe { pairs::pack(side, m, cols, k, cells) }
    }

    unsafe fn block(&self, a: Rows<u16>, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // SAFETY: as above, and that the operands are there.
        unsafe { block(a.data, b, depth, c, stride, accumulate) }
    }

    unsafe fn turn_block(block: *const f32, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { turned::turn_tiles(block, to) }
    }

    unsafe fn write_bf16(&self, block: &[f32], c: *mut bf16, stride: usize, size: (usize, usize), accumulate: bool) {
        // SAFETY: as above.
        unsafe { pairs::write_bf16(block, c, stride, size, accumulate) }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block(a: *const u16, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
    for group in (0..tiles::BLOCK).step_by(GROUP) {
        let mut sums = [[_mm512_setzero_ps(); 2]; GROUP];
        for step in 0..depth / tiles::BLOCK {
            // Tiles alternate: rows (columns) 0 to 15 of the panel, then 16 to 31; 16 lines of 32 cells each.
            // SAFETY: the caller promises two tiles a step at `a` and at `b`.
            let (a_group, b) = unsafe { (a.add(step * 1024 + group * 32), b.add(step * 1024)) };
            for pair in 0..16 {
                // SAFETY: lines `pair` of the two tiles of B.
                let columns: [__m512bh; 2] = unsafe {
                    [b.add(pair * 32).cast::<__m512bh>().read(), b.add(512 + pair * 32).cast::<__m512bh>().read()]
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    let a_at = a_group.wrapping_add(row * 32 + 2 * pair);
                    // SAFETY: pair `pair` of the row.
                    let pair = _mm512_set1_epi32(unsafe { a_at.cast::<i32>().read_unaligned() });
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
                    let target = c.add((group + row) * stride + half * 16);
                    let before: __m512 = if accumulate { _mm512_loadu_ps(target) } else { _mm512_setzero_ps() };
                    _mm512_storeu_ps(target, _mm512_add_ps(before, sum));
                }
            }
        }
    }
}
