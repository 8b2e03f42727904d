//! Products whose result has few rows or few columns, of operands that both lie across K, such as the gradients of an adapter. Packing the
//! wide operand would take longer than multiplying it.
//!
//! The skinny operand is widened to f32 once. The wide operand is read in place, some rows of a few blocks of columns at a time. The next
//! rows are prefetched meanwhile, and rows that two passes need are in the first-level cache. Each element is one sum along K in one order,
//! whatever the number of threads. On AVX512-BF16 `skinny_bf16` adds up operands of bf16.

use std::ops::Range;

use candle_core::DType;

use super::matrix::{Matrix, MatrixMut, Strides, Threads};
use super::panels::Buffer;
use super::small_m::put_in_row;
use crate::cache::prefetch_read;
use crate::needs::elements;
use crate::parallel::{for_each_part, rows_per_part};
use crate::processor::{InstructionSet, processor};
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};
use crate::storage::{Element, Operand};

/// The most rows or columns that a skinny result has.
pub(super) const MOST: usize = WIDTH;
/// Columns in a block of the wide operand. A thread keeps a block's sums at a time.
pub(super) const BLOCK: usize = 2 * WIDTH;
/// The most blocks that a thread has at a time.
pub(super) const BLOCKS: usize = 16;
/// Rows of the wide operand that are multiplied with all of these blocks before the next rows are.
pub(super) const DEPTH: usize = 64;
/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Whether `A B` is a product for this module.
pub(super) fn takes(a: &Matrix, b: &Matrix) -> bool {
    let are_alike =
        matches!((a.data, b.data), (Operand::F32(_), Operand::F32(_)) | (Operand::Bf16(_), Operand::Bf16(_)));
    are_alike && is_skinny(a.rows, b.cols) && a.row_stride == 1 && b.col_stride == 1 && a.cols > 0
}

/// Whether a result (M, N) is skinny.
pub(super) fn is_skinny(m: usize, n: usize) -> bool {
    m.min(n) <= MOST
}

/// Bytes of a skinny operand in the form in which it is multiplied, [widened](widen) or in pairs of bf16. A thread keeps them for the next
/// product.
pub(super) fn kept_bytes(k: usize, operands: DType) -> u64 {
    let is_in_pairs = operands == DType::BF16 && processor().instruction_set == InstructionSet::Avx512Bf16;
    elements([if is_in_pairs { k.div_ceil(2) } else { k }, MOST, size_of::<f32>()])
}

/// Sums of a block of columns with each skinny column.
pub(super) type Sums = [[f32; BLOCK]; MOST];

/// The skinny and the wide operand of `A B`, both as rows along K, and whether the wide operand is A.
pub(super) fn operands<'a>(a: &Matrix<'a>, b: &Matrix<'a>) -> (Matrix<'a>, Matrix<'a>, bool) {
    if a.rows > b.cols { (*b, a.t(), true) } else { (a.t(), *b, false) }
}

/// `C (+)= A B`.
pub(super) fn multiply(c: &MatrixMut, a: &Matrix, b: &Matrix, accumulate: bool, threads: Threads) {
    let (skinny, wide, is_turned) = operands(a, b);
    let mut values = Buffer::new::<f32>(skinny.rows * MOST);
    match skinny.data {
        Operand::F32(data) => widen(data, (skinny.row_stride, skinny.cols), values.cells()),
        Operand::Bf16(data) => widen(data, (skinny.row_stride, skinny.cols), values.cells()),
    }
    let values = values.read::<f32>().as_chunks::<MOST>().0;
    in_blocks(c, (is_turned, wide.cols, wide.rows), accumulate, threads, |columns, sums| match wide.data {
        Operand::F32(data) => add_up(values, skinny.cols, wide.with(data), columns, sums),
        Operand::Bf16(data) => add_up(values, skinny.cols, wide.with(data), columns, sums),
    });
}

/// Writes or adds the sums over `k` rows of all `columns` columns of the wide operand to rows of C, or to its columns if it is turned.
/// `add_up` computes the sums of some blocks at a time.
pub(super) fn in_blocks(
    c: &MatrixMut,
    (is_turned, columns, k): (bool, usize, usize),
    accumulate: bool,
    threads: Threads,
    add_up: impl Fn(Range<usize>, &mut [Sums; BLOCKS]) + Sync,
) {
    let blocks = columns.div_ceil(BLOCK);
    let together = if threads.count() == 1 { blocks } else { rows_per_part(blocks, BLOCK * k) }.min(BLOCKS);
    for_each_part(blocks.div_ceil(together), |part| {
        let first = part * together * BLOCK;
        let columns = first..columns.min(first + together * BLOCK);
        let mut sums = [[[0.0; BLOCK]; MOST]; BLOCKS];
        add_up(columns.clone(), &mut sums);
        for (columns, sums) in blocks_of(columns).zip(&sums) {
            let (rows, cols) = if is_turned { (columns, 0..c.cols) } else { (0..c.rows, columns) };
            for (number, row) in rows.enumerate() {
                let sums = (0..cols.len()).map(|col| if is_turned { sums[col][number] } else { sums[number][col] });
                // SAFETY: rows or columns of a block are that block's alone.
                unsafe { put_in_row(c, row, cols.clone(), sums, accumulate) };
            }
        }
    });
}

