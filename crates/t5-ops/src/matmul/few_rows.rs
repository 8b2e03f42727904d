//! Products of a few rows with the transpose of a weight, as the tokens of a step of generation are: every element is a dot
//! product with a row of the weight, which is read once, where it lies, and never packed.
//!
//! Such a product takes as long as the weight takes to come from memory. Each element is summed in one order, whatever the rows
//! beside it and the number of threads.

use half::bf16;

use super::matrix::{Factor, Matrix, MatrixMut, Stored, Threads};
use crate::parallel::{for_each_part, rows_per_part};
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};
use crate::storage::{Element, Operand, Target};

/// Up to so many rows. Beyond it packing pays: the units that multiply are what is short.
pub(super) const MOST_ROWS: usize = 16;
/// Rows whose sums are kept in registers beside each other.
const TOGETHER: usize = 8;

/// Whether `A B` is a product for this module: few rows, and both operands lie along K.
pub(super) fn takes(a: &Factor, b: &Factor) -> bool {
    (1..=MOST_ROWS).contains(&a.rows) && a.wide().is_some() && a.col_stride == 1 && b.row_stride == 1 && a.cols > 0
}

/// `C (+)= A B` in the precision of A: where A is bf16 and B is not, B is rounded to it.
pub(super) fn multiply(c: &MatrixMut, a: Matrix, b: Factor, accumulate: bool, threads: Threads) {
    assert!(c.rows == a.rows && c.cols == b.cols && a.cols == b.rows, "the sizes of a product");
    let rounds = matches!(a.data, Operand::Bf16(_)) && !b.is_bf16();
    let columns = if threads.count() == 1 { c.cols } else { rows_per_part(c.cols, b.rows) };
    for_each_part(c.cols.div_ceil(columns.max(1)), |part| {
        let first = part * columns;
        let product = Part { c, accumulate, first, count: columns.min(c.cols - first), stride: b.col_stride };
        match (a.data, b.data) {
            (Operand::F32(x), Stored::Wide(Operand::F32(w))) => product.of::<f32, f32>(a.with(x), w, rounds),
            (Operand::F32(x), Stored::Wide(Operand::Bf16(w))) => product.of::<f32, bf16>(a.with(x), w, rounds),
            (Operand::Bf16(x), Stored::Wide(Operand::F32(w))) => product.of::<bf16, f32>(a.with(x), w, rounds),
            (Operand::Bf16(x), Stored::Wide(Operand::Bf16(w))) => product.of::<bf16, bf16>(a.with(x), w, rounds),
            (Operand::F32(x), Stored::Narrow(_)) => product.of_narrow(a.with(x), b, rounds),
            (Operand::Bf16(x), Stored::Narrow(_)) => product.of_narrow(a.with(x), b, rounds),
        }
    });
}

/// Some columns of a product.
struct Part<'a> {
    c: &'a MatrixMut<'a>,
    accumulate: bool,
    first: usize,
    count: usize,
    /// Elements between two rows of the weight.
    stride: usize,
}

/// The rows of A.
type Rows<'a, A> = super::matrix::Strides<&'a [A]>;

impl Part<'_> {
    fn of<A: Lanes, W: Lanes>(&self, a: Rows<A>, w: &[W], rounds: bool) {
        let mut sums = [[0.0; GROUP]; MOST_ROWS];
        let (k, end) = (a.cols, self.first + self.count);
        for column in (self.first..end).step_by(GROUP) {
            let count = GROUP.min(end - column);
            // The last rows of a group that is not whole are read twice.
            let row = |i: usize| &w[(column + i.min(count - 1)) * self.stride..][..k];
            dots(a, &[row(0), row(1), row(2), row(3)], rounds, &mut sums);
            self.write(column, count, &sums[..a.rows]);
        }
    }

    fn of_narrow<A: Lanes>(&self, a: Rows<A>, b: Factor, rounds: bool) {
        let (weight, k) = (b.t(), a.cols);
        let mut wide = vec![0f32; GROUP * k];
        let mut sums = [[0.0; GROUP]; MOST_ROWS];
        let end = self.first + self.count;
        for column in (self.first..end).step_by(GROUP) {
            let count = GROUP.min(end - column);
            wide.chunks_exact_mut(k).take(count).enumerate().for_each(|(i, row)| weight.widen_row(column + i, row));
            let row = |i: usize| &wide[i * k..][..k];
            dots(a, &[row(0), row(1), row(2), row(3)], rounds, &mut sums);
            self.write(column, count, &sums[..a.rows]);
        }
    }

    /// Writes or adds columns `[column, column + count)` of every row.
    fn write(&self, column: usize, count: usize, sums: &[[f32; GROUP]]) {
        for (i, sums) in sums.iter().enumerate() {
            let start = self.c.start + i * self.c.row_stride + column;
            match self.c.data {
                // SAFETY: inside C by the constructor's check; columns of a part are that part's alone.
                Target::F32(data) => put(unsafe { data.slice(start, count) }, sums, self.accumulate),
                // SAFETY: as above.
                Target::Bf16(data) => put(unsafe { data.slice(start, count) }, sums, self.accumulate),
            }
        }
    }
}

