//! Products with bf16 on any machine: operands are widened to f32 and multiplied by the f32 path.
//!
//! B is widened whole, A and C in blocks of rows. What is stored transposed is widened as it is stored.

use std::ops::Range;

use half::bf16;

use super::{Matrix, MatrixMut, Operand, Target, Threads};
use crate::parallel::{Shared, for_each_rows};
use crate::storage::{Element, scratch};
use crate::vector::vectorized;

/// How many rows of A and C are widened at a time.
const BLOCK_ROWS: usize = 256;

pub(super) fn multiply(c: &MatrixMut, a: Matrix, b: Matrix, accumulate: bool, threads: Threads) {
    // A bf16 product rounds both operands, so that this path and those with bf16 instructions agree.
    let round = a.is_bf16() || b.is_bf16();
    let mut b_wide = scratch::<f32>(b.rows * b.cols);
    let b_matrix = widen(&b, 0..b.rows, round, threads, &mut b_wide);

    let block = BLOCK_ROWS.min(c.rows);
    let mut a_wide = scratch::<f32>(block * a.cols);
    let mut product = scratch::<f32>(block * c.cols);
    for first in (0..c.rows).step_by(block) {
        let rows = block.min(c.rows - first);
        let a_matrix = widen(&a, first..first + rows, round, threads, &mut a_wide);
        let part = MatrixMut::new(&mut product[..rows * c.cols], rows, c.cols);
        super::multiply(part, a_matrix, b_matrix, false, threads);
        match c.data {
            Target::F32(target) => store(c, target, first, rows, &product, accumulate),
            Target::Bf16(target) => store(c, target, first, rows, &product, accumulate),
        }
    }
}

/// Copies rows of a matrix as f32 into a buffer, in the orientation in which they are stored.
fn widen<'a>(m: &Matrix, rows: Range<usize>, round: bool, threads: Threads, out: &'a mut [f32]) -> Matrix<'a> {
    let count = rows.len();
    // Lines are what is contiguous in memory: rows, or columns of which a part is taken.
    let (lines, width, stride, start) = if m.col_stride == 1 {
        (count, m.cols, m.row_stride, rows.start * m.row_stride)
    } else {
        (m.cols, count, m.col_stride, rows.start)
    };
    let shared = Shared::new(&mut out[..lines * width]);
    let copy = |range: Range<usize>| {
        for line in range {
            let from = start + line * stride;
            // SAFETY: each line belongs to one part.
            let to = unsafe { shared.slice(line * width, width) };
            match m.data {
                Operand::F32(data) if round => convert::<f32, Rounded>(&data[from..from + width], to),
                Operand::F32(data) => convert::<f32, f32>(&data[from..from + width], to),
                Operand::Bf16(data) => convert::<bf16, f32>(&data[from..from + width], to),
            }
        }
    };
    match threads {
        Threads::One => copy(0..lines),
        Threads::All => for_each_rows(lines, width, copy),
    }
    let wide = Matrix::new((&out[..lines * width]).into(), lines, width);
    if m.col_stride == 1 { wide } else { wide.t() }
}

fn store<T: Element>(c: &MatrixMut, target: Shared<T>, first: usize, rows: usize, product: &[f32], accumulate: bool) {
    for (i, product) in product.chunks(c.cols).take(rows).enumerate() {
        // SAFETY: the matrix is handed over to this product, which alone writes it; one row at a time.
        let row = unsafe { c.row(target, first + i) };
        super::write_row(product, row, accumulate);
    }
}

/// How a value is turned into the f32 that is multiplied.
trait Widen {
    fn widen(x: f32) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(x: f32) -> f32 {
        x
    }
}

/// Rounded to bf16 and back.
struct Rounded;

impl Widen for Rounded {
    #[inline(always)]
    fn widen(x: f32) -> f32 {
        <bf16 as Element>::from_f32(x).to_f32()
    }
}

vectorized! {
    fn convert<T: Element, W: Widen>(from: &[T], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = W::widen(from.to_f32());
        }
    }
}
