//! Products in f32 whose result has many rows and a few columns, such as an adapter's input times its first matrix. Such a result fills
//! half of a block of the kernels for AVX-512.
//!
//! B is packed once, and read for several rows of A at a time, whose sums stay in registers. Each element is one sum along K in one
//! order, whatever the number of threads. Tile registers are faster than this; for AVX512-BF16 there is `small_n_bf16`.

use std::ops::Range;

use super::geometry::Geometry;
use super::matrix::{Factor, MatrixMut, Stored, Strides, Threads};
use super::panels::Buffer;
use super::skinny::{self, MOST};
use super::small_m::{MAX_ROWS, put_in_row};
use crate::cache::prefetch_read;
use crate::parallel::{for_each_part, rows_per_part};
use crate::simd::{Simd, WIDTH, padded, simd};
use crate::storage::Operand;

/// Rows of A at a time.
const TOGETHER: usize = 8;
/// A row of A is prefetched this many values of K ahead of its use.
const AHEAD: usize = 4 * WIDTH;

/// Whether a result (M, N) suits this module, if rows of A lie along K: it would leave half of a kernel's blocks empty.
pub(super) fn is_better(m: usize, n: usize, kernel: Geometry) -> bool {
    m > MAX_ROWS && n <= MOST.min(kernel.columns() / 2)
}

/// Returns the operands of `A B`, if they can be multiplied here.
pub(super) fn operands<'a>(a: &Factor<'a>, b: &Factor<'a>) -> Option<[Strides<&'a [f32]>; 2]> {
    let (Stored::Wide(Operand::F32(left)), Stored::Wide(Operand::F32(right))) = (a.data, b.data) else { return None };
    let is_taken = b.cols <= MOST && a.col_stride == 1 && a.cols > 0 && !a.rounds && !b.rounds;
    is_taken.then(|| [a.with(left), b.with(right)])
}

/// `C (+)= A B`.
pub(super) fn multiply(c: &MatrixMut, [a, b]: [Strides<&[f32]>; 2], accumulate: bool, threads: Threads) {
    assert!(c.rows == a.rows && c.cols == b.cols && a.cols == b.rows, "the sizes of a product");
    let mut packed = Buffer::new::<f32>(a.cols * MOST);
    pack(b, packed.cells());
    let packed = packed.read::<f32>().as_chunks::<MOST>().0;
    in_rows::<TOGETHER>(c, a.cols, accumulate, threads, |rows, sums| add_up(a, rows, packed, sums));
}

/// Writes or adds the sums over `k` values of all rows of C. `add_up` computes them for up to `R` rows at a time.
pub(super) fn in_rows<const R: usize>(
    c: &MatrixMut,
    k: usize,
    accumulate: bool,
    threads: Threads,
    add_up: impl Fn(Range<usize>, &mut [[f32; MOST]; R]) + Sync,
) {
    let rows = if threads.count() == 1 { c.rows } else { rows_per_part(c.rows, k).next_multiple_of(R) };
    for_each_part(c.rows.div_ceil(rows), |part| {
        let end = c.rows.min((part + 1) * rows);
        for first in (part * rows..end).step_by(R) {
            let rows = first..end.min(first + R);
            let mut sums = [[0.0; MOST]; R];
            add_up(rows.clone(), &mut sums);
            for (row, sums) in rows.zip(sums) {
                // SAFETY: rows of a part are that part's alone.
                unsafe { put_in_row(c, row, 0..c.cols, sums, accumulate) };
            }
        }
    });
}

/// Rows one after the other, filled up with zeros.
fn pack(from: Strides<&[f32]>, to: &mut [f32]) {
    if from.col_stride == 1 {
        return skinny::widen(from.data, (from.row_stride, from.cols), to);
    }
    let to = to.as_chunks_mut::<MOST>().0;
    if from.cols < MOST {
        to.fill([0.0; MOST]);
    }
    for column in 0..from.cols {
        let from = from.data[column * from.col_stride..].iter().step_by(from.row_stride);
        to.iter_mut().zip(from).for_each(|(to, &x)| to[column] = x);
    }
}

simd! {
    /// Sums over K of up to [`TOGETHER`] rows of A times every column.
    fn add_up<S>(
        s,
        a: Strides<&[f32]>,
        rows: Range<usize>,
        packed: &[[f32; MOST]],
        sums: &mut [[f32; MOST]; TOGETHER],
    ) {
        // No more sums than there are registers.
        if S::SUMS > TOGETHER {
            tile::<S, TOGETHER>(s, a, rows, packed, sums);
        } else {
            let middle = rows.end.min(rows.start + TOGETHER / 2);
            let halves = [rows.start..middle, middle..rows.end];
            for (rows, sums) in halves.into_iter().zip(sums.as_chunks_mut::<{ TOGETHER / 2 }>().0) {
                tile::<S, { TOGETHER / 2 }>(s, a, rows, packed, sums);
            }
        }
    }
}

/// Multiplies up to `R` rows. Some elements of every row are gathered side by side before they are used: rows a power of two apart fall
/// into few sets of the cache.
#[inline(always)]
fn tile<S: Simd, const R: usize>(
    s: S,
    a: Strides<&[f32]>,
    rows: Range<usize>,
    packed: &[[f32; MOST]],
    sums: &mut [[f32; MOST]; R],
) {
    if rows.is_empty() {
        return;
    }
    // If there are fewer rows, the last one is multiplied again.
    let row = |i: usize| &a.data[(rows.start + i).min(rows.end - 1) * a.row_stride..][..a.cols];
    let rows: [&[f32]; R] = std::array::from_fn(row);
    let (packed, packed_rest) = packed[..a.cols].as_chunks::<WIDTH>();
    let pieces = rows.map(|row| &row.as_chunks::<WIDTH>().0[..packed.len()]);
    let mut lanes = [s.splat(0.0); R];
    let mut piece = [[0f32; WIDTH]; R];
    for (at, packed) in packed.iter().enumerate() {
        for i in 0..R {
            prefetch_read(pieces[i].as_ptr().cast::<f32>().wrapping_add(at * WIDTH + AHEAD));
            piece[i] = pieces[i][at];
        }
        multiply_add(s, &piece, packed, &mut lanes);
    }
    for i in 0..R {
        piece[i] = padded(&rows[i][a.cols - packed_rest.len()..], 0.0);
    }
    multiply_add(s, &piece, packed_rest, &mut lanes);
    for i in 0..R {
        s.store(lanes[i], &mut sums[i]);
    }
}

/// Adds the products of some elements of each row and rows of B.
#[inline(always)]
fn multiply_add<S: Simd, const R: usize>(
    s: S,
    piece: &[[f32; WIDTH]; R],
    packed: &[[f32; MOST]],
    lanes: &mut [S::F; R],
) {
    for (k, row) in packed.iter().enumerate() {
        let row = s.load(row);
        for i in 0..R {
            lanes[i] = s.mul_add(s.splat(piece[i][k]), row, lanes[i]);
        }
    }
}
