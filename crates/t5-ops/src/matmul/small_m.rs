//! Products of a few rows with the transpose of a weight, such as the tokens of a step of generation. Every element is a dot product with a
//! row of the weight. The weight is read once, in place, and never packed.
//!
//! Such a product takes as long as reading the weight from memory. Each element is summed in one order, whatever the other rows and the
//! number of threads.

use std::ops::Range;

use super::matrix::{Factor, Matrix, MatrixMut, Stored, Strides, Threads};
use super::panels::Buffer;
use crate::cache::prefetch_read;
use crate::parallel::{for_each_part, rows_per_part};
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};
use crate::storage::{Element, Operand, Target};

/// The most rows of A. With more rows arithmetic takes longer than memory, and packing the weight pays.
pub(super) const MAX_ROWS: usize = 16;
/// Rows of A at a time.
const TOGETHER: usize = 8;
/// A row of the weight is prefetched this many bytes ahead of its use, where rows are read one after the other.
const AHEAD_BYTES: usize = 4 << 10;
/// The most rows of the weight in one call.
const GROUP: usize = 16;
/// Rows of a narrow weight that are widened at a time.
const WIDENED: usize = 4;

/// The rows of A.
type Rows<'a, A> = Strides<&'a [A]>;

/// Whether `A B` is a product for this module: few rows, and both operands lie along K.
pub(super) fn takes(a: &Matrix, b: &Factor) -> bool {
    (1..=MAX_ROWS).contains(&a.rows) && a.col_stride == 1 && b.row_stride == 1 && a.cols > 0
}

/// `C (+)= A B` in the precision of A: if A is bf16 and B is not, B is rounded to bf16.
pub(super) fn multiply(c: &MatrixMut, a: Matrix, b: Factor, accumulate: bool, threads: Threads) {
    assert!(c.rows == a.rows && c.cols == b.cols && a.cols == b.rows, "the sizes of a product");
    let columns = if threads.count() == 1 { c.cols } else { rows_per_part(c.cols, b.rows) };
    for_each_part(c.cols.div_ceil(columns.max(1)), |part| {
        let columns = part * columns..c.cols.min((part + 1) * columns);
        let part = Part { c, columns, accumulate };
        match a.data {
            Operand::F32(x) => part.multiply(a.with(x), b.t()),
            Operand::Bf16(x) => part.multiply(a.with(x), b.t()),
        }
    });
}

/// Some columns of a product.
struct Part<'a> {
    c: &'a MatrixMut<'a>,
    columns: Range<usize>,
    accumulate: bool,
}

impl Part<'_> {
    fn multiply<A: Lanes>(&self, a: Rows<A>, weight: Factor) {
        let (k, stride) = (a.cols, weight.row_stride);
        let is_narrow = matches!(weight.data, Stored::Narrow(_));
        let group = if is_narrow { WIDENED } else { GROUP };
        let mut wide = Buffer::new::<f32>(if is_narrow { group * k } else { 0 });
        for first in self.columns.clone().step_by(group) {
            let columns = first..self.columns.end.min(first + group);
            match weight.data {
                Stored::Wide(Operand::F32(w)) => self.group(a, columns, &w[first * stride..], stride),
                Stored::Wide(Operand::Bf16(w)) => self.group(a, columns, &w[first * stride..], stride),
                Stored::Narrow(_) => {
                    let rows = wide.cells::<f32>().chunks_exact_mut(k);
                    columns.clone().zip(rows).for_each(|(column, row)| weight.widen_row(column, row));
                    self.group(a, columns, wide.read::<f32>(), k);
                }
            }
        }
    }

    /// Computes up to [`GROUP`] columns; `w` begins with the weight's row of the first column.
    fn group<A: Lanes, W: Lanes>(&self, a: Rows<A>, columns: Range<usize>, w: &[W], stride: usize) {
        let mut sums = [[0.0; GROUP]; MAX_ROWS];
        dots(a, w, stride, columns.len(), &mut sums);
        for (i, sums) in sums[..a.rows].iter().enumerate() {
            // SAFETY: columns of a part are that part's alone.
            unsafe { put_in_row(self.c, i, columns.clone(), *sums, self.accumulate) };
        }
    }
}

/// Writes or adds sums.
#[inline(always)]
pub(super) fn put<T: Element>(to: &mut [T], sums: impl IntoIterator<Item = f32>, accumulate: bool) {
    for (to, sum) in to.iter_mut().zip(sums) {
        *to = T::from_f32(if accumulate { to.to_f32() + sum } else { sum });
    }
}

