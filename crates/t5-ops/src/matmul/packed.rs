//! bf16 products over packed operands, for kernels that multiply a 32 x 32 block at a time.
//!
//! Both operands are packed as they are used, from whatever type and orientation they are stored in, into the
//! layout of AMX tiles: a *line* is 64 bytes, a *tile* 16 lines, a *panel* 32 rows of A (or 32 columns of B)
//! over all of K, in steps of 32 along K, two tiles a step.
//!
//! ```text
//! tile of A: line i holds row i,        elements k .. k+32
//! tile of B: line p holds K-pair p:     (k+2p, k+2p+1) of column 0, of column 1, .. of column 15
//! ```
//!
//! What lies along K in memory is copied into lines; what lies across K is interleaved in pairs. A takes the
//! first as it is and the second transposed (as 16 x 16 pairs), B the other way round. Edges are filled with
//! zeros, so kernels know only whole blocks.
//!
//! A is packed once and shared by the threads. Each task packs a block of columns of B, small enough to stay
//! in its core's second-level cache, and goes through the panels of A: a panel of A stays in the first-level
//! cache while the panels of B pass by. Memory: at most `A_BYTES`, and `B_BYTES` a thread (more only where
//! a single panel is larger).

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_maskz_loadu_epi16, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtneps_pbh,
    _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_or_si512, _mm512_setzero_si512, _mm512_shuffle_i32x4,
    _mm512_slli_epi32, _mm512_store_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

use half::bf16;

use super::{Matrix, MatrixMut, Operand, Target, Threads, write_row};
use crate::parallel::{Shared, for_each_part};
use crate::storage::Element;

/// Rows and columns of a block.
pub(super) const BLOCK: usize = 32;
/// Elements along K of a step.
const STEP: usize = 32;
/// Lines of a panel for a step: two tiles.
const STEP_LINES: usize = 32;

/// At most this much of A is packed at a time.
const A_BYTES: usize = 8 << 20;
/// At most this much of B is packed at a time by a thread: half of a second-level cache of 2 MiB.
const B_BYTES: usize = 1 << 20;

/// 32 bf16 values, or 16 pairs.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u16; 32]);

/// Multiplies blocks of packed panels.
pub(super) trait Kernel: Sized {
    /// Prepares the current thread.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel.
    unsafe fn enter() -> Self;

    /// `C (+)= A B` for one block over `steps` steps along K.
    ///
    /// # Safety
    ///
    /// `a` and `b` point to `steps * 32` lines each, `c` to 32 rows of 32 elements, `stride` apart, which
    /// nothing else reaches. `steps` is at least 1.
    unsafe fn block(&self, a: *const Line, b: *const Line, steps: usize, c: *mut f32, stride: usize, accumulate: bool);
}

