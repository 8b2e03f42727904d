//! The operands and the result of a product, as they lie in memory.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;
use tensor_storage::bytes;

use crate::narrow::Narrow;
use crate::parallel::Shared;
use crate::storage::{Element, Operand, Target};

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Strides<D> {
    pub(super) data: D,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    /// F32 elements are rounded to bf16 as they are packed.
    pub(super) rounds: bool,
}

/// A matrix as kernels read it: in f32 or bf16.
pub(crate) type Matrix<'a> = Strides<Operand<'a>>;

/// The operand of a product. Kernels never see narrow elements: they are widened a piece at a time.
pub(crate) type Factor<'a> = Strides<Stored<'a>>;

/// The elements of a [`Factor`].
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    /// Elements that kernels read directly.
    Wide(Operand<'a>),
    /// Elements that are widened to f32.
    Narrow(Narrow<'a>),
}

/// Elements one after the other.
pub(crate) trait Elements: Copy {
    /// The number of elements.
    fn count(&self) -> usize;
    /// The elements from `first` on.
    fn skip(self, first: usize) -> Self;
}

impl Elements for Operand<'_> {
    fn count(&self) -> usize {
        match self {
            Operand::F32(data) => data.len(),
            Operand::Bf16(data) => data.len(),
        }
    }

    fn skip(self, first: usize) -> Self {
        match self {
            Operand::F32(data) => Operand::F32(&data[first..]),
            Operand::Bf16(data) => Operand::Bf16(&data[first..]),
        }
    }
}

impl Elements for Stored<'_> {
    fn count(&self) -> usize {
        match self {
            Stored::Wide(data) => data.count(),
            Stored::Narrow(data) => data.count(),
        }
    }

    fn skip(self, first: usize) -> Self {
        match self {
            Stored::Wide(data) => Stored::Wide(data.skip(first)),
            Stored::Narrow(data) => Stored::Narrow(data.skip(first)),
        }
    }
}

impl<D: Elements> Strides<D> {
    /// Rows of `cols` elements, `row_stride` apart.
    pub(crate) fn strided(data: D, rows: usize, cols: usize, row_stride: usize) -> Self {
        let len = data.count();
        let needed = reach(rows, cols, row_stride);
        let is_inside = needed.is_some_and(|needed| needed <= len);
        assert!(is_inside, "a matrix of {rows} rows, {row_stride} apart, of {cols} in {len} elements");
        Self { data, rows, cols, row_stride, col_stride: 1, rounds: false }
    }

    /// Rows of `cols` elements, one after the other.
    pub(crate) fn new(data: D, rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transpose, without moving anything.
    pub(crate) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.cols
    }

    pub(crate) fn data(&self) -> D {
        self.data
    }

    /// Some of the columns.
    pub(super) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols, "{columns:?} of {} columns", self.cols);
        Self { data: self.data.skip(columns.start * self.col_stride), cols: columns.len(), ..self }
    }
}

impl<'a> Factor<'a> {
    /// Some of the rows.
    pub(crate) fn some_rows(self, rows: Range<usize>) -> Self {
        self.t().columns(rows).t()
    }

    /// Converts row `row` of a matrix with contiguous rows to f32.
    pub(crate) fn widen_row(&self, row: usize, to: &mut [f32]) {
        assert!(self.col_stride == 1 && row < self.rows && to.len() == self.cols, "row {row} of {}", self.rows);
        let first = row * self.row_stride;
        match self.data {
            Stored::Wide(Operand::F32(data)) => to.copy_from_slice(&data[first..][..to.len()]),
            Stored::Wide(Operand::Bf16(data)) => {
                for (to, from) in to.iter_mut().zip(&data[first..]) {
                    *to = Element::to_f32(*from);
                }
            }
            Stored::Narrow(narrow) => narrow.widen(first, to),
        }
    }

    /// The bytes of the elements. `None` for codes, and if rows do not follow each other without gaps.
    pub(crate) fn bytes(&self) -> Option<&'a [u8]> {
        let count = self.rows * self.cols;
        if self.col_stride != 1 || self.row_stride != self.cols {
            return None;
        }
        match self.data {
            Stored::Wide(Operand::F32(data)) => Some(bytes(&data[..count])),
            Stored::Wide(Operand::Bf16(data)) => Some(bytes(&data[..count])),
            Stored::Narrow(narrow) => narrow.f16().map(|data| bytes(&data[..count])),
        }
    }

    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.data, Stored::Wide(Operand::Bf16(_)))
    }

    /// Returns the matrix if kernels can read its elements directly.
    pub(super) fn wide(&self) -> Option<Matrix<'a>> {
        match self.data {
            Stored::Wide(data) => Some(self.with(data)),
            Stored::Narrow(_) => None,
        }
    }
}

impl<D> Strides<D> {
    /// Other elements in the same places.
    pub(super) fn with<E>(&self, data: E) -> Strides<E> {
        let &Strides { rows, cols, row_stride, col_stride, rounds, .. } = self;
        Strides { data, rows, cols, row_stride, col_stride, rounds }
    }
}

impl<'a> From<Matrix<'a>> for Factor<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        matrix.with(Stored::Wide(matrix.data))
    }
}

/// The number of elements from the first to the last of a matrix; `None` on overflow.
fn reach(rows: usize, cols: usize, row_stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 { Some(0) } else { (rows - 1).checked_mul(row_stride)?.checked_add(cols) }
}

/// A matrix to write: element (i, j) is `data[start + i * stride + j]`, or `data[start + j * stride + i]` if the matrix is turned. Nothing
/// else reaches its elements while it lives.
pub(crate) struct MatrixMut<'a> {
    pub(super) data: Target,
    pub(super) start: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements from one line of memory to the next. A line is a row, or a column if the matrix is turned.
    pub(super) stride: usize,
    pub(super) turned: bool,
    elements: PhantomData<&'a mut ()>,
}

impl<'a> MatrixMut<'a> {
    /// The first elements of `data`, with rows one after the other.
    pub(crate) fn new<T: Element>(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        let is_inside = rows.checked_mul(cols).is_some_and(|needed| needed <= data.len());
        assert!(is_inside, "a matrix of {rows} rows of {cols} in {} elements", data.len());
        Self {
            data: T::target(Shared::new(data)),
            start: 0,
            rows,
            cols,
            stride: cols,
            turned: false,
            elements: PhantomData,
        }
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
        Self { data: T::target(data), start, rows, cols, stride: row_stride, turned: false, elements: PhantomData }
    }

    /// The transpose, without moving anything.
    pub(super) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, turned: !self.turned, ..self }
    }

    /// The number of lines of memory, and the number of elements in each.
    pub(super) fn lines(&self) -> (usize, usize) {
        if self.turned { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Sets every element to zero.
    pub(super) fn clear(&self) {
        for i in 0..self.lines().0 {
            match self.data {
                // SAFETY: nothing else reaches the elements while the matrix lives; one line at a time.
                Target::F32(data) => unsafe { self.line(data, i).fill(0.0) },
                // SAFETY: as above.
                Target::Bf16(data) => unsafe { self.line(data, i).fill(bf16::ZERO) },
            }
        }
    }

    /// Line `i` of memory, as a slice.
    ///
    /// # Safety
    ///
    /// Nothing else reaches this line while the result lives.
    pub(super) unsafe fn line<'r, T>(&self, data: Shared<T>, i: usize) -> &'r mut [T] {
        // SAFETY: the line was checked to be inside the buffer; alone by the caller's promise.
        unsafe { data.slice(self.start + i * self.stride, self.lines().1) }
    }
}

/// The threads that a product runs on.
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
