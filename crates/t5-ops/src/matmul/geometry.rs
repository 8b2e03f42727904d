//! The sizes of kernels, which determine the bytes of a product: also of kernels that this machine cannot run.

use super::kernel::Kernel;
use super::panels::{even_group, fitting};
use super::{fma, tiles, turned};
use crate::needs::elements;
use crate::processor::{InstructionSet, Processor};

/// The sizes of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    rows: usize,
    cols: usize,
    step: usize,
    depth: usize,
    slice: usize,
    between_rows: usize,
    cell_bytes: usize,
}

impl Geometry {
    /// The sizes of a kernel that is compiled here.
    pub(super) const fn for_kernel<K: Kernel>() -> Self {
        Self {
            rows: K::ROWS,
            cols: K::COLS,
            step: K::STEP,
            depth: K::DEPTH,
            slice: K::SLICE,
            between_rows: K::BETWEEN_ROWS,
            cell_bytes: size_of::<K::Cell>(),
        }
    }

    /// A kernel of tiles of bf16.
    const TILES: Self = Self {
        rows: tiles::BLOCK,
        cols: tiles::BLOCK,
        step: tiles::BLOCK,
        depth: tiles::DEPTH,
        slice: tiles::SLICE,
        between_rows: 0,
        cell_bytes: 2,
    };

    /// A kernel of vectors of f32.
    const fn vectors(rows: usize, cols: usize) -> Self {
        let (depth, between_rows) = (fma::DEPTH, fma::BETWEEN_ROWS);
        Self { rows, cols, step: 1, depth, slice: depth, between_rows, cell_bytes: 4 }
    }

    /// The kernel for products that round to bf16, or for products of f32, with wide blocks if it has them.
    pub(super) const fn chosen(set: InstructionSet, rounds: bool, wide: bool) -> Self {
        use InstructionSet as S;
        match (set, rounds, wide) {
            (S::SoftwareTiles | S::Amx | S::Avx512Bf16, true, _) => Self::TILES,
            (S::Amx | S::Avx512Bf16 | S::Avx512, _, true) => Self::vectors(8, 48),
            (S::Amx | S::Avx512Bf16 | S::Avx512, _, false) => Self::vectors(12, 32),
            (S::Avx2, _, _) => Self::vectors(6, 16),
            (S::Neon, _, _) => Self::vectors(12, 8),
            (S::SoftwareTiles | S::Portable, _, _) => Self::vectors(4, 8),
        }
    }

    /// The kernel of a product with N columns.
    pub(super) fn of_product(set: InstructionSet, rounds: bool, n: usize) -> Self {
        use InstructionSet as S;
        let has_wide = matches!(set, S::Amx | S::Avx512Bf16 | S::Avx512 | S::Avx2);
        Self::chosen(set, rounds, has_wide && super::is_wide_enough(n))
    }

    /// Rows of a block.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of a block.
    pub(super) fn columns(&self) -> usize {
        self.cols
    }

    /// The longest sum (K) in one piece.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// The most of K in a slice.
    pub(super) fn slice_of(&self, k: usize) -> usize {
        k.div_ceil(k.div_ceil(self.depth).max(1)).next_multiple_of(self.step).max(self.step)
    }

    /// Panels of B of (K, N), and the cells of one.
    fn panels(&self, k: usize, n: usize) -> (usize, usize) {
        self.panels_of(self.cols, k, n)
    }

    /// The same for panels that are `width` wide.
    fn panels_of(&self, width: usize, k: usize, n: usize) -> (usize, usize) {
        (n.div_ceil(width), k.next_multiple_of(self.step) * width + 64 / self.cell_bytes)
    }

    /// Bytes of the panels of A and of B, where both lie across K: for a slice of K at a time, and a group of panels of each.
    pub(super) fn across(&self, (m, k, n): (usize, usize, usize)) -> [u64; 2] {
        let slice = self.slice_of(k).min(k);
        [(self.rows, m), (self.cols, n)].map(|(width, of)| {
            let (count, cells) = self.panels_of(width, slice, of);
            elements([even_group(count, cells * self.cell_bytes, PACKED_BYTES), cells, self.cell_bytes])
        })
    }

    /// Bytes of all panels of a (K, N) operand, as `engine::Packed` keeps them.
    pub(super) fn packed(&self, k: usize, n: usize) -> u64 {
        let slice = self.slice_of(k);
        let bytes = |first: usize| {
            let (count, cells) = self.panels(slice.min(k - first), n);
            elements([count, cells, self.cell_bytes])
        };
        (0..k).step_by(slice).map(bytes).sum()
    }

    /// Bytes that all threads hold for a product with a weight of (K, N), where B is packed during the product, and for an added
    /// product with another weight of (K₂, N).
    pub(super) fn product(&self, (k, added, n): (usize, usize, usize), sums: bool, processor: &Processor) -> u64 {
        let (count, cells) = self.panels(self.depth_of(k, added), n);
        let threads = processor.threads.min(count.max(1));
        let runs = self.runs((count, cells), processor).next_multiple_of(threads);
        let panels = count.div_ceil(runs.max(1));
        let sums = if sums { self.rows * self.cols * size_of::<f32>() } else { 0 };
        elements([threads, self.own_rows(k) + panels * (cells * self.cell_bytes + sums)])
    }

    /// Bytes that all threads hold for the transpose of a product of `m` rows with a weight whose rows lie along K: all threads together
    /// pack the rows, and the weight is read in place.
    pub(super) fn turned(&self, (k, added, m): (usize, usize, usize), processor: &Processor) -> u64 {
        let (count, cells) = self.panels(self.depth_of(k, added), m);
        let panels = count.div_ceil(self.runs((count, cells), processor).max(1));
        let sums = (panels * self.rows * self.cols + turned::ELEMENTS) * size_of::<f32>();
        elements([count, cells, self.cell_bytes]) + elements([processor.threads, self.own_rows(k) + sums])
    }

    /// The fewest runs for this many panels of this many cells.
    fn runs(&self, (count, cells): (usize, usize), processor: &Processor) -> usize {
        count.div_ceil(fitting(count, cells * self.cell_bytes, run_bytes(processor.second_level_bytes)))
    }

    /// The depth of the panels of a product and an added product.
    fn depth_of(&self, k: usize, added: usize) -> usize {
        let first = self.slice_of(k).min(k);
        if added > 0 { first.next_multiple_of(self.step) + added } else { first }
    }

    /// Bytes that a thread needs to pack rows of A.
    fn own_rows(&self, k: usize) -> usize {
        let rows = self.slice.min(self.slice_of(k).min(k).next_multiple_of(self.step)) + self.between_rows;
        2 * rows * self.rows * self.cell_bytes
    }
}

/// The most bytes of A, and of B, that are packed at a time where A lies across K: for the gradient of a weight.
pub(super) const PACKED_BYTES: usize = 8 << 20;

/// Bytes of the panels of B that a task goes through for one row panel after the other. They stay in the second-level cache, beside a panel
/// of A and blocks of C. More panels mean that A is read fewer times. On a machine with caches of 1 MiB, f32 products went from 170 to 230
/// GFLOP/s with runs of 640 KiB instead of 1,280.
pub(super) fn run_bytes(second_level_bytes: usize) -> usize {
    second_level_bytes / 8 * 5
}