/// # Safety
///
/// The machine has the instructions of the kernel, AVX-512 (F, BW, VL) and AVX512-BF16.
pub(super) unsafe fn multiply<K: Kernel>(c: &MatrixMut, a: Matrix, b: Matrix, accumulate: bool, threads: Threads) {
    let steps = a.cols.div_ceil(STEP);
    let panel_lines = steps * STEP_LINES;
    let panel_bytes = panel_lines * size_of::<Line>();
    let (a_panels, b_panels) = (c.rows.div_ceil(BLOCK), c.cols.div_ceil(BLOCK));
    let threads = threads.count();

    // Blocks of columns: small enough for the cache, as many as there are threads, of equal size.
    let largest = (B_BYTES / panel_bytes).max(1);
    let blocks = b_panels.div_ceil(largest).max(threads.min(b_panels)).next_multiple_of(threads).min(b_panels);
    let block = b_panels.div_ceil(blocks);
    let blocks = b_panels.div_ceil(block);
    // Narrow products are cut by rows as well; each part packs the columns again.
    let parts = threads.div_ceil(blocks).min(a_panels);

    let group = (A_BYTES / panel_bytes).max(1).min(a_panels);
    let mut packed_a = lines(group * panel_lines);
    for first in (0..a_panels).step_by(group) {
        let count = group.min(a_panels - first);
        let shared_a = Shared::new(&mut packed_a);
        let pack_parts = if threads == 1 { 1 } else { (4 * threads).min(count) };
        run(threads, pack_parts, |part| {
            for panel in count * part / pack_parts..count * (part + 1) / pack_parts {
                // SAFETY: each panel is packed by one part; the instructions are there by the caller's promise.
                unsafe {
                    let lines = shared_a.slice(panel * panel_lines, panel_lines);
                    pack_panel(&a.t(), (first + panel) * BLOCK, Side::A, lines);
                }
            }
        });
        let packed_a = &packed_a[..];
        let part = count.div_ceil(parts);
        run(threads, blocks * parts, |task| {
            let columns = task / parts * block..b_panels.min((task / parts + 1) * block);
            let rows = task % parts * part..count.min((task % parts + 1) * part);
            let mut packed_b = lines(columns.len() * panel_lines);
            // SAFETY: the instructions are there by the caller's promise.
            let kernel = unsafe { K::enter() };
            for (panel, lines) in columns.clone().zip(packed_b.chunks_exact_mut(panel_lines)) {
                // SAFETY: as above.
                unsafe { pack_panel(&b, panel * BLOCK, Side::B, lines) };
            }
            for row_panel in rows {
                let a = &packed_a[row_panel * panel_lines..][..panel_lines];
                for (panel, b) in columns.clone().zip(packed_b.chunks_exact(panel_lines)) {
                    let (i, j) = ((first + row_panel) * BLOCK, panel * BLOCK);
                    // SAFETY: panels of `steps` steps; each block of C belongs to one task.
                    unsafe { finish_block(&kernel, c, (i, j), a, b, steps, accumulate) };
                }
            }
        });
    }
}

/// Runs tasks on the pool, or here if this is a product of one thread.
fn run(threads: usize, tasks: usize, f: impl Fn(usize) + Sync + Send) {
    if threads == 1 { (0..tasks).for_each(f) } else { for_each_part(tasks, f) }
}

/// A buffer of lines, to be written before it is read.
fn lines(n: usize) -> Vec<Line> {
    let mut lines = Vec::<Line>::with_capacity(n);
    // SAFETY: the capacity is n, every bit pattern is a line, and panels are packed whole before they are read.
    #[allow(clippy::uninit_vec)]
    unsafe {
        lines.set_len(n)
    };
    lines
}

/// Computes the block of C at (i, j) and writes what lies inside C.
///
/// # Safety
///
/// As [`Kernel::block`]; the block of C belongs to the caller.
unsafe fn finish_block<K: Kernel>(
    kernel: &K,
    c: &MatrixMut,
    (i, j): (usize, usize),
    a: &[Line],
    b: &[Line],
    steps: usize,
    accumulate: bool,
) {
    let (rows, cols) = (BLOCK.min(c.rows - i), BLOCK.min(c.cols - j));
    let start = c.start + i * c.row_stride + j;
    if let Target::F32(target) = c.data
        && (rows, cols) == (BLOCK, BLOCK)
    {
        // SAFETY: a whole block inside C.
        unsafe { kernel.block(a.as_ptr(), b.as_ptr(), steps, target.pointer(start), c.row_stride, accumulate) };
        return;
    }
    let mut block = Block([0.0; BLOCK * BLOCK]);
    // SAFETY: the buffer is a block of 32 rows of 32.
    unsafe { kernel.block(a.as_ptr(), b.as_ptr(), steps, block.0.as_mut_ptr(), BLOCK, false) };
    for (row, block) in block.0.chunks_exact(BLOCK).take(rows).enumerate() {
        let at = start + row * c.row_stride;
        match c.data {
            // SAFETY: inside C, and this task's alone.
            Target::F32(target) => write_row(&block[..cols], unsafe { target.slice(at, cols) }, accumulate),
            // SAFETY: as above.
            Target::Bf16(target) => write_row(&block[..cols], unsafe { target.slice(at, cols) }, accumulate),
        }
    }
}

#[repr(align(64))]
struct Block([f32; BLOCK * BLOCK]);

