//! One product for every instruction set: what is packed, in which order blocks are computed, on which thread.
//!
//! A kernel multiplies a block: `ROWS` rows of A by `COLS` columns of B over all of K. Both are packed into
//! *panels* of that many rows or columns: for each k, one cell for each of them, in an order that the kernel
//! chooses for `STEP` values of k at a time. Packing converts (f32 to bf16, bf16 to f32) and fills the edges with
//! zeros, so kernels know only whole blocks.
//!
//! Columns are taken in groups whose panels fit `PACKED_BYTES`. All threads pack a group together, then take
//! tasks: some row panels times a *run* of column panels that fills half of a second-level cache. The panels of B
//! stay in the second-level cache of a core while the rows of A pass by, one row panel in its first-level cache
//! while the panels of B pass by. A row panel is packed by the task that uses it, just before it does, where A
//! lies along K; where A is transposed, that would read a line here and a line there, so it is packed together
//! with B, in groups of rows.
//!
//! Every element of C is one sum along K in one order, whatever the number of threads.

use std::ops::Range;

use half::bf16;

use super::{Matrix, MatrixMut, Target, Threads};
use crate::parallel::{Shared, for_each_part};
use crate::storage::Element;

/// At most this much of A, and as much of B, is packed at a time.
pub const PACKED_BYTES: usize = 8 << 20;
/// The panels of B that a task goes through for one row panel after the other: they stay in a cache of 2 MiB, beside a
/// panel of A and blocks of C. The more there are, the fewer times A is read.
const RUN_BYTES: usize = 1280 << 10;

/// Aligned storage of packed panels.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The rows of A of a block. A direct kernel finds element (i, k) at `data[i * row + k * step]`; in a packed
/// panel the strides are `ROWS`'s own.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    pub data: *const T,
    pub row: usize,
    pub step: usize,
}

// SAFETY: only read through, while the operand is borrowed.
unsafe impl<T> Send for Rows<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Rows<T> {}

/// Multiplies blocks.
pub(super) trait Kernel: Sized {
    /// What panels consist of.
    type Cell: Copy + Send + Sync;
    /// Rows and columns of a block.
    const ROWS: usize;
    const COLS: usize;
    /// K is filled up with zeros to a multiple of this.
    const STEP: usize;

    /// At most this much of K in a panel.
    const DEPTH: usize;
    /// This much of K at a time where A is packed just before use: the rows then stay in the first-level cache.
    const SLICE: usize;

    /// Prepares the current thread.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel. So for all functions of the trait.
    unsafe fn enter() -> Self;

    /// The elements of A, if blocks can be computed well from them as they lie.
    fn direct(a: &Matrix) -> Option<Rows<Self::Cell>>;

    /// Packs rows `k` of columns `cols` of `m`, which is B or the transpose of A: the part of a panel, `ROWS`
    /// or `COLS` cells for each k, that belongs to these k. `k` starts at a multiple of `STEP` and ends at one
    /// or with the matrix.
    unsafe fn pack(side: Side, m: &Matrix, cols: Range<usize>, k: Range<usize>, cells: &mut [Self::Cell]);

    /// `C (+)= A B` for one block over `depth`, a multiple of `STEP` and not zero.
    ///
    /// # Safety
    ///
    /// `a` has `ROWS` rows, `b` is a packed panel, both of `depth`; `c` points to `ROWS` rows of `COLS`
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

    /// Writes or adds a computed block, `COLS` elements a row, to rows of C in bf16.
    ///
    /// # Safety
    ///
    /// `rows` by `cols` elements, `stride` apart, at `c` belong to the caller.
    unsafe fn write_bf16(&self, block: &[f32], c: *mut bf16, stride: usize, size: (usize, usize), accumulate: bool);
}

/// Which operand a panel is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    A,
    B,
}

