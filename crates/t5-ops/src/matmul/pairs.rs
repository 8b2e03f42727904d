//! Packing for bf16 instructions, which multiply pairs along K: AMX and AVX512-BF16. [`super::tiles`] describes the layout of panels.
//!
//! Elements that lie along K in memory are copied into lines; elements that lie across K are interleaved in pairs. A takes the first as
//! they are and the second transposed (as 16 x 16 pairs), B the other way round. Loading tiles from rows of A in place, without packing,
//! was a third slower: rows a power of two apart fall into few sets of the caches.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_loadu_si256, _mm256_maskz_loadu_epi16, _mm512_add_ps, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtneps_pbh, _mm512_loadu_ps, _mm512_maskz_loadu_epi16,
    _mm512_maskz_loadu_ps, _mm512_or_si512, _mm512_permutex2var_epi64, _mm512_set_epi64, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use half::bf16;

use super::kernel::Side;
use super::matrix::Matrix;
use super::tiles::{BLOCK, LINE, TILE};
use crate::storage::{Element, Operand};

/// See [`super::kernel::Kernel::pack`].
///
/// # Safety
///
/// The machine has AVX-512 (F, BW, VL) and AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [u16]) {
    match m.data {
        // SAFETY: by the caller's promise.
        Operand::F32(data) => unsafe { pack_from::<f32>(data, side, m, cols, k, cells) },
        // SAFETY: by the caller's promise.
        Operand::Bf16(data) => unsafe { pack_from::<bf16>(data, side, m, cols, k, cells) },
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_from<T: Load>(
    data: &[T],
    side: Side,
    m: &Matrix,
    cols: Range<usize>,
    k: Range<usize>,
    cells: &mut [u16],
) {
    let along = m.row_stride == 1;
    if along && side == Side::A && cols.len() == BLOCK && k.len().is_multiple_of(BLOCK) {
        // SAFETY: whole rows of whole lines inside `data`.
        unsafe { copy_rows(data.as_ptr().add(cols.start * m.col_stride + k.start), m.col_stride, cells) };
        return;
    }
    for (step, cells) in cells.chunks_exact_mut(2 * TILE).enumerate() {
        let k = k.start + step * BLOCK..k.end.min(k.start + (step + 1) * BLOCK);
        if !along && k.len() == BLOCK && cols.len() == BLOCK {
            // SAFETY: a whole 32 x 32 part inside `data`.
            unsafe {
                let from = data.as_ptr().add(k.start * m.row_stride + cols.start);
                match side {
                    Side::A => turn(from, m.row_stride, cells),
                    Side::B => interleave(from, m.row_stride, cells),
                }
            }
            continue;
        }
        for (tile, cells) in cells.chunks_exact_mut(TILE).enumerate() {
            let x = cols.start + tile * 16;
            let width = cols.end.saturating_sub(x).min(16);
            // SAFETY: `k` and `width` end at the edges of the matrix, whose constructor checked that its
            // elements lie inside `data`.
            let mut rows = unsafe {
                if along {
                    load_along::<T>(data, x * m.col_stride + k.start, m.col_stride, width, k.len())
                } else {
                    load_across::<T>(data, k.start * m.row_stride + x, m.row_stride, width, k.len())
                }
            };
            if along == (side == Side::B) {
                transpose(&mut rows);
            }
            for (line, row) in cells.chunks_exact_mut(LINE).zip(rows) {
                // SAFETY: a line is 64 bytes.
                unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), row) };
            }
        }
    }
}

/// Copies 32 rows along K, `stride` apart, into tiles of A: as many elements of each row as `cells` has room for.
///
/// Eight rows at a time: the processor prefetches from a few dozen places at most.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn copy_rows<T: Load>(from: *const T, stride: usize, cells: &mut [u16]) {
    for first in (0..BLOCK).step_by(8) {
        for (step, cells) in cells.chunks_exact_mut(2 * TILE).enumerate() {
            for row in first..first + 8 {
                // SAFETY: the caller promises the rows; a step has 32 lines.
                unsafe {
                    let line = T::load_32(from.add(row * stride + step * BLOCK), u32::MAX);
                    _mm512_storeu_si512(cells.as_mut_ptr().add(row * LINE).cast(), line);
                }
            }
        }
    }
}