fn put<T: Element>(to: &mut [T], sums: &[f32], accumulate: bool) {
    for (to, sum) in to.iter_mut().zip(sums) {
        *to = T::from_f32(if accumulate { to.to_f32() + sum } else { *sum });
    }
}

/// Rows of the weight in one call.
const GROUP: usize = 4;

simd! {
    /// The dot products of the rows of A with rows of a weight.
    fn dots<S, A: Lanes, W: Lanes>(
        s,
        a: Rows<'_, A>,
        w: &[&[W]; GROUP],
        rounds: bool,
        sums: &mut [[f32; GROUP]; MOST_ROWS],
    ) {
        for first in (0..a.rows).step_by(TOGETHER) {
            let count = TOGETHER.min(a.rows - first);
            let sums = &mut sums[first..first + count];
            match count {
                1 => tile::<S, A, W, 1>(s, a, first, w, rounds, sums),
                2 => tile::<S, A, W, 2>(s, a, first, w, rounds, sums),
                3 => tile::<S, A, W, 3>(s, a, first, w, rounds, sums),
                4 => tile::<S, A, W, 4>(s, a, first, w, rounds, sums),
                5 => tile::<S, A, W, 5>(s, a, first, w, rounds, sums),
                6 => tile::<S, A, W, 6>(s, a, first, w, rounds, sums),
                7 => tile::<S, A, W, 7>(s, a, first, w, rounds, sums),
                _ => tile::<S, A, W, 8>(s, a, first, w, rounds, sums),
            }
        }
    }
}

/// `R` rows of A from `first` on with the rows of the weight, one after the other: along a single stream the processor reads
/// ahead. Four rows at a time took 1.4 times as long for one row of A.
#[inline(always)]
fn tile<S: Simd, A: Lanes, W: Lanes, const R: usize>(
    s: S,
    a: Rows<A>,
    first: usize,
    w: &[&[W]; GROUP],
    rounds: bool,
    sums: &mut [[f32; GROUP]],
) {
    let k = a.cols;
    let x: [&[A]; R] = of_each(|i| &a.data[(first + i) * a.row_stride..][..k]);
    let whole = k - k % WIDTH;
    for (j, w) in w.iter().enumerate() {
        let mut lanes = [s.splat(0.0); R];
        for at in (0..whole).step_by(WIDTH) {
            let w = weight(s, chunk(w, at), rounds);
            for i in 0..R {
                lanes[i] = s.mul_add(A::load(s, chunk(x[i], at)), w, lanes[i]);
            }
        }
        if whole < k {
            let w = weight(s, &padded(&w[whole..], W::from_f32(0.0)), rounds);
            for i in 0..R {
                lanes[i] = s.mul_add(A::load(s, &padded(&x[i][whole..], A::from_f32(0.0))), w, lanes[i]);
            }
        }
        for i in 0..R {
            sums[i][j] = s.sum(lanes[i]);
        }
    }
}

/// Sixteen elements of a weight, rounded to bf16 where asked.
#[inline(always)]
fn weight<S: Simd, W: Lanes>(s: S, w: &[W; WIDTH], rounds: bool) -> S::F {
    let w = W::load(s, w);
    if !rounds {
        return w;
    }
    let mut rounded = [bf16::ZERO; WIDTH];
    s.store_bf16(w, &mut rounded);
    s.load_bf16(&rounded)
}

#[inline(always)]
fn chunk<T>(x: &[T], at: usize) -> &[T; WIDTH] {
    x[at..].first_chunk().expect("sixteen elements")
}

/// `std::array::from_fn`, whose closure is compiled for the instruction set at hand.
#[inline(always)]
fn of_each<T: Copy, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut all = [f(0); N];
    for (i, one) in all.iter_mut().enumerate().skip(1) {
        *one = f(i);
    }
    all
}