/// Writes or adds sums to some columns of a row of C.
///
/// # Safety
///
/// Nothing else reaches these elements.
#[inline(always)]
pub(super) unsafe fn put_in_row(
    c: &MatrixMut,
    row: usize,
    columns: Range<usize>,
    sums: impl IntoIterator<Item = f32>,
    accumulate: bool,
) {
    assert!(row < c.rows && columns.end <= c.cols && !c.turned, "row {row}, columns {columns:?}");
    let (start, count) = (c.start + row * c.stride + columns.start, columns.len());
    match c.data {
        // SAFETY: inside C by its constructor's check, and the caller's alone.
        Target::F32(data) => put(unsafe { data.slice(start, count) }, sums, accumulate),
        // SAFETY: as above.
        Target::Bf16(data) => put(unsafe { data.slice(start, count) }, sums, accumulate),
    }
}

simd! {
    /// The dot products of the rows of A with `columns` rows of a weight, which begin `stride` elements apart.
    fn dots<S, A: Lanes, W: Lanes>(
        s,
        a: Rows<'_, A>,
        w: &[W],
        stride: usize,
        columns: usize,
        sums: &mut [[f32; GROUP]; MAX_ROWS],
    ) {
        let together = if S::SUMS < 2 * TOGETHER { TOGETHER / 2 } else { TOGETHER };
        for first in (0..a.rows).step_by(together) {
            let count = together.min(a.rows - first);
            let sums = &mut sums[first..first + count];
            let rows = (a, first);
            match count {
                1 => tile::<S, A, W, 1, 1>(s, rows, (w, stride, columns), sums),
                2 => tile::<S, A, W, 2, 1>(s, rows, (w, stride, columns), sums),
                3 => tile::<S, A, W, 3, 1>(s, rows, (w, stride, columns), sums),
                4 => tile::<S, A, W, 4, 1>(s, rows, (w, stride, columns), sums),
                5 => tile::<S, A, W, 5, 2>(s, rows, (w, stride, columns), sums),
                6 => tile::<S, A, W, 6, 2>(s, rows, (w, stride, columns), sums),
                7 => tile::<S, A, W, 7, 2>(s, rows, (w, stride, columns), sums),
                _ => tile::<S, A, W, 8, 2>(s, rows, (w, stride, columns), sums),
            }
        }
    }
}

/// Multiplies `R` rows of A from `first` on with the rows of the weight, `J` of them at a time. A few rows of A wait for the weight, which
/// is prefetched. Many rows wait for their own elements, which two rows of the weight share.
#[inline(always)]
fn tile<S: Simd, A: Lanes, W: Lanes, const R: usize, const J: usize>(
    s: S,
    (a, first): (Rows<A>, usize),
    (w, stride, columns): (&[W], usize, usize),
    sums: &mut [[f32; GROUP]],
) {
    let chunks = a.cols / WIDTH;
    let x: [_; R] = std::array::from_fn(|i| a.data[(first + i) * a.row_stride..][..a.cols].as_chunks::<WIDTH>());
    // These lengths are known to the compiler, so the loop has no other checks.
    let (x, x_rest) = (x.map(|(whole, _)| &whole[..chunks]), x.map(|(_, rest)| rest));
    // One loop, whose length is not known at compile time. Unrolled, each load would see pieces of the weight, and processors prefetch for
    // a load that continues where it stopped.
    for column in (0..columns).step_by(J) {
        // In a partial group the last row is read again.
        let row = |j: usize| &w[(column + j).min(columns - 1) * stride..][..a.cols];
        let w: [_; J] = std::array::from_fn(|j| row(j).as_chunks::<WIDTH>());
        let (w, w_rest) = (w.map(|(whole, _)| &whole[..chunks]), w.map(|(_, rest)| rest));
        let mut lanes = [[s.splat(0.0); R]; J];
        for at in 0..chunks {
            for j in 0..J {
                let ahead = if J == 1 { AHEAD_BYTES / size_of::<W>() } else { J * stride };
                prefetch_read(w[j].as_ptr().cast::<W>().wrapping_add(at * WIDTH + ahead));
                let w = weight::<S, A, W>(s, &w[j][at]);
                for i in 0..R {
                    lanes[j][i] = s.mul_add(A::load(s, &x[i][at]), w, lanes[j][i]);
                }
            }
        }
        if !a.cols.is_multiple_of(WIDTH) {
            for j in 0..J {
                let w = weight::<S, A, W>(s, &padded(w_rest[j], W::from_f32(0.0)));
                for i in 0..R {
                    let x = A::load(s, &padded(x_rest[i], A::from_f32(0.0)));
                    lanes[j][i] = s.mul_add(x, w, lanes[j][i]);
                }
            }
        }
        for j in 0..J {
            for i in 0..R {
                sums[i][(column + j).min(columns - 1)] = s.sum(lanes[j][i]);
            }
        }
    }
}

/// Sixteen elements of a weight, rounded to the precision of A.
#[inline(always)]
fn weight<S: Simd, A: Lanes, W: Lanes>(s: S, w: &[W; WIDTH]) -> S::F {
    let w = W::load(s, w);
    if size_of::<A>() >= size_of::<W>() {
        return w;
    }
    let mut rounded = [A::from_f32(0.0); WIDTH];
    A::store(s, w, &mut rounded);
    A::load(s, &rounded)
}