/// Operations a second of the kernel alone, on the calling thread: one block over and over, its panels in the
/// first-level cache. Nothing that this machine computes with the kernel is faster.
///
/// # Safety
///
/// The machine has the instructions of the kernel.
pub(super) unsafe fn block_rate<K: Kernel>() -> f64 {
    /// Of K: 16 KiB of bf16 or 12 to 32 KiB of f32 on each side.
    const DEEP: usize = 256;
    /// Blocks timed together, and how often: the best counts, because what else runs only ever takes away.
    const BLOCKS: usize = 2000;
    const TIMES: usize = 9;
    let zeros = |len: usize| {
        let mut lines = Buffer::new::<K::Cell>(len);
        lines.lines.fill(Line([0; 64]));
        lines
    };
    let (a, b) = (zeros(K::ROWS * DEEP), zeros(K::COLS * DEEP));
    let mut c = vec![0f32; K::ROWS * K::COLS];
    let (a, b) = (packed_rows::<K>(a.read().as_ptr()), b.read::<K::Cell>().as_ptr());
    // SAFETY: by the caller's promise.
    let kernel = unsafe { K::enter() };
    let mut best = f64::MAX;
    for _ in 0..TIMES {
        let start = std::time::Instant::now();
        for _ in 0..BLOCKS {
            // SAFETY: panels of `DEEP` and a whole block.
            unsafe { kernel.block(a, b, DEEP, std::hint::black_box(c.as_mut_ptr()), K::COLS, true) };
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    (2 * K::ROWS * K::COLS * DEEP * BLOCKS) as f64 / best
}

/// How the panels of an operand (K, X) lie one after the other.
#[derive(Clone, Copy)]
struct Layout {
    /// Columns of a panel.
    width: usize,
    /// K, filled up.
    depth: usize,
    /// How many there are.
    count: usize,
    /// Cells from one panel to the next: a line more than it has, so that the same place in several panels does
    /// not fall into the same set of a cache.
    cells: usize,
    cell_bytes: usize,
}

impl Layout {
    fn new<K: Kernel>(side: Side, (k, x): (usize, usize)) -> Self {
        let width = if side == Side::A { K::ROWS } else { K::COLS };
        let (depth, cell_bytes) = (k.next_multiple_of(K::STEP), size_of::<K::Cell>());
        Self { width, depth, count: x.div_ceil(width), cells: depth * width + 64 / cell_bytes, cell_bytes }
    }

    /// How many panels fit `bytes`, at least one.
    fn fitting(&self, bytes: usize) -> usize {
        (bytes / (self.cells * self.cell_bytes)).clamp(1, self.count.max(1))
    }

    /// How many panels there are in a group that fits `bytes`, all groups being as large as can be alike.
    fn even_group(&self, bytes: usize) -> usize {
        let groups = self.count.div_ceil(self.fitting(bytes)).max(1);
        self.count.div_ceil(groups).max(1)
    }
}

/// One operand cut into panels.
struct Panels<'a, K: Kernel> {
    side: Side,
    /// (K, X)
    matrix: Matrix<'a>,
    layout: Layout,
    kernel: std::marker::PhantomData<fn() -> K>,
}

impl<'a, K: Kernel> Panels<'a, K> {
    fn new(side: Side, matrix: Matrix<'a>) -> Self {
        let layout = Layout::new::<K>(side, (matrix.rows, matrix.cols));
        Self { side, matrix, layout, kernel: std::marker::PhantomData }
    }

    /// The tasks of packing `count` panels, each of which reads memory in order: single panels of what lies
    /// along K, all panels for a part of K of what lies across.
    fn tasks(&self, count: usize) -> usize {
        if self.matrix.row_stride == 1 { count } else { self.layout.depth.div_ceil(PART) }
    }

    /// Does one of the `tasks`, for panels `panels` that `to` has place for.
    ///
    /// # Safety
    ///
    /// The machine has the kernel's instructions, and no other task has this number.
    unsafe fn pack(&self, panels: Range<usize>, task: usize, to: Shared<K::Cell>) {
        let (panels, k, first) = if self.matrix.row_stride == 1 {
            let panel = panels.start + task;
            (panel..panel + 1, 0..self.matrix.rows, panels.start)
        } else {
            (panels.clone(), task * PART..self.matrix.rows.min((task + 1) * PART), panels.start)
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
    fn cols(&self, panel: usize) -> Range<usize> {
        let width = self.layout.width;
        panel * width..self.matrix.cols.min((panel + 1) * width)
    }
}

/// A right-hand operand (K, N) whose panels are kept for several products.
pub(super) struct Packed {
    /// K and N.
    size: (usize, usize),
    /// The panels of each slice of K.
    slices: Vec<Buffer>,
}

/// The slices of K in which a product is computed.
fn slices<K: Kernel>(k: usize) -> impl Iterator<Item = Range<usize>> {
    let depth = k.div_ceil(k.div_ceil(K::DEPTH).max(1)).next_multiple_of(K::STEP).max(K::STEP);
    (0..k).step_by(depth).map(move |first| first..k.min(first + depth))
}

impl Packed {
    /// Packs all of B.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel.
    pub(super) unsafe fn new<K: Kernel>(b: Matrix, threads: Threads) -> Self {
        let pack = |k: Range<usize>| {
            let panels = Panels::<K>::new(Side::B, b.t().columns(k.clone()).t());
            let count = panels.layout.count;
            let mut buffer = Buffer::apart::<K::Cell>(count * panels.layout.cells);
            let to = Shared::new(buffer.cells());
            // SAFETY: by the caller's promise; each task is done once.
            run(threads.count(), panels.tasks(count), 4, |task| unsafe { panels.pack(0..count, task, to) });
            buffer
        };
        Self { size: (b.rows, b.cols), slices: slices::<K>(b.rows).map(pack).collect() }
    }

    /// Bytes of the panels of a (K, N) operand.
    pub(super) fn bytes<K: Kernel>(k: usize, n: usize) -> usize {
        let layouts = slices::<K>(k).map(|k| Layout::new::<K>(Side::B, (k.len(), n)));
        layouts.map(|layout| layout.count * layout.cells * layout.cell_bytes).sum()
    }
}

/// The right-hand operand of a product.
pub(super) enum Right<'a> {
    /// Packed on the way.
    Matrix(Matrix<'a>),
    /// Packed before.
    Packed(&'a Packed),
}

impl Right<'_> {
    /// K and N.
    pub(super) fn size(&self) -> (usize, usize) {
        match self {
            Right::Matrix(b) => (b.rows, b.cols),
            Right::Packed(b) => b.size,
        }
    }
}

/// Values of k that a task of packing takes of an operand that lies across K.
const PART: usize = 32;

/// `C (+)= A B`, in slices of K if panels of all of it would not fit the caches.
///
/// # Safety
///
/// The machine has the instructions of the kernel, which is the one that B was packed for.
pub(super) unsafe fn multiply<K: Kernel>(c: &MatrixMut, a: Matrix, b: Right, accumulate: bool, threads: Threads) {
    // SAFETY: by the caller's promise.
    let slice = |c: &MatrixMut, accumulate: bool, number: usize, k: Range<usize>| unsafe {
        let b = match b {
            Right::Matrix(b) => Source::Matrix(Panels::<K>::new(Side::B, b.t().columns(k.clone()).t())),
            Right::Packed(packed) => {
                Source::Packed(packed.slices[number].read(), Layout::new::<K>(Side::B, (k.len(), packed.size.1)))
            }
        };
        multiply_slice::<K>(c, a.columns(k), b, accumulate || number > 0, threads);
    };
    let mut slices = slices::<K>(a.cols).enumerate().peekable();
    let is_cut = slices.peek().is_some_and(|(_, k)| k.len() < a.cols);
    match c.data {
        Target::Bf16(target) if is_cut => {
            // Sums are f32 to the end.
            let mut sums = Buffer::new::<f32>(c.rows * c.cols);
            for (number, k) in slices {
                slice(&MatrixMut::new(sums.cells::<f32>(), c.rows, c.cols), false, number, k);
            }
            let sums = sums.read::<f32>();
            let rows = |i: usize| {
                // SAFETY: the matrix is handed over to this product, which alone writes it; one task a row.
                let row = unsafe { c.row(target, i) };
                write_row(&sums[i * c.cols..][..c.cols], row, accumulate);
            };
            run(threads.count(), c.rows, 8, rows);
        }
        _ => slices.for_each(|(number, k)| slice(c, accumulate, number, k)),
    }
}

/// Where the panels of B come from in a slice of K.
enum Source<'a, K: Kernel> {
    Matrix(Panels<'a, K>),
    Packed(&'a [K::Cell], Layout),
}

unsafe fn multiply_slice<K: Kernel>(c: &MatrixMut, a: Matrix, b: Source<K>, accumulate: bool, threads: Threads) {
    let threads = threads.count();
    let direct = K::direct(&a);
    let a = Panels::<K>::new(Side::A, a.t());
    // Groups of columns are packed here, or there is one group that was packed before.
    let (right, columns_fitting, fresh) = match &b {
        Source::Matrix(b) => (b.layout, b.layout.even_group(PACKED_BYTES), Some(b)),
        Source::Packed(_, layout) => (*layout, layout.count, None),
    };
    let (left, depth) = (a.layout, right.depth);
    // A is packed ahead where it lies across K.
    let ahead = a.matrix.row_stride != 1;
    let row_group = if ahead { left.even_group(PACKED_BYTES) } else { left.count };
    let mut packed_a = Buffer::new::<K::Cell>(if ahead { row_group * left.cells } else { 0 });
    let mut packed_b = Buffer::new::<K::Cell>(if fresh.is_some() { columns_fitting * right.cells } else { 0 });

    for first_col in (0..right.count).step_by(columns_fitting) {
        let cols = first_col..right.count.min(first_col + columns_fitting);
        for first_row in (0..left.count).step_by(row_group) {
            let rows = first_row..left.count.min(first_row + row_group);
            // B is packed once for all groups of rows, A again for each group of columns if it has several.
            let a_tasks = if ahead && (first_col == 0 || row_group < left.count) { a.tasks(rows.len()) } else { 0 };
            let b_tasks = fresh.filter(|_| first_row == 0).map_or(0, |b| b.tasks(cols.len()));
            let (shared_a, shared_b) = (Shared::new(packed_a.cells()), Shared::new(packed_b.cells()));
            run(threads, a_tasks + b_tasks, 4, |task| {
                // SAFETY: the instructions are there by the caller's promise; each task is done once.
                unsafe {
                    match (task.checked_sub(a_tasks), fresh) {
                        (Some(task), Some(b)) => b.pack(cols.clone(), task, shared_b),
                        _ => a.pack(rows.clone(), task, shared_a),
                    }
                }
            });
            let packed_a = packed_a.read::<K::Cell>();
            let packed_b = match b {
                Source::Matrix(_) => packed_b.read(),
                Source::Packed(cells, _) => cells,
            };

            let runs = cols.len().div_ceil(right.fitting(RUN_BYTES));
            let run_panels = cols.len().div_ceil(runs);
            let runs = cols.len().div_ceil(run_panels);
            let parts = parts(threads, runs).min(rows.len());
            run(threads, runs * parts, 1, |task| {
                let (part, columns) = (task % parts, task / parts * run_panels);
                let columns = columns..cols.len().min(columns + run_panels);
                let part = rows.len() * part / parts..rows.len() * (part + 1) / parts;
                // SAFETY: the instructions are there by the caller's promise.
                let kernel = unsafe { K::enter() };
                let slice = if ahead { depth } else { K::SLICE.min(depth) };
                let mut own = Buffer::new::<K::Cell>(if ahead { 0 } else { slice * K::ROWS });
                let block = K::ROWS * K::COLS;
                let mut sums = Buffer::new::<f32>(columns.len() * block);
                for row in part.clone() {
                    let panel = rows.start + row;
                    let whole_rows = a.cols(panel).len() == K::ROWS;
                    for k in (0..depth).step_by(slice) {
                        let slice = slice.min(depth - k);
                        let (first, last) = (k == 0, k + slice == depth);
                        let here = match direct {
                            Some(direct) if whole_rows => {
                                Rows { data: direct.data.wrapping_add(panel * K::ROWS * direct.row + k), ..direct }
                            }
                            _ if ahead => packed_rows::<K>(packed_a[row * left.cells + k * K::ROWS..].as_ptr()),
                            _ => {
                                let cells = &mut own.cells()[..slice * K::ROWS];
                                // SAFETY: as above.
                                unsafe {
                                    K::pack(Side::A, &a.matrix, a.cols(panel), k..a.matrix.rows.min(k + slice), cells)
                                };
                                packed_rows::<K>(cells.as_ptr())
                            }
                        };
                        for column in columns.clone() {
                            let at = (panel * K::ROWS, (cols.start + column) * K::COLS);
                            let b = &packed_b[column * right.cells + k * K::COLS..][..slice * K::COLS];
                            let sums = &mut sums.cells()[(column - columns.start) * block..][..block];
                            // SAFETY: panels of `slice`; each block of C belongs to one task.
                            unsafe {
                                match c.whole_block(at, (K::ROWS, K::COLS)) {
                                    Some(to) => {
                                        kernel.block(here, b.as_ptr(), slice, to, c.row_stride, accumulate || !first)
                                    }
                                    None => {
                                        kernel.block(here, b.as_ptr(), slice, sums.as_mut_ptr(), K::COLS, !first);
                                        if last {
                                            write_block(&kernel, c, at, sums, accumulate);
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            });
        }
    }
}

/// Into how many parts rows are cut where columns are cut into `runs`: a few tasks a thread even out what else the machine
/// does, and every thread has as many as the others.
fn parts(threads: usize, runs: usize) -> usize {
    let least = if threads == 1 { 1 } else { (4 * threads).div_ceil(runs) };
    (least..least + threads).find(|parts| (runs * parts).is_multiple_of(threads)).unwrap_or(least)
}

fn packed_rows<K: Kernel>(data: *const K::Cell) -> Rows<K::Cell> {
    Rows { data, row: 1, step: K::ROWS }
}

/// Runs tasks on the pool, or here if this is a product of one thread. `grain` tasks are given out together.
fn run(threads: usize, tasks: usize, grain: usize, f: impl Fn(usize) + Sync + Send) {
    if threads == 1 {
        (0..tasks).for_each(f);
    } else {
        for_each_part(tasks.div_ceil(grain), |part| (part * grain..tasks.min((part + 1) * grain)).for_each(&f));
    }
}

impl MatrixMut {
    /// The block at (i, j) if it lies inside and its elements are f32.
    fn whole_block(&self, (i, j): (usize, usize), (rows, cols): (usize, usize)) -> Option<*mut f32> {
        match self.data {
            Target::F32(target) if i + rows <= self.rows && j + cols <= self.cols => {
                Some(target.pointer(self.start + i * self.row_stride + j))
            }
            _ => None,
        }
    }
}

/// Writes what lies inside C of the block at (i, j).
///
/// # Safety
///
/// The block of C belongs to the caller, and the machine has the kernel's instructions.
unsafe fn write_block<K: Kernel>(kernel: &K, c: &MatrixMut, (i, j): (usize, usize), block: &[f32], accumulate: bool) {
    let (rows, cols) = (K::ROWS.min(c.rows - i), K::COLS.min(c.cols - j));
    let start = c.start + i * c.row_stride + j;
    match c.data {
        Target::F32(target) => {
            for (row, block) in block.chunks_exact(K::COLS).take(rows).enumerate() {
                // SAFETY: inside C, and this task's alone.
                let to = unsafe { target.slice(start + row * c.row_stride, cols) };
                for (to, from) in to.iter_mut().zip(block) {
                    *to = if accumulate { *to + from } else { *from };
                }
            }
        }
        // SAFETY: inside C by the constructor's check, and this task's alone.
        Target::Bf16(target) => unsafe {
            kernel.write_bf16(block, target.pointer(start), c.row_stride, (rows, cols), accumulate);
        },
    }
}

/// Memory for panels.
struct Buffer {
    lines: Vec<Line>,
    /// In elements of the type that it was made for.
    len: usize,
    /// Whether the thread keeps it for its next product, so that products do not wait for fresh pages.
    stays: bool,
}

thread_local! {
    static SPARE: std::cell::RefCell<Vec<Vec<Line>>> = const { std::cell::RefCell::new(Vec::new()) };
}

impl Buffer {
    /// A buffer for one product.
    fn new<T>(len: usize) -> Self {
        let spare = if len == 0 { None } else { SPARE.with_borrow_mut(Vec::pop) };
        Self::of::<T>(spare.unwrap_or_default(), len, true)
    }

    /// A buffer that lives longer than a product.
    fn apart<T>(len: usize) -> Self {
        Self::of::<T>(Vec::new(), len, false)
    }

    fn of<T>(mut lines: Vec<Line>, len: usize, stays: bool) -> Self {
        let count = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        lines.clear();
        lines.reserve_exact(count);
        // SAFETY: the capacity is there, every bit pattern is a line, and panels are packed whole before they
        // are read.
        #[allow(clippy::uninit_vec)]
        unsafe {
            lines.set_len(count)
        };
        Self { lines, len, stays }
    }

    /// The elements, of the type that it was made for.
    fn cells<T: Copy>(&mut self) -> &mut [T] {
        assert!(self.len * size_of::<T>() <= size_of_val(self.lines.as_slice()));
        // SAFETY: aligned to 64 bytes and large enough; every bit pattern is a number.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The same, to read.
    fn read<T: Copy>(&self) -> &[T] {
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

crate::vector::vectorized! {
    /// Writes or adds a row of sums to a result.
    fn write_row(from: &[f32], to: &mut [bf16], accumulate: bool) {
        if accumulate {
            for (to, from) in to.iter_mut().zip(from) {
                *to = Element::from_f32(Element::to_f32(*to) + from);
            }
        } else {
            for (to, from) in to.iter_mut().zip(from) {
                *to = Element::from_f32(*from);
            }
        }
    }
}