/// Which operand a panel is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// Packs 32 columns of `m` (K, X) from column `x` on; A is given transposed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_panel(m: &Matrix, x: usize, side: Side, panel: &mut [Line]) {
    match m.data {
        // SAFETY: by the caller's promise.
        Operand::F32(data) => unsafe { pack::<f32>(data, m, x, side, panel) },
        // SAFETY: by the caller's promise.
        Operand::Bf16(data) => unsafe { pack::<bf16>(data, m, x, side, panel) },
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack<T: Load>(data: &[T], m: &Matrix, x: usize, side: Side, panel: &mut [Line]) {
    let along = m.row_stride == 1;
    for (step, lines) in panel.chunks_exact_mut(STEP_LINES).enumerate() {
        let k = step * STEP;
        let depth = STEP.min(m.rows - k);
        for (tile, lines) in lines.chunks_exact_mut(16).enumerate() {
            let x = x + tile * 16;
            let width = m.cols.saturating_sub(x).min(16);
            // SAFETY: `depth` and `width` end at the edges of the matrix, whose constructor checked that its
            // elements lie inside `data`.
            let mut rows = unsafe {
                if along {
                    load_along::<T>(data, x * m.col_stride + k, m.col_stride, width, depth)
                } else {
                    load_across::<T>(data, k * m.row_stride + x, m.row_stride, width, depth)
                }
            };
            if along == (side == Side::B) {
                transpose(&mut rows);
            }
            for (line, row) in lines.iter_mut().zip(rows) {
                // SAFETY: a line is 64 aligned bytes.
                unsafe { _mm512_store_si512(std::ptr::from_mut(line).cast(), row) };
            }
        }
    }
}

/// `width` rows of `depth` elements along K, `stride` apart: vector i holds the pairs of row i.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn load_along<T: Load>(data: &[T], start: usize, stride: usize, width: usize, depth: usize) -> [__m512i; 16] {
    let mask = if depth == STEP { u32::MAX } else { (1 << depth) - 1 };
    let mut rows = [_mm512_setzero_si512(); 16];
    for (i, row) in rows.iter_mut().enumerate().take(width) {
        // SAFETY: row i begins inside `data` and the mask ends with it.
        *row = unsafe { T::load_32(data.as_ptr().add(start + i * stride), mask) };
    }
    rows
}

/// `depth` rows of `width` elements across K, `stride` apart: vector p holds K-pair p of every column.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn load_across<T: Load>(data: &[T], start: usize, stride: usize, width: usize, depth: usize) -> [__m512i; 16] {
    let mask = if width == 16 { u16::MAX } else { (1 << width) - 1 };
    let mut pairs = [_mm512_setzero_si512(); 16];
    if width == 0 {
        return pairs;
    }
    for (p, pair) in pairs.iter_mut().enumerate().take(depth.div_ceil(2)) {
        // SAFETY: row 2p begins inside `data` and the mask ends with it.
        let even = unsafe { _mm512_cvtepu16_epi32(T::load_16(data.as_ptr().add(start + 2 * p * stride), mask)) };
        *pair = if 2 * p + 1 < depth {
            // SAFETY: as above for row 2p + 1.
            let odd = unsafe { T::load_16(data.as_ptr().add(start + (2 * p + 1) * stride), mask) };
            _mm512_or_si512(even, _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd)))
        } else {
            even
        };
    }
    pairs
}

/// Transposes 16 x 16 pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: &mut [__m512i; 16]) {
    // Within groups of four rows: 4 x 4 transposes in each 128-bit quarter.
    for group in rows.as_chunks_mut::<4>().0 {
        let [a, b, c, d] = *group;
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        *group = [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
    }
    // Then the quarters themselves: row i of the result takes quarter i / 4 of rows i % 4 of the four groups.
    let quarters = *rows;
    for i in 0..4 {
        let [a, b, c, d] = [quarters[i], quarters[4 + i], quarters[8 + i], quarters[12 + i]];
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xDD>(c, d));
        rows[i] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        rows[4 + i] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        rows[8 + i] = _mm512_shuffle_i32x4::<0xDD>(ab_even, cd_even);
        rows[12 + i] = _mm512_shuffle_i32x4::<0xDD>(ab_odd, cd_odd);
    }
}

/// Elements loaded as bf16, rounded to nearest even.
trait Load: Element {
    /// 32 elements, zero where the mask is.
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i;
    /// 16 elements, zero where the mask is.
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i;
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i {
        // SAFETY: masked elements are not read; the others are there by the caller's promise.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask as u16, from);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i {
        // SAFETY: as above.
        unsafe { std::mem::transmute(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from))) }
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) }
    }
}
