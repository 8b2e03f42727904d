//! A kernel multiplies one block: `ROWS` rows of A by `COLS` columns of B over all of K.
//!
//! Both are packed into *panels* of that many rows or columns: for each k, one cell for each of them, in an order that the kernel chooses
//! for `STEP` values of k at a time. Packing converts (f32 to bf16, bf16 to f32) and fills the edges with zeros, so kernels see whole
//! blocks only.

use std::ops::Range;

use half::bf16;

use super::matrix::Matrix;

/// The most rows that are copied during one block: a kernel has this many places for a copy in a step along K.
pub(crate) const MAX_COPIED: usize = 8;

/// Which operand a panel is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
}

/// The rows of A of a block. A direct kernel finds element (i, k) at `data[i * row + k * step]`; in a packed
/// panel the strides follow from `ROWS`.
#[derive(Clone, Copy)]
pub(crate) struct Rows<T> {
    pub data: *const T,
    pub row: usize,
    pub step: usize,
}

// SAFETY: only read through, while the operand is borrowed.
unsafe impl<T> Send for Rows<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Rows<T> {}

/// A block to compute: the arguments of [`Kernel::block`].
#[derive(Clone, Copy)]
pub(crate) struct Block<T> {
    pub a: Rows<T>,
    pub b: *const T,
    pub depth: usize,
    pub c: *mut f32,
    pub stride: usize,
    pub accumulate: bool,
}

/// Rows along K, `stride` elements apart, to copy into the lines of a panel of A.
#[derive(Clone, Copy)]
pub(crate) struct Copied<T> {
    pub from: *const T,
    pub stride: usize,
    pub to: *mut T,
    pub rows: usize,
}

/// Multiplies blocks.
pub(crate) trait Kernel: Sized {
    /// The element type of panels.
    type Cell: Copy + Send + Sync;
    /// Rows and columns of a block.
    const ROWS: usize;
    const COLS: usize;
    /// K is filled up with zeros to a multiple of this.
    const STEP: usize;

    /// The K of a block is a multiple of this, so that a block multiplies fewer of the zeros that fill a panel up.
    const LEAST: usize = Self::STEP;

    /// Whether rows of C in bf16 are prefetched before their block is computed, so that writing them does not wait for memory.
    const PREFETCHES_C: bool = false;

    /// The most of K in a panel.
    const DEPTH: usize;
    /// The most of K at a time where A is packed just before use: the rows then stay in the first-level cache.
    const SLICE: usize;

    /// Prepares the current thread.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel. The same holds for all functions of the trait.
    unsafe fn enter() -> Self;

    /// Returns the elements of A, if blocks can be computed well from them in place.
    fn direct(a: &Matrix) -> Option<Rows<Self::Cell>>;

    /// Returns the elements of A, if [`Kernel::block_and_copy`] can copy them in place. Lines of `STEP` cells follow each other row by row,
    /// then come the lines of the next `STEP` of K.
    fn copied(_: &Matrix) -> Option<Rows<Self::Cell>> {
        None
    }

    /// Packs rows `k` of columns `cols` of `m`, which is B or the transpose of A, into the part of a panel that belongs to these k: `ROWS`
    /// or `COLS` cells for each k. `k` starts at a multiple of `STEP` and ends at such a multiple or with the matrix.
    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [Self::Cell]);

    /// Cells between the rows that [`Kernel::rows`] puts one after the other.
    const BETWEEN_ROWS: usize = 0;

    /// Converts rows of A in their own order, if a block takes them better in that form than from a panel. `m` is the transpose of A. Its
    /// columns `cols`, over `k`, are written to `cells`, `BETWEEN_ROWS` apart.
    ///
    /// # Safety
    ///
    /// As [`Kernel::pack`]. The result is valid as long as `cells`.
    unsafe fn rows(_: &Matrix, _: Range<usize>, _: Range<usize>, _: &mut [Self::Cell]) -> Option<Rows<Self::Cell>> {
        None
    }

    /// `C (+)= A B` for one block over `depth`, a multiple of `LEAST` and not zero.
    ///
    /// # Safety
    ///
    /// `a` has `ROWS` rows, `b` is a packed panel, both of `depth` at least; `c` points to `ROWS` rows of `COLS`
    /// elements, `stride` apart, which nothing else reaches.
    unsafe fn block(
        &self,
        a: Rows<Self::Cell>,
        b: *const Self::Cell,
        depth: usize,
        c: *mut f32,
        stride: usize,
        accumulate: bool,
    );

    /// Computes a block like [`Kernel::block`], and meanwhile copies at most [`MAX_COPIED`] rows of `depth`, so that the units that
    /// multiply do not wait for memory. Called only if [`Kernel::copied`] offers it.
    ///
    /// # Safety
    ///
    /// As [`Kernel::block`]; the rows exist, and so do the lines of a panel of `depth`, which nothing else reaches.
    unsafe fn block_and_copy(&self, block: Block<Self::Cell>, _: Copied<Self::Cell>) {
        let Block { a, b, depth, c, stride, accumulate } = block;
        // SAFETY: by the caller's promise.
        unsafe { self.block(a, b, depth, c, stride, accumulate) }
    }

    /// Turns a computed block, see [`super::turned::turn`].
    ///
    /// # Safety
    ///
    /// As [`super::turned::turn`].
    unsafe fn turn_block(block: *const f32, to: *mut f32);

    /// Writes or adds a computed block, `COLS` elements a row, to rows of C in bf16.
    ///
    /// # Safety
    ///
    /// `rows` by `cols` elements, `stride` apart, at `c` belong to the caller.
    unsafe fn write_bf16(&self, block: &[f32], c: *mut bf16, stride: usize, size: (usize, usize), accumulate: bool);
}

/// The rows of a packed panel.
pub(crate) fn packed_rows<K: Kernel>(data: *const K::Cell) -> Rows<K::Cell> {
    Rows { data, row: 1, step: K::ROWS }
}
