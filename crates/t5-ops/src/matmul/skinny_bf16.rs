//! Sums of [`super::skinny`] in bf16 on AVX512-BF16: two rows of the wide operand at a time, interleaved as they are loaded.
//!
//! Each element is one sum along K in one order, whatever the number of threads. Other instruction sets have another order.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_maskz_loadu_epi16, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::mem::transmute;
use std::ops::Range;

use half::bf16;

use super::matrix::{Matrix, MatrixMut, Strides, Threads};
use super::pairs::in_order;
use super::panels::Buffer;
use super::skinny::{self, BLOCK, BLOCKS, DEPTH, MOST, Sums, blocks_of, in_blocks, prefetch_ahead};
use crate::isa::Isa;
use crate::simd::WIDTH;
use crate::storage::Operand;

/// Skinny columns whose sums are in registers at a time.
const TOGETHER: usize = 8;

/// Rows of bf16.
type Bf16<'a> = Strides<&'a [bf16]>;

/// Returns the operands of `A B`, which is a product of [`skinny`], if they are multiplied here.
pub(super) fn operands<'a>(isa: Isa, a: &Matrix<'a>, b: &Matrix<'a>) -> Option<(Bf16<'a>, Bf16<'a>, bool)> {
    let (skinny, wide, is_turned) = skinny::operands(a, b);
    match (skinny.data, wide.data) {
        (Operand::Bf16(a), Operand::Bf16(b)) if isa == Isa::Avx512Bf16 => {
            Some((skinny.with(a), wide.with(b), is_turned))
        }
        _ => None,
    }
}

/// `C (+)= A B`.
///
/// # Safety
///
/// The machine has AVX512-BF16.
pub(super) unsafe fn multiply(
    c: &MatrixMut,
    (skinny, wide, is_turned): (Bf16, Bf16, bool),
    accumulate: bool,
    threads: Threads,
) {
    let pairs = pairs(skinny);
    let pairs = pairs.read::<u32>().as_chunks::<MOST>().0;
    in_blocks(c, (is_turned, wide.cols, wide.rows), accumulate, threads, |columns, sums| {
        // SAFETY: by the caller's promise.
        unsafe { add_up(pairs, skinny.cols, wide, columns, sums) }
    });
}

/// Packs the rows of the skinny operand in pairs, each filled up with zeros to [`MOST`] columns: the first row of a pair in the lower half.
fn pairs(skinny: Bf16) -> Buffer {
    let mut buffer = Buffer::new::<u32>(skinny.rows.div_ceil(2) * MOST);
    for (pair, to) in buffer.cells::<u32>().as_chunks_mut::<MOST>().0.iter_mut().enumerate() {
        let bits = |row: usize, column: usize| {
            let is_there = row < skinny.rows && column < skinny.cols;
            if is_there { u32::from(skinny.data[row * skinny.row_stride + column].to_bits()) } else { 0 }
        };
        *to = std::array::from_fn(|column| bits(2 * pair, column) | bits(2 * pair + 1, column) << 16);
    }
    buffer
}

/// Sums over K of each of `count` skinny columns times each of some columns of the wide operand, in blocks.
///
/// # Safety
///
/// The machine has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add_up(skinny: &[[u32; MOST]], count: usize, wide: Bf16, columns: Range<usize>, sums: &mut [Sums; BLOCKS]) {
    for (number, skinny) in skinny.chunks(DEPTH / 2).enumerate() {
        let rows = wide.rows - number * DEPTH;
        let data = &wide.data[number * DEPTH * wide.row_stride..];
        for (columns, sums) in blocks_of(columns.clone()).zip(&mut *sums) {
            for first in (0..count).step_by(TOGETHER) {
                // SAFETY: by the caller's promise.
                unsafe { tile((skinny, first), (data, rows, wide.row_stride), columns.clone(), sums) };
            }
        }
    }
}

/// Adds the products of some rows to the sums of a block, for skinny columns from `first` on. `wide`: elements, rows that exist, elements
/// from one row to the next.
///
/// # Safety
///
/// The machine has AVX512-BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile(
    (skinny, first): (&[[u32; MOST]], usize),
    (wide, rows, stride): (&[bf16], usize, usize),
    columns: Range<usize>,
    sums: &mut Sums,
) {
    let mask = if columns.len() == BLOCK { u32::MAX } else { (1 << columns.len()) - 1 };
    let mut lanes = [[_mm512_setzero_ps(); 2]; TOGETHER];
    for (pair, skinny) in skinny.iter().enumerate() {
        let load = |row: usize| -> __m512i {
            let row = &wide[row * stride + columns.start..][..columns.len()];
            if first == 0 {
                prefetch_ahead(row, DEPTH * stride);
            }
            // SAFETY: the mask has the elements of the row.
            unsafe { _mm512_maskz_loadu_epi16(mask, row.as_ptr().cast()) }
        };
        let even = load(2 * pair);
        let odd = if 2 * pair + 1 < rows { load(2 * pair + 1) } else { _mm512_setzero_si512() };
        let pairs = [_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)];
        // SAFETY: 64 bytes reinterpreted.
        let pairs: [__m512bh; 2] = unsafe { transmute(pairs) };
        for (factor, lanes) in skinny[first..first + TOGETHER].iter().zip(&mut lanes) {
            // SAFETY: as above.
            let factor: __m512bh = unsafe { transmute(_mm512_set1_epi32(*factor as i32)) };
            lanes[0] = _mm512_dpbf16_ps(lanes[0], factor, pairs[0]);
            lanes[1] = _mm512_dpbf16_ps(lanes[1], factor, pairs[1]);
        }
    }
    for (sums, lanes) in sums[first..first + TOGETHER].iter_mut().zip(lanes) {
        let [low, high] = lanes.map(|x| _mm512_castps_si512(x));
        for (sums, part) in sums.as_chunks_mut::<WIDTH>().0.iter_mut().zip(in_order(low, high)) {
            let part = _mm512_castsi512_ps(part);
            // SAFETY: sixteen elements.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), part)) };
        }
    }
}