/// `width` rows of `depth` elements along K, `stride` apart: vector i holds the pairs of row i.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn load_along<T: Load>(data: &[T], start: usize, stride: usize, width: usize, depth: usize) -> [__m512i; 16] {
    let mask = if depth == BLOCK { u32::MAX } else { (1 << depth) - 1 };
    let mut rows = [_mm512_setzero_si512(); 16];
    if width == 16 && depth == BLOCK {
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: row i lies inside `data`.
            *row = unsafe { T::load_32(data.as_ptr().add(start + i * stride), u32::MAX) };
        }
        return rows;
    }
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
pub(crate) fn transpose(rows: &mut [__m512i; 16]) {
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

/// 32 columns of four bytes in order, as unpacking leaves them: in each quarter of `low` four columns, and the four after them in `high`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_order(low: __m512i, high: __m512i) -> [__m512i; 2] {
    let first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    let second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    [_mm512_permutex2var_epi64(low, first, high), _mm512_permutex2var_epi64(low, second, high)]
}

/// 32 rows along K of 32 columns, `stride` apart, into the two tiles of a step of B.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn interleave<T: Load>(from: *const T, stride: usize, tiles: &mut [u16]) {
    let tiles = &mut tiles[..2 * TILE];
    for p in 0..16 {
        // SAFETY: the caller promises the rows; the tiles have 16 lines each.
        unsafe {
            let even = T::load_32(from.add(2 * p * stride), u32::MAX);
            let odd = T::load_32(from.add((2 * p + 1) * stride), u32::MAX);
            let [first, second] = in_order(_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd));
            let line = tiles.as_mut_ptr().add(p * LINE);
            _mm512_storeu_si512(line.cast(), first);
            _mm512_storeu_si512(line.add(TILE).cast(), second);
        }
    }
}

/// 32 rows across K of 32 columns, `stride` apart, into the two tiles of a step of A: line c holds column c.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn turn<T: Load>(from: *const T, stride: usize, tiles: &mut [u16]) {
    // Interleaving works within quarters of a vector: the lower half of each, four columns, and the upper half.
    let (mut lower, mut upper) = ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
    for (p, (lower, upper)) in lower.iter_mut().zip(&mut upper).enumerate() {
        // SAFETY: the caller promises the rows.
        let (even, odd) = unsafe {
            (T::load_32(from.add(2 * p * stride), u32::MAX), T::load_32(from.add((2 * p + 1) * stride), u32::MAX))
        };
        (*lower, *upper) = (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd));
    }
    let tiles = &mut tiles[..2 * TILE];
    for (half, mut rows) in [lower, upper].into_iter().enumerate() {
        transpose(&mut rows);
        for (i, row) in rows.into_iter().enumerate() {
            let column = i / 4 * 8 + half * 4 + i % 4;
            // SAFETY: the tiles have 32 lines.
            unsafe { _mm512_storeu_si512(tiles.as_mut_ptr().add(column * LINE).cast(), row) };
        }
    }
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

/// See [`super::kernel::Kernel::write_bf16`].
///
/// # Safety
///
/// As [`super::kernel::Kernel::write_bf16`] and [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn write_bf16(
    block: &[f32],
    c: *mut bf16,
    stride: usize,
    (rows, cols): (usize, usize),
    accumulate: bool,
) {
    if cols == BLOCK {
        for (i, block) in block.chunks_exact(BLOCK).take(rows).enumerate() {
            // SAFETY: 32 elements at row i of C by the caller's promise, 32 at `block`.
            unsafe {
                let to = c.add(i * stride);
                let mut low = _mm512_loadu_ps(block.as_ptr());
                let mut high = _mm512_loadu_ps(block.as_ptr().add(16));
                if accumulate {
                    low = _mm512_add_ps(low, widen(_mm256_loadu_si256(to.cast())));
                    high = _mm512_add_ps(high, widen(_mm256_loadu_si256(to.add(16).cast())));
                }
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.cast(), both);
            }
        }
        return;
    }
    for (i, block) in block.chunks_exact(BLOCK).take(rows).enumerate() {
        for (j, &x) in block.iter().take(cols).enumerate() {
            // SAFETY: inside the caller's part of C.
            unsafe {
                let to = c.add(i * stride + j);
                let before = if accumulate { (*to).to_f32() } else { 0.0 };
                to.write(<bf16 as Element>::from_f32(x + before));
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widen(x: __m256i) -> std::arch::x86_64::__m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}
