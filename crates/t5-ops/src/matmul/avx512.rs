//! The AVX512-BF16 kernel: the packed operands of AMX, multiplied by `vdpbf16ps`. Attention uses single blocks, too.
//!
//! A block of 32 x 32 is done in four groups of 8 rows: 16 accumulators of 16 columns. A pair of A along K is broadcast, and a line of B
//! holds that pair of K for 16 columns. Rows of A in bf16 are read in place: copying them into a panel first, once for every run of
//! columns, took 6 to 20 % of a product.
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
use super::tiles::{Left, Tiles};
use super::{pairs, tiles, turned};
use crate::storage::Operand;

/// Rows whose sums are kept in registers at a time.
const GROUP: usize = 8;

pub(crate) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    type Cell = u16;
    const ROWS: usize = tiles::BLOCK;
    const COLS: usize = tiles::BLOCK;
    const STEP: usize = tiles::BLOCK;
    const LEAST: usize = 2;
    const PREFETCHES_C: bool = true;
    const DEPTH: usize = tiles::DEPTH;
    const SLICE: usize = tiles::SLICE;

    unsafe fn enter() -> Self {
        Self
    }

    fn direct(a: &Matrix) -> Option<Rows<u16>> {
        match a.data {
            // A block reads whole pairs. A panel ends with a zero that completes the last pair, and a row does not.
            Operand::Bf16(data) if a.col_stride == 1 && a.cols.is_multiple_of(Self::LEAST) => {
                Some(Rows { data: data.as_ptr().cast(), row: a.row_stride, step: 1 })
            }
            _ => None,
        }
    }

    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
        // SAFETY: the caller promises that the machine has the instructions.
        unsafe { pairs::pack(side, m, cols, k, cells) }
    }

    unsafe fn block(&self, a: Rows<u16>, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        // SAFETY: as above, and that the operands are there.
        unsafe {
            if a.step == 1 {
                block((a.data, a.row, tiles::BLOCK), b, depth, c, stride, accumulate)
            } else {
                block((a.data, tiles::LINE, 2 * tiles::TILE), b, depth, c, stride, accumulate)
            }
        }
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

impl Tiles for Avx512Bf16 {
    unsafe fn multiply(&self, a: Left, b: *const u16, depth: usize, c: *mut f32, stride: usize, accumulate: bool) {
        let a = match a {
            Left::Packed(a) => (a, tiles::LINE, 2 * tiles::TILE),
            Left::Rows(a, row) => (a, row, tiles::BLOCK),
        };
        // SAFETY: by the caller's promise; the instructions are there, because `self` exists.
        unsafe { block(a, b, depth, c, stride, accumulate) }
    }
}

/// `a`: the first row, and cells from one row to the next and from one step along K to the next.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block(
    (a, row, apart): (*const u16, usize, usize),
    b: *const u16,
    depth: usize,
    c: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    for group in (0..tiles::BLOCK).step_by(GROUP) {
        let mut sums = [[_mm512_setzero_ps(); 2]; GROUP];
        let (steps, rest) = (depth / tiles::BLOCK, depth % tiles::BLOCK);
        // Tiles alternate: rows (columns) 0 to 15 of the panel, then 16 to 31; 16 lines of 32 cells each.
        let at = |step: usize| (a.wrapping_add(step * apart + group * row), b.wrapping_add(step * 2 * tiles::TILE));
        for step in 0..steps {
            for pair in 0..tiles::BLOCK / 2 {
                // SAFETY: the caller promises 32 rows of each step at `a`, and two tiles a step at `b`.
                unsafe { multiply_add(at(step), row, pair, &mut sums) };
            }
        }
        for pair in 0..rest / 2 {
            // SAFETY: as above, for these pairs of the last step.
            unsafe { multiply_add(at(steps), row, pair, &mut sums) };
        }
        for (i, sums) in sums.iter().enumerate() {
            for (half, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller promises 32 rows of 32 elements, `stride` apart.
                unsafe {
                    let target = c.add((group + i) * stride + half * 16);
                    let before: __m512 = if accumulate { _mm512_loadu_ps(target) } else { _mm512_setzero_ps() };
                    _mm512_storeu_ps(target, _mm512_add_ps(before, sum));
                }
            }
        }
    }
}

/// Adds the products of pair `pair` of a step: of the first rows of A, `row` cells apart, and the two tiles of B.
///
/// # Safety
///
/// The machine has AVX512-BF16; the rows have this pair, and the tiles are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_add((a, b): (*const u16, *const u16), row: usize, pair: usize, sums: &mut [[__m512; 2]; GROUP]) {
    // SAFETY: lines `pair` of the two tiles of B.
    let columns: [__m512bh; 2] = unsafe {
        [
            b.add(pair * tiles::LINE).cast::<__m512bh>().read(),
            b.add(tiles::TILE + pair * tiles::LINE).cast::<__m512bh>().read(),
        ]
    };
    for (i, sums) in sums.iter_mut().enumerate() {
        let a_at = a.wrapping_add(i * row + 2 * pair);
        // SAFETY: pair `pair` of the row.
        let pair = _mm512_set1_epi32(unsafe { a_at.cast::<i32>().read_unaligned() });
        // SAFETY: 64 bytes reinterpreted.
        let pair: __m512bh = unsafe { std::mem::transmute(pair) };
        sums[0] = _mm512_dpbf16_ps(sums[0], pair, columns[0]);
        sums[1] = _mm512_dpbf16_ps(sums[1], pair, columns[1]);
    }
}
