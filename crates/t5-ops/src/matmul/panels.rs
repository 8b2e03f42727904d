//! Panels: an operand of a product, packed as a kernel reads it, and the memory that they lie in.

use std::ops::Range;

use super::kernel::{Kernel, Side};
use super::matrix::Matrix;
use crate::parallel::Shared;
use crate::storage::set_unspecified;

/// Values of k that a task of packing takes of an operand that lies across K: as many rows of memory are read at once, and the
/// processor's prefetchers follow no more. With 32 of them dW took 2 % longer in f32.
const fn part<K: Kernel>() -> usize {
    if K::STEP > 16 { K::STEP } else { 16 }
}

/// Aligned storage of packed panels.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// How the panels of an operand (K, X) lie one after the other.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Columns of a panel.
    width: usize,
    /// K, filled up.
    pub(super) depth: usize,
    /// How many there are.
    pub(super) count: usize,
    /// Cells from one panel to the next: a line more than it has, so that the same place in several panels does
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

    /// The first `k` of K in these panels.
    pub(super) fn first<K: Kernel>(self, k: usize) -> Self {
        Self { depth: k.next_multiple_of(K::STEP), ..self }
    }

    /// How many panels fit `bytes`, at least one.
    pub(super) fn fitting(&self, bytes: usize) -> usize {
        (bytes / (self.cells * self.cell_bytes)).clamp(1, self.count.max(1))
    }

    /// In how few groups panels fit `bytes` each.
    pub(super) fn groups(&self, bytes: usize) -> usize {
        self.count.div_ceil(self.fitting(bytes))
    }

    /// How many panels there are in a group that fits `bytes`, all groups being as large as can be alike.
    pub(super) fn even_group(&self, bytes: usize) -> usize {
        self.count.div_ceil(self.groups(bytes).max(1)).max(1)
    }
}

/// One operand cut into panels.
pub(super) struct Panels<'a, K: Kernel> {
    side: Side,
    /// (K, X)
    pub(super) matrix: Matrix<'a>,
    pub(super) layout: Layout,
    kernel: std::marker::PhantomData<fn() -> K>,
}

impl<'a, K: Kernel> Panels<'a, K> {
    pub(super) fn new(side: Side, matrix: Matrix<'a>) -> Self {
        let layout = Layout::new::<K>(side, (matrix.rows, matrix.cols));
        Self { side, matrix, layout, kernel: std::marker::PhantomData }
    }

    /// The tasks of packing `count` panels, each of which reads memory in order: single panels of what lies
    /// along K, all panels for a part of K of what lies across.
    pub(super) fn tasks(&self, count: usize) -> usize {
        if self.matrix.row_stride == 1 { count } else { self.layout.depth.div_ceil(part::<K>()) }
    }

    /// Does one of the `tasks`, for panels `panels` that `to` has place for.
    ///
    /// # Safety
    ///
    /// The machine has the kernel's instructions, and no other task has this number.
    pub(super) unsafe fn pack(&self, panels: Range<usize>, task: usize, to: Shared<K::Cell>) {
        let (panels, k, first) = if self.matrix.row_stride == 1 {
            let panel = panels.start + task;
            (panel..panel + 1, 0..self.matrix.rows, panels.start)
        } else {
            (panels.clone(), task * part::<K>()..self.matrix.rows.min((task + 1) * part::<K>()), panels.start)
        };
        let padded = k.start..k.end.next_multiple_of(K::STEP);
        for panel in panels {
            // SAFETY: this part of this panel is this task's alone.
            unsafe {
                let start = (panel - first) * self.layout.cells + padded.start * self.layout.width;
                let cells = to.slice(start, padded.len() * self.layout.width);
                K::pack(self.side, &self.matrix, self.cols(panel), k.clone(), cells);
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
    /// In elements of the type that it was made for.
    len: usize,
    /// Whether the thread keeps it for its next product, so that products do not wait for fresh pages.
    stays: bool,
}

thread_local! {
    static SPARE: std::cell::RefCell<Vec<Vec<Line>>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn lines_of<T>(len: usize) -> usize {
    len.checked_mul(size_of::<T>()).expect("panels that memory could hold").div_ceil(size_of::<Line>())
}

/// The smallest that is large enough, or else the largest: so a thread keeps no more large ones than a product has at a time.
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
        Self::of::<T>(spare, len, true)
    }

    /// A buffer that lives longer than a product.
    pub(super) fn apart<T>(len: usize) -> Self {
        Self::of::<T>(Vec::new(), len, false)
    }

    fn of<T>(mut lines: Vec<Line>, len: usize, stays: bool) -> Self {
        let count = lines_of::<T>(len);
        lines.clear();
        if lines.capacity() < count {
            // Gone before the larger one is made, and nothing of it is copied.
            drop(lines);
            lines = Vec::with_capacity(count);
        }
        // SAFETY: every bit pattern is a line. The capacity is there, and so many are set.
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

    /// The elements, of the type that it was made for.
    pub(crate) fn cells<T: Copy>(&mut self) -> &mut [T] {
        assert!(self.len * size_of::<T>() <= size_of_val(self.lines.as_slice()));
        // SAFETY: aligned to 64 bytes and large enough; every bit pattern is a number.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The same, to read.
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