/// Columns in blocks.
pub(super) fn blocks_of(columns: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    columns.clone().step_by(BLOCK).map(move |first| first..columns.end.min(first + BLOCK))
}

/// Converts rows of `cols` elements, `stride` apart, to contiguous rows that are filled up with zeros.
pub(super) fn widen<T: Element>(from: &[T], (stride, cols): (usize, usize), to: &mut [f32]) {
    for (k, to) in to.as_chunks_mut::<MOST>().0.iter_mut().enumerate() {
        let row = &from[k * stride..][..cols];
        *to = match row.first_chunk::<MOST>() {
            Some(row) => row.map(Element::to_f32),
            None => std::array::from_fn(|i| row.get(i).map_or(0.0, |x| x.to_f32())),
        };
    }
}

simd! {
    /// Sums over K of each of `count` skinny columns times each of some columns of the wide operand, in blocks.
    fn add_up<S, T: Lanes>(
        s,
        skinny: &[[f32; MOST]],
        count: usize,
        wide: Strides<&[T]>,
        columns: Range<usize>,
        sums: &mut [Sums; BLOCKS],
    ) {
        for (number, skinny) in skinny.chunks(DEPTH).enumerate() {
            let rows = (&wide.data[number * DEPTH * wide.row_stride..], wide.row_stride);
            for (columns, sums) in blocks_of(columns.clone()).zip(&mut *sums) {
                block::<S, T>(s, skinny, count, rows, columns, sums);
            }
        }
    }
}

/// Adds the products of these rows to the sums of a block.
#[inline(always)]
fn block<S: Simd, T: Lanes>(
    s: S,
    skinny: &[[f32; MOST]],
    count: usize,
    wide: (&[T], usize),
    columns: Range<usize>,
    sums: &mut Sums,
) {
    // No more sums than there are registers.
    let is_roomy = S::SUMS >= 8 * BLOCK / WIDTH;
    let mut first = 0;
    while first < count {
        if is_roomy {
            tile::<S, T, 8, 2>(s, (skinny, first), wide, columns.clone(), 0, sums);
            first += 8;
        } else {
            for from in columns.clone().step_by(WIDTH) {
                let half = from..columns.end.min(from + WIDTH);
                tile::<S, T, 4, 1>(s, (skinny, first), wide, half, from - columns.start, sums);
            }
            first += 4;
        }
    }
}

/// The same for `R` skinny columns from `first` on and up to `J` vectors of wide columns, whose sums begin at `at`.
#[inline(always)]
fn tile<S: Simd, T: Lanes, const R: usize, const J: usize>(
    s: S,
    (skinny, first): (&[[f32; MOST]], usize),
    (wide, stride): (&[T], usize),
    columns: Range<usize>,
    at: usize,
    sums: &mut Sums,
) {
    let mut lanes = [[s.splat(0.0); J]; R];
    for (sums, lanes) in sums[first..first + R].iter_mut().zip(&mut lanes) {
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane = s.load(sums_of(sums, at + j * WIDTH));
        }
    }
    for (k, skinny) in skinny.iter().enumerate() {
        let row = &wide[k * stride + columns.start..][..columns.len()];
        if first == 0 {
            prefetch_ahead(row, DEPTH * stride);
        }
        let row: [S::F; J] = if row.len() == J * WIDTH {
            let row = row.as_chunks::<WIDTH>().0;
            std::array::from_fn(|j| T::load(s, &row[j]))
        } else {
            let part = |j: usize| &row[(j * WIDTH).min(row.len())..((j + 1) * WIDTH).min(row.len())];
            std::array::from_fn(|j| T::load(s, &padded(part(j), T::from_f32(0.0))))
        };
        for i in 0..R {
            let factor = s.splat(skinny[first + i]);
            for j in 0..J {
                lanes[i][j] = s.mul_add(factor, row[j], lanes[i][j]);
            }
        }
    }
    for (sums, lanes) in sums[first..first + R].iter_mut().zip(lanes) {
        for (j, lane) in lanes.into_iter().enumerate() {
            s.store(lane, sums_of(sums, at + j * WIDTH));
        }
    }
}

/// A vector of sums.
#[inline(always)]
fn sums_of(row: &mut [f32; BLOCK], at: usize) -> &mut [f32; WIDTH] {
    row[at..].first_chunk_mut().expect("as many as lanes")
}

/// Prefetches the memory `ahead` elements after a part of a row.
#[inline(always)]
pub(super) fn prefetch_ahead<T>(row: &[T], ahead: usize) {
    for line in (0..row.len()).step_by(LINE / size_of::<T>()) {
        prefetch_read(row.as_ptr().wrapping_add(ahead + line));
    }
}
