//! The operands and the result of a product, as they lie in memory.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use crate::parallel::Shared;
use crate::storage::{Element, Operand, Target};

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(super) data: Operand<'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    /// F32 elements are rounded to bf16 as they are packed.
    pub(super) rounds: bool,
}

impl<'a> Matrix<'a> {
    /// Rows of `cols` elements, `row_stride` apart.
    pub(crate) fn strided(data: Operand<'a>, rows: usize, cols: usize, row_stride: usize) -> Self {
        let len = match data {
            Operand::F32(data) => data.len(),
            Operand::Bf16(data) => data.len(),
        };
        let needed = reach(rows, cols, row_stride);
        let is_inside = needed.is_some_and(|needed| needed <= len);
        assert!(is_inside, "a matrix of {rows} rows, {row_stride} apart, of {cols} in {len} elements");
        Self { data, rows, cols, row_stride, col_stride: 1, rounds: false }
    }

    /// Rows one after the other.
    pub(crate) fn new(data: Operand<'a>, rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transpose, without moving anything.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Some of the columns.
    pub(super) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {} columns", self.cols);
        let skip = columns.start * self.col_stride;
        let data = match self.data {
            Operand::F32(data) => Operand::F32(&data[skip..]),
            Operand::Bf16(data) => Operand::Bf16(&data[skip..]),
        };
        Self { data, cols: columns.len(), ..self }
    }

    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.data, Operand::Bf16(_))
    }
}

/// How many elements a matrix reaches over, from its first to its last; `None` beyond all numbers.
fn reach(rows: usize, cols: usize, row_stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 { Some(0) } else { (rows - 1).checked_mul(row_stride)?.checked_add(cols) }
}

/// A matrix to write: element (i, j) is `data[start + i * row_stride + j]`. Nothing else reaches its elements while it lives.
pub(crate) struct MatrixMut<'a> {
    pub(super) data: Target,
    pub(super) start: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    elements: PhantomData<&'a mut ()>,
}

impl<'a> MatrixMut<'a> {
    /// The first of `data`, rows one after the other.
    pub(crate) fn new<T: Element>(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        let is_inside = rows.checked_mul(cols).is_some_and(|needed| needed <= data.len());
        assert!(is_inside, "a matrix of {rows} rows of {cols} in {} elements", data.len());
        Self { data: T::target(Shared::new(data)), start: 0, rows, cols, row_stride: cols, elements: PhantomData }
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
        let end = reach(rows, cols, row_stride).and_then(|needed| needed.checked_add(start));
        let is_inside = end.is_some_and(|end| end <= data.len());
        assert!(is_inside, "{rows} rows of {cols} at {start} of {} elements", data.len());
        Self { data: T::target(data), start, rows, cols, row_stride, elements: PhantomData }
    }

    /// Sets every element to zero.
    pub(super) fn clear(&self) {
        for i in 0..self.rows {
            match self.data {
                // SAFETY: nothing else reaches the elements while the matrix lives; one row at a time.
                Target::F32(data) => unsafe { self.row(data, i).fill(0.0) },
                // SAFETY: as above.
                Target::Bf16(data) => unsafe { self.row(data, i).fill(bf16::ZERO) },
            }
        }
    }

    /// Row `i`, as a slice.
    ///
    /// # Safety
    ///
    /// Nothing else reaches this row while the result lives.
    pub(super) unsafe fn row<'r, T>(&self, data: Shared<T>, i: usize) -> &'r mut [T] {
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
    pub(super) fn count(self) -> usize {
        match self {
            Threads::One => 1,
            Threads::All => rayon::current_num_threads(),
        }
    }
}
