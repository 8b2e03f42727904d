//! Panels: an operand of a product, packed as a kernel reads it, and the memory that they lie in.

use std::ops::Range;

use tensor_storage::set_unspecified;

use super::kernel::{Kernel, Side};
use super::matrix::{Factor, Matrix, Stored};
use crate::narrow::Narrow;
use crate::parallel::Shared;

use crate::storage::Operand;

/// Values of k in a packing task of an operand that lies across K. A task reads this many rows of memory at once, and the processor's
/// prefetchers follow no more. With 32 rows dW took 2 % longer in f32.
const fn part<K: Kernel>() -> usize {
    if K::STEP > 16 { K::STEP } else { 16 }
}

/// Elements that are widened at a time: 24 KiB, which stay in the first-level cache until they are packed.
const WIDENED: usize = 6 << 10;
/// The part of them along K: a piece of a panel of 48 columns.
const WIDENED_DEPTH: usize = 128;

/// Aligned storage of packed panels.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The layout of the panels of an operand (K, X), one after the other.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Columns of a panel.
    width: usize,
    /// K, filled up to whole steps.
    pub(super) depth: usize,
    /// The number of panels.
    pub(super) count: usize,
    /// Cells from one panel to the next: a line more than a panel has, so that the same place in several panels does
    /// not fall into the same set of a cache.
    pub(super) cells: usize,
    pub(super) cell_bytes: usize,
}

impl Layout {
    pub(super) fn new<K: Kernel>(side: Side, (k, x): (usize, usize)) -> Self {
        let width = if side == Side::A { K::ROWS } else { K::COLS };
        let (depth, cell_bytes) = (k.next_multiple_of(K::STEP), size_of::<K::Cell>());
        Self { width, depth, count: x.div_ceil(width), cells: depth * width + 64 / cell_bytes, cell_bytes }
    }

    /// The layout of the first `k` values of K in these panels.
    pub(super) fn first<K: Kernel>(self, k: usize) -> Self {
        Self { depth: k.next_multiple_of(K::STEP), ..self }
    }

    /// The number of panels that fit `bytes`, at least one.
    pub(super) fn fitting(&self, bytes: usize) -> usize {
        fitting(self.count, self.cells * self.cell_bytes, bytes)
    }

    /// The fewest groups of panels that fit `bytes` each.
    pub(super) fn groups(&self, bytes: usize) -> usize {
        self.count.div_ceil(self.fitting(bytes))
    }

    /// The number of panels in a group that fits `bytes`, with all groups as equal as possible.
    pub(super) fn even_group(&self, bytes: usize) -> usize {
        even_group(self.count, self.cells * self.cell_bytes, bytes)
    }
}

/// The number of panels, of `count`, that fit `bytes`, at least one.
pub(super) fn fitting(count: usize, panel_bytes: usize, bytes: usize) -> usize {
    (bytes / panel_bytes).clamp(1, count.max(1))
}

/// The number of panels in a group that fits `bytes`, with all groups as equal as possible.
pub(super) fn even_group(count: usize, panel_bytes: usize, bytes: usize) -> usize {
    let groups = count.div_ceil(fitting(count, panel_bytes, bytes));
    count.div_ceil(groups.max(1)).max(1)
}

/// One operand cut into panels.
pub(super) struct Panels<'a, K: Kernel> {
    side: Side,
    /// (K, X)
    pub(super) matrix: Factor<'a>,
    /// (K₂, X), after the first operand in each panel. It lies as the first does.
    pub(super) added: Option<Factor<'a>>,
    pub(super) layout: Layout,
    kernel: std::marker::PhantomData<fn() -> K>,
}

impl<'a, K: Kernel> Panels<'a, K> {
    pub(super) fn new(side: Side, matrix: Factor<'a>) -> Self {
        Self::with(side, matrix, None)
    }

    /// Panels in which another operand follows the first along K.
    pub(super) fn with(side: Side, matrix: Factor<'a>, added: Option<Factor<'a>>) -> Self {
        let k = added.map_or(matrix.rows, |added| {
            let are_alike = added.cols == matrix.cols && (added.row_stride == 1) == (matrix.row_stride == 1);
            assert!(are_alike, "operands one behind the other");
            matrix.rows.next_multiple_of(K::STEP) + added.rows
        });
        let layout = Layout::new::<K>(side, (k, matrix.cols));
        Self { side, matrix, added, layout, kernel: std::marker::PhantomData }
    }

    /// K of the first operand, filled up to whole steps. The other operand begins there.
    pub(super) fn first_depth(&self) -> usize {
        self.matrix.rows.next_multiple_of(K::STEP)
    }

    /// The number of packing tasks for `count` panels. Each task reads memory in order: a single panel of an operand that lies
    /// along K, or all panels for a part of K of an operand that lies across K.
    pub(super) fn tasks(&self, count: usize) -> usize {
        if self.matrix.row_stride == 1 {
            count
        } else {
            self.tasks_across() + self.added.map_or(0, |added| added.rows.div_ceil(part::<K>()))
        }
    }

