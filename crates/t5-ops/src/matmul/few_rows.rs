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
            // SAFETY: inside C by the constructor's check; columns of a part are that part's alone.
            match self.c.data {
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

/// Rows of the weight whose dot products are taken together.
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
        let rows = |first: usize, count: usize| Tile { a, first, count };
        for first in (0..a.rows).step_by(TOGETHER) {
            let count = TOGETHER.min(a.rows - first);
            let sums = &mut sums[first..first + count];
            // As many sums at a time as there are registers for.
            match count {
                1 => tile::<S, A, W, 1, 4>(s, rows(first, 1), w, rounds, sums),
                2 => tile::<S, A, W, 2, 4>(s, rows(first, 2), w, rounds, sums),
                3 => tile::<S, A, W, 3, 2>(s, rows(first, 3), w, rounds, sums),
                4 => tile::<S, A, W, 4, 2>(s, rows(first, 4), w, rounds, sums),
                5 => tile::<S, A, W, 5, 1>(s, rows(first, 5), w, rounds, sums),
                6 => tile::<S, A, W, 6, 1>(s, rows(first, 6), w, rounds, sums),
                7 => tile::<S, A, W, 7, 1>(s, rows(first, 7), w, rounds, sums),
                _ => tile::<S, A, W, 8, 1>(s, rows(first, 8), w, rounds, sums),
            }
        }
    }
}

/// Some rows of A.
struct Tile<'a, A> {
    a: Rows<'a, A>,
    first: usize,
    count: usize,
}

/// `R` rows of A with all rows of the weight, `C` of them at a time.
#[inline(always)]
fn tile<S: Simd, A: Lanes, W: Lanes, const R: usize, const C: usize>(
    s: S,
    tile: Tile<A>,
    w: &[&[W]; GROUP],
    rounds: bool,
    sums: &mut [[f32; GROUP]],
) {
    debug_assert_eq!(tile.count, R);
    let k = tile.a.cols;
    let x: [&[A]; R] = std::array::from_fn(|i| &tile.a.data[(tile.first + i) * tile.a.row_stride..][..k]);
    for (number, w) in w.as_chunks::<C>().0.iter().enumerate() {
        let mut lanes = [[s.splat(0.0); C]; R];
        for at in (0..k - k % WIDTH).step_by(WIDTH) {
            let w: [S::F; C] = of_each(|j| weight(s, chunk(w[j], at), rounds));
            let x: [S::F; R] = of_each(|i| A::load(s, chunk(x[i], at)));
            add_products(s, &mut lanes, x, w);
        }
        if !k.is_multiple_of(WIDTH) {
            let at = k - k % WIDTH;
            let w: [S::F; C] = of_each(|j| weight(s, &padded(&w[j][at..], W::from_f32(0.0)), rounds));
            let x: [S::F; R] = of_each(|i| A::load(s, &padded(&x[i][at..], A::from_f32(0.0))));
            add_products(s, &mut lanes, x, w);
        }
        for i in 0..R {
            for j in 0..C {
                sums[i][number * C + j] = s.sum(lanes[i][j]);
            }
        }
    }
}

#[inline(always)]
fn add_products<S: Simd, const R: usize, const C: usize>(s: S, lanes: &mut [[S::F; C]; R], x: [S::F; R], w: [S::F; C]) {
    for i in 0..R {
        for j in 0..C {
            lanes[i][j] = s.mul_add(x[i], w[j], lanes[i][j]);
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
