//! Matrix products behind one interface: `C (+)= A B`, any strides in A and B, f32 accumulation.
//!
//! A transpose is a [`Matrix::t`], never a copy. Operands and result are `F32` or `BF16`. Two f32 operands
//! are multiplied in f32 by the `gemm` crate; where one of them is bf16 the product is a bf16 product:
//! both are rounded to bf16 as they are packed, sums are f32.
//!
//! Shapes: C (M, N), A (M, K), B (K, N).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod f32;
#[cfg(target_arch = "x86_64")]
mod packed;
mod portable;

use candle_core::{CpuStorage, Result, Storage, bail};
use half::bf16;

use crate::parallel::Shared;
use crate::storage::{Element, View};
use crate::vector::{Isa, isa};

/// The elements of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: Operand<'a>,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `cols` elements, `row_stride` apart.
    pub(crate) fn strided(data: Operand<'a>, rows: usize, cols: usize, row_stride: usize) -> Self {
        let len = match data {
            Operand::F32(data) => data.len(),
            Operand::Bf16(data) => data.len(),
        };
        let needed = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
        assert!(needed <= len, "a matrix of {rows} rows, {row_stride} apart, of {cols} in {len} elements");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Rows one after the other.
    pub(crate) fn new(data: Operand<'a>, rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transpose, without moving anything.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// (rows, columns).
    pub(crate) fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn is_bf16(&self) -> bool {
        matches!(self.data, Operand::Bf16(_))
    }
}

impl<'a> From<&'a [f32]> for Operand<'a> {
    fn from(data: &'a [f32]) -> Self {
        Operand::F32(data)
    }
}

impl<'a> From<&'a [bf16]> for Operand<'a> {
    fn from(data: &'a [bf16]) -> Self {
        Operand::Bf16(data)
    }
}

impl View<'_> {
    /// The view as an operand.
    pub(crate) fn operand(&self) -> Result<Operand<'_>> {
        match self.storage() {
            Storage::Cpu(CpuStorage::F32(_)) => Ok(self.slice::<f32>()?.into()),
            Storage::Cpu(CpuStorage::BF16(_)) => Ok(self.slice::<bf16>()?.into()),
            _ => bail!("expected a matrix of F32 or BF16 on the CPU"),
        }
    }
}

/// The elements of a result.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    F32(Shared<f32>),
    Bf16(Shared<bf16>),
}

/// A matrix to write: element (i, j) is `data[start + i * row_stride + j]`.
pub(crate) struct MatrixMut {
    data: Target,
    start: usize,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl MatrixMut {
    /// All of `data`, rows one after the other. The result must not outlive `data`; it is handed to
    /// [`multiply`] at once.
    pub(crate) fn new<T: Element>(data: &mut [T], rows: usize, cols: usize) -> Self {
        assert!(rows * cols <= data.len(), "a matrix of {rows} rows of {cols} in {} elements", data.len());
        Self { data: T::target(Shared::new(data)), start: 0, rows, cols, row_stride: cols }
    }

    /// Rows of `cols` elements, `row_stride` apart, from element `start` of a buffer that other threads
    /// write elsewhere.
    ///
    /// # Safety
    ///
    /// The buffer outlives the result, and until the result is gone nothing else reaches these elements.
    pub(crate) unsafe fn part<T: Element>(
        data: Shared<T>,
        start: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        let needed = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
        assert!(start + needed <= data.len(), "{rows} rows of {cols} at {start} of {} elements", data.len());
        Self { data: T::target(data), start, rows, cols, row_stride }
    }

    /// Row `i`, as a slice.
    ///
    /// # Safety
    ///
    /// Nothing else reaches this row while the result lives.
    unsafe fn row<'a, T>(&self, data: Shared<T>, i: usize) -> &'a mut [T] {
        // SAFETY: the row was checked to be inside the buffer; alone by the caller's promise.
        unsafe { data.slice(self.start + i * self.row_stride, self.cols) }
    }
}

/// On how many threads a product runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread: the caller is itself one of many tasks.
    One,
    /// All threads of the pool.
    All,
}

impl Threads {
    fn count(self) -> usize {
        match self {
            Threads::One => 1,
            Threads::All => rayon::current_num_threads(),
        }
    }
}

/// `C = A B`, or `C += A B` with `accumulate`.
pub(crate) fn multiply(c: MatrixMut, a: Matrix, b: Matrix, accumulate: bool, threads: Threads) {
    assert!(
        c.rows == a.rows && c.cols == b.cols && a.cols == b.rows,
        "product of ({}, {}) and ({}, {}) into ({}, {})",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        c.rows,
        c.cols
    );
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if a.cols == 0 {
        if !accumulate {
            clear(&c);
        }
        return;
    }
    match (c.data, a.data, b.data) {
        (Target::F32(target), Operand::F32(x), Operand::F32(y)) => {
            f32::multiply(&c, target, (&a, x), (&b, y), accumulate, threads)
        }
        _ => bf16_product(isa(), &c, a, b, accumulate, threads),
    }
}

/// A product with at least one bf16 operand, or a bf16 result of f32 operands.
fn bf16_product(isa: Isa, c: &MatrixMut, a: Matrix, b: Matrix, accumulate: bool, threads: Threads) {
    let rounds = a.is_bf16() || b.is_bf16();
    match isa {
        // SAFETY: `isa` names only what this machine was found to have.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if rounds => unsafe { packed::multiply::<amx::Amx>(c, a, b, accumulate, threads) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if rounds => unsafe { packed::multiply::<avx512::Avx512Bf16>(c, a, b, accumulate, threads) },
        _ => portable::multiply(c, a, b, accumulate, threads),
    }
}

crate::vector::vectorized! {
    /// Writes or adds part of a row of f32 sums to a result.
    fn write_row<T: Element>(from: &[f32], to: &mut [T], accumulate: bool) {
        if accumulate {
            for (to, from) in to.iter_mut().zip(from) {
                *to = T::from_f32(to.to_f32() + from);
            }
        } else {
            for (to, from) in to.iter_mut().zip(from) {
                *to = T::from_f32(*from);
            }
        }
    }
}

/// Whether the machine and the operating system offer AMX with bf16.
pub(crate) fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        amx::is_available()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Sets a result to zero.
fn clear(c: &MatrixMut) {
    for i in 0..c.rows {
        match c.data {
            // SAFETY: the matrix is handed over to `multiply`, which alone writes it; one row at a time.
            Target::F32(data) => unsafe { c.row(data, i).fill(0.0) },
            // SAFETY: as above.
            Target::Bf16(data) => unsafe { c.row(data, i).fill(bf16::ZERO) },
        }
    }
}

#[cfg(test)]
mod tests;