    /// The packing tasks of the first operand, if it lies across K.
    fn tasks_across(&self) -> usize {
        self.matrix.rows.div_ceil(part::<K>())
    }

    /// Runs one of the `tasks`, for the panels `panels`, which `to` has room for.
    ///
    /// # Safety
    ///
    /// The machine has the kernel's instructions, and no other task has this number.
    pub(super) unsafe fn pack(&self, panels: Range<usize>, task: usize, to: Shared<K::Cell>) {
        let added = self.added.as_ref().map(|added| (added, self.first_depth()));
        if self.matrix.row_stride == 1 {
            for (matrix, from) in [(&self.matrix, 0)].into_iter().chain(added) {
                let panel = panels.start + task;
                // SAFETY: by the caller's promise.
                unsafe { self.pack_of((matrix, from), panels.start, panel..panel + 1, 0..matrix.rows, to) };
            }
            return;
        }
        let (of, task) = match (added, task.checked_sub(self.tasks_across())) {
            (Some(added), Some(task)) => (added, task),
            _ => ((&self.matrix, 0), task),
        };
        let k = task * part::<K>()..of.0.rows.min((task + 1) * part::<K>());
        // SAFETY: by the caller's promise.
        unsafe { self.pack_of(of, panels.start, panels, k, to) };
    }

    /// Packs a part of K of one of the operands into panels. The operand begins at `from` of K, and `to` begins with panel `first`.
    ///
    /// # Safety
    ///
    /// The machine has the kernel's instructions, and this part of these panels is the caller's alone.
    unsafe fn pack_of(
        &self,
        (matrix, from): (&Factor, usize),
        first: usize,
        panels: Range<usize>,
        k: Range<usize>,
        to: Shared<K::Cell>,
    ) {
        let padded = from + k.start..from + k.end.next_multiple_of(K::STEP);
        // SAFETY: by the caller's promise; each is borrowed once.
        let cells = |panel: usize| unsafe {
            let start = (panel - first) * self.layout.cells + padded.start * self.layout.width;
            to.slice(start, padded.len() * self.layout.width)
        };
        match matrix.data {
            // SAFETY: by the caller's promise.
            Stored::Narrow(narrow) if matrix.row_stride != 1 => unsafe {
                self.widen_across((matrix, narrow), panels, k, cells);
            },
            // SAFETY: as above.
            _ => panels.for_each(|panel| unsafe { self.pack_part(matrix, self.cols(panel), k.clone(), cells(panel)) }),
        }
    }

    /// Packs columns `cols` of one of the operands, the columns of a panel, over `k`: see [`Kernel::pack`].
    ///
    /// # Safety
    ///
    /// The machine has the kernel's instructions.
    pub(super) unsafe fn pack_part(&self, of: &Factor, cols: Range<usize>, k: Range<usize>, cells: &mut [K::Cell]) {
        match of.data {
            // SAFETY: by the caller's promise.
            Stored::Wide(data) => unsafe { K::pack(self.side, &of.with(data), cols, k, cells) },
            // SAFETY: as above.
            Stored::Narrow(narrow) => unsafe { self.widen_along((of, narrow), cols, k, cells) },
        }
    }

    /// Does the same for narrow elements that lie along K.
    ///
    /// # Safety
    ///
    /// As [`Panels::pack_part`].
    unsafe fn widen_along(
        &self,
        (of, narrow): (&Factor, Narrow),
        cols: Range<usize>,
        k: Range<usize>,
        cells: &mut [K::Cell],
    ) {
        let mut wide = [0f32; WIDENED];
        for first in k.clone().step_by(WIDENED_DEPTH) {
            let depth = WIDENED_DEPTH.min(k.end - first);
            for (col, wide) in cols.clone().zip(wide.chunks_exact_mut(WIDENED_DEPTH)) {
                narrow.widen(col * of.col_stride + first, &mut wide[..depth]);
            }
            let piece = Matrix::strided(Operand::F32(&wide), cols.len(), depth, WIDENED_DEPTH).t();
            let piece = Matrix { rounds: of.rounds, ..piece };
            let start = (first - k.start) * self.layout.width;
            let cells = &mut cells[start..][..depth.next_multiple_of(K::STEP) * self.layout.width];
            // SAFETY: by the caller's promise.
            unsafe { K::pack(self.side, &piece, 0..cols.len(), 0..depth, cells) };
        }
    }

