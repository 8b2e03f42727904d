//! f32 products by the `gemm` crate, which packs operands of any strides and has AVX2, AVX-512 and NEON kernels.

use gemm::Parallelism;

use super::{Matrix, MatrixMut, Threads};
use crate::parallel::Shared;

pub(super) fn multiply(
    c: &MatrixMut,
    target: Shared<f32>,
    (a, a_data): (&Matrix, &[f32]),
    (b, b_data): (&Matrix, &[f32]),
    accumulate: bool,
    threads: Threads,
) {
    let parallelism = match threads.count() {
        1 => Parallelism::None,
        // The crate splits rows and columns over threads, never the sums: the result does not depend on timing.
        n => Parallelism::Rayon(n),
    };
    // SAFETY: the constructors checked that every element of the three matrices lies inside its buffer, and
    // that C is this call's alone to write; A and B are borrowed for reading.
    unsafe {
        gemm::gemm(
            c.rows,
            c.cols,
            a.cols,
            target.pointer(c.start),
            1,
            c.row_stride as isize,
            accumulate,
            a_data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b_data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
