//! Products with bf16 on any machine: operands are widened to f32 and multiplied by the f32 path.
//!
//! B is widened whole, A and C in blocks of rows.

use super::{Matrix, MatrixMut, Operand, Target, Threads};
use crate::parallel::Shared;
use crate::storage::{Element, scratch};

/// How many rows of A and C are widened at a time.
const BLOCK_ROWS: usize = 256;

pub(super) fn multiply(c: &MatrixMut, a: Matrix, b: Matrix, accumulate: bool, threads: Threads) {
    // A bf16 product rounds both operands, so that this path and those with bf16 instructions agree.
    let round = a.is_bf16() || b.is_bf16();
    let mut b_wide = scratch::<f32>(b.rows * b.cols);
    let b_by_columns = b.row_stride < b.col_stride;
    let stored = if b_by_columns { b.t() } else { b };
    widen(&stored, 0, stored.rows, round, &mut b_wide);
    let b_matrix = Matrix::new((&b_wide[..]).into(), stored.rows, stored.cols);
    let b_matrix = if b_by_columns { b_matrix.t() } else { b_matrix };

    let block = BLOCK_ROWS.min(c.rows);
    let mut a_wide = scratch::<f32>(block * a.cols);
    let mut product = scratch::<f32>(block * c.cols);
    for first in (0..c.rows).step_by(block) {
        let rows = block.min(c.rows - first);
        widen(&a, first, rows, round, &mut a_wide);
        let part = MatrixMut::new(&mut product[..rows * c.cols], rows, c.cols);
        let a_matrix = Matrix::new((&a_wide[..rows * a.cols]).into(), rows, a.cols);
        super::multiply(part, a_matrix, b_matrix, false, threads);
        match c.data {
            Target::F32(target) => store(c, target, first, rows, &product, accumulate),
            Target::Bf16(target) => store(c, target, first, rows, &product, accumulate),
        }
    }
}

/// Copies `rows` rows of a matrix from row `first` on, as f32, rows one after the other.
fn widen(m: &Matrix, first: usize, rows: usize, round: bool, out: &mut [f32]) {
    fn copy<T: Element>(data: &[T], m: &Matrix, first: usize, rows: usize, out: &mut [f32], f: impl Fn(T) -> f32) {
        for (i, out) in out.chunks_mut(m.cols).take(rows).enumerate() {
            let start = (first + i) * m.row_stride;
            if m.col_stride == 1 {
                for (out, &x) in out.iter_mut().zip(&data[start..start + m.cols]) {
                    *out = f(x);
                }
            } else {
                for (j, out) in out.iter_mut().enumerate() {
                    *out = f(data[start + j * m.col_stride]);
                }
            }
        }
    }
    match m.data {
        Operand::F32(data) if round => {
            copy(data, m, first, rows, out, |x| <half::bf16 as Element>::from_f32(x).to_f32())
        }
        Operand::F32(data) => copy(data, m, first, rows, out, |x| x),
        Operand::Bf16(data) => copy(data, m, first, rows, out, |x| x.to_f32()),
    }
}

fn store<T: Element>(c: &MatrixMut, target: Shared<T>, first: usize, rows: usize, product: &[f32], accumulate: bool) {
    for (i, product) in product.chunks(c.cols).take(rows).enumerate() {
        // SAFETY: the matrix is handed over to this product, which alone writes it; one row at a time.
        let row = unsafe { c.row(target, first + i) };
        for (c, &p) in row.iter_mut().zip(product) {
            *c = if accumulate { T::from_f32(c.to_f32() + p) } else { T::from_f32(p) };
        }
    }
}