    /// Packs a part of K of panels of narrow elements that lie across K, for several panels at a time: short pieces of rows are slower to
    /// widen.
    ///
    /// # Safety
    ///
    /// As [`Panels::pack_part`].
    unsafe fn widen_across<'c>(
        &self,
        (of, narrow): (&Factor, Narrow),
        panels: Range<usize>,
        k: Range<usize>,
        cells: impl Fn(usize) -> &'c mut [K::Cell],
    ) where
        K::Cell: 'c,
    {
        let mut wide = [0f32; WIDENED];
        let together = (WIDENED / k.len().max(1) / self.layout.width).max(1);
        for first in panels.clone().step_by(together) {
            let panels = first..panels.end.min(first + together);
            let cols = self.cols(panels.start).start..self.cols(panels.end - 1).end;
            for (k, wide) in k.clone().zip(wide.chunks_exact_mut(cols.len())) {
                narrow.widen(k * of.row_stride + cols.start, wide);
            }
            let piece = Matrix::new(Operand::F32(&wide), k.len(), cols.len());
            let piece = Matrix { rounds: of.rounds, ..piece };
            for panel in panels {
                let of_panel = self.cols(panel);
                let of_panel = of_panel.start - cols.start..of_panel.end - cols.start;
                // SAFETY: by the caller's promise.
                unsafe { K::pack(self.side, &piece, of_panel, 0..k.len(), cells(panel)) };
            }
        }
    }

    /// The columns of a panel.
    pub(super) fn cols(&self, panel: usize) -> Range<usize> {
        let width = self.layout.width;
        panel * width..self.matrix.cols.min((panel + 1) * width)
    }
}

/// Memory for panels.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    /// The length in elements of the type that the buffer was made for.
    len: usize,
    /// Whether the thread keeps the memory for its next product, so that products do not wait for fresh pages.
    stays: bool,
}

thread_local! {
    static SPARE: std::cell::RefCell<Vec<Vec<Line>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Frees the packed operands that the threads of the pool, and this one, keep for their next products.
pub fn release_kept() {
    let release = || SPARE.with_borrow_mut(|spare| *spare = Vec::new());
    rayon::broadcast(|_| release());
    release();
}

fn lines_of<T>(len: usize) -> usize {
    len.checked_mul(size_of::<T>()).expect("panels that memory could hold").div_ceil(size_of::<Line>())
}

/// Takes the smallest spare buffer that is large enough, or else the largest. So a thread keeps no more large buffers than a product has at
/// a time.
fn best<T>(spare: &mut Vec<Vec<Line>>, len: usize) -> Vec<Line> {
    let (count, capacity) = (lines_of::<T>(len), |lines: &Vec<Line>| lines.capacity());
    let enough = (0..spare.len()).filter(|&i| capacity(&spare[i]) >= count).min_by_key(|&i| capacity(&spare[i]));
    let chosen = enough.or_else(|| (0..spare.len()).max_by_key(|&i| capacity(&spare[i])));
    chosen.map(|i| spare.swap_remove(i)).unwrap_or_default()
}

impl Buffer {
    /// A buffer for one product.
    pub(crate) fn new<T>(len: usize) -> Self {
        let spare = if len == 0 { Vec::new() } else { SPARE.with_borrow_mut(|spare| best::<T>(spare, len)) };
        Self::with_lines::<T>(spare, len, true)
    }

    /// Buffers for the two operands of a product. The larger buffer is taken first. So a thread keeps no more than the largest of the
    /// larger operands and the largest of the smaller ones, whichever operand was the larger.
    pub(super) fn two<T>(one: usize, other: usize) -> [Self; 2] {
        if one < other {
            let [other, one] = Self::two::<T>(other, one);
            return [one, other];
        }
        [Self::new::<T>(one), Self::new::<T>(other)]
    }

    /// A buffer that lives longer than a product, or that is too large to keep.
    pub(super) fn apart<T>(len: usize) -> Self {
        Self::with_lines::<T>(Vec::new(), len, false)
    }

    fn with_lines<T>(mut lines: Vec<Line>, len: usize, stays: bool) -> Self {
        let count = lines_of::<T>(len);
        lines.clear();
        if lines.capacity() < count {
            // Freed before the larger buffer is allocated; its contents are not copied.
            drop(lines);
            lines = Vec::with_capacity(count);
        }
        // SAFETY: every bit pattern is a line. The capacity is there, and that many lines are set.
        unsafe {
            set_unspecified(&mut lines.spare_capacity_mut()[..count]);
            lines.set_len(count);
        }
        Self { lines, len, stays }
    }

    /// Sets every byte to zero.
    pub(super) fn clear(&mut self) {
        self.lines.fill(Line([0; 64]));
    }

    /// The elements, of the type that the buffer was made for.
    pub(crate) fn cells<T: Copy>(&mut self) -> &mut [T] {
        assert!(self.len * size_of::<T>() <= size_of_val(self.lines.as_slice()));
        // SAFETY: aligned to 64 bytes and large enough; every bit pattern is a number.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The elements, for reading.
    pub(super) fn read<T: Copy>(&self) -> &[T] {
        assert!(self.len * size_of::<T>() <= size_of_val(self.lines.as_slice()));
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if self.stays && lines.capacity() > 0 {
            SPARE.with_borrow_mut(|spare| spare.push(lines));
        }
    }
}
