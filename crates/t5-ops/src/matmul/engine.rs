//! One product for every instruction set: which operands are packed, in which order blocks are computed, and on which thread.
//!
//! A *run* of column panels is the part of B that stays in the second-level cache of a core while the rows of A pass by. Meanwhile one row
//! panel stays in the first-level cache while the panels of the run pass by. A task takes a run, packs it for itself, and goes through all
//! rows. A row panel is packed just before it is used, or copied while the blocks of the previous one are computed
//! ([`Kernel::block_and_copy`]). Packed panels then never leave the core's caches.
//!
//! If there are fewer runs than threads, or if A is transposed (packing one row panel of it would read scattered lines), columns are taken
//! in groups whose panels fit `PACKED_BYTES`. All threads pack a group together, and a transposed A with it. Then they take tasks of some
//! row panels times a run.
//!
//! Every element of C is one sum along K in one order, whatever the number of threads.

use std::ops::Range;

use half::bf16;

use super::geometry::{self, PACKED_BYTES};
use super::kernel::{Block, Copied, Kernel, MAX_COPIED, Rows, Side, packed_rows};
use super::matrix::{Factor, MatrixMut, Threads};
use super::panels::{Buffer, Layout, Panels};
use super::small_m::put;
use super::turned;
use crate::cache;
use crate::parallel::{Shared, for_each_part};
use crate::storage::Target;

/// The bytes of a run of panels on this machine.
fn run_bytes() -> usize {
    geometry::run_bytes(cache::second_level())
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
    pub(super) unsafe fn new<K: Kernel>(b: Factor, threads: Threads) -> Self {
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

    /// K and N.
    pub(super) fn size(&self) -> (usize, usize) {
        self.size
    }

    /// Whether the first `rows` rows and `cols` columns alone can be multiplied.
    pub(super) fn has_part(&self, rows: usize, cols: usize) -> bool {
        (rows == self.size.0 || rows < self.size.0 && self.slices.len() == 1) && cols <= self.size.1
    }
}

/// The right-hand operand of a product.
pub(super) enum Right<'a> {
    /// Packed during the product.
    Factor(Factor<'a>),
    /// The first rows and columns, this many, of an operand that was packed before.
    Packed(&'a Packed, (usize, usize)),
}

impl Right<'_> {
    /// K and N.
    pub(super) fn size(&self) -> (usize, usize) {
        match self {
            Right::Factor(b) => (b.rows, b.cols),
            Right::Packed(_, size) => *size,
        }
    }
}

/// A product that is added to another one: of (M, K₂), whose rows lie along K, and (K₂, N), which lies as the other product's B does.
pub(super) type AddedProduct<'a> = (Factor<'a>, Factor<'a>);

/// `C (+)= A B + A₂ B₂`, in slices of K if panels of all of it would not fit the caches.
///
/// # Safety
///
/// The machine has the instructions of the kernel, and B was packed for this kernel.
pub(super) unsafe fn multiply<K: Kernel>(
    c: &MatrixMut,
    a: Factor,
    b: Right,
    added: Option<AddedProduct>,
    accumulate: bool,
    threads: Threads,
) {
    // A kernel copies rows of A while it computes a block over the same K, but not while it computes one over K₂.
    let copies = a.wide().is_some_and(|a| K::copied(&a).is_some());
    let (within, after) = if copies { (None, added) } else { (added, None) };
    // SAFETY: by the caller's promise.
    let slice = |c: &MatrixMut, accumulate: bool, number: usize, k: Range<usize>| unsafe {
        let is_last = k.end == a.cols;
        let (left, right) = within.filter(|_| is_last).unzip();
        let fresh;
        let b = match b {
            Right::Factor(b) => {
                fresh = Panels::<K>::with(Side::B, b.t().columns(k.clone()).t(), right);
                Source::Matrix(&fresh)
            }
            Right::Packed(packed, (rows, cols)) => {
                // Only a B that is in one slice as a whole is used in part.
                let packed_rows = if rows == packed.size.0 { k.len() } else { packed.size.0 };
                let layout = Layout::new::<K>(Side::B, (packed_rows, cols));
                Source::Packed(packed.slices[number].read(), layout.first::<K>(k.len()))
            }
        };
        multiply_slice::<K>(c, (a.columns(k), left), b, accumulate || number > 0, threads);
        if let (true, Some((a, b))) = (is_last, after) {
            multiply_slice::<K>(c, (a, None), Source::Matrix(&Panels::new(Side::B, b)), true, threads);
        }
    };
    let mut slices = slices::<K>(a.cols).enumerate().peekable();
    let is_cut = slices.peek().is_some_and(|(_, k)| k.len() < a.cols);
    match c.data {
        Target::Bf16(target) if is_cut => {
            // Sums are f32 to the end.
            let (lines, length) = c.lines();
            let mut sums = Buffer::apart::<f32>(lines * length);
            for (number, k) in slices {
                let sums = MatrixMut::new(sums.cells::<f32>(), lines, length);
                slice(&if c.turned { sums.t() } else { sums }, false, number, k);
            }
            let sums = sums.read::<f32>();
            let write = |i: usize| {
                // SAFETY: the matrix belongs to this product, which alone writes it; one task a line.
                let line = unsafe { c.line(target, i) };
                write_line(&sums[i * length..][..length], line, accumulate);
            };
            run(threads.count(), lines, 8, write);
        }
        _ => slices.for_each(|(number, k)| slice(c, accumulate, number, k)),
    }
}

/// The source of B's panels in a slice of K.
enum Source<'a, K: Kernel> {
    Matrix(&'a Panels<'a, K>),
    Packed(&'a [K::Cell], Layout),
}

/// `C (+)= A B` over one slice of K.
///
/// # Safety
///
/// The machine has the instructions of the kernel.
unsafe fn multiply_slice<K: Kernel>(
    c: &MatrixMut,
    (a, added): (Factor, Option<Factor>),
    b: Source<K>,
    accumulate: bool,
    threads: Threads,
) {
    let threads = threads.count();
    let product = Product {
        c,
        direct: a.wide().and_then(|a| K::direct(&a)),
        direct_added: added.and_then(|a| a.wide()).and_then(|a| K::direct(&a)),
        copied: a.wide().and_then(|a| K::copied(&a)),
        // A is packed ahead if it lies across K.
        ahead: a.col_stride != 1,
        a: Panels::<K>::with(Side::A, a.t(), added.map(Factor::t)),
        accumulate,
    };
    assert!(!(product.ahead && added.is_some()), "an added product where A is packed ahead");
    match b {
        // SAFETY: by the caller's promise.
        Source::Packed(panels, layout) => unsafe { product.of_groups(None, panels, layout, threads) },
        // SAFETY: by the caller's promise.
        Source::Matrix(b) => unsafe {
            match product.own_runs(b, threads) {
                Some(runs) => product.of_own_runs(b, runs, threads),
                None => product.of_groups(Some(b), &[], b.layout, threads),
            }
        },
    }
}

/// A product over one slice of K.
struct Product<'a, K: Kernel> {
    c: &'a MatrixMut<'a>,
    a: Panels<'a, K>,
    /// Rows of A that the kernel reads in place.
    direct: Option<Rows<K::Cell>>,
    /// The same for the added product's A.
    direct_added: Option<Rows<K::Cell>>,
    /// Rows of A that the kernel can copy during a block. `None` if there is an added product.
    copied: Option<Rows<K::Cell>>,
    ahead: bool,
    accumulate: bool,
}

/// Packed panels of B.
#[derive(Clone, Copy)]
struct Run<'a, K: Kernel> {
    /// The first panel is column panel `columns.start`.
    panels: &'a [K::Cell],
    layout: Layout,
}

impl<K: Kernel> Product<'_, K> {
    /// Returns the number of runs of columns that B is cut into if each task packs its own: the same number for every thread. `None` if A
    /// is packed ahead, or if columns are so few that reading A once more for every thread costs more than a shared copy of B, which is
    /// written to the shared cache and read back.
    fn own_runs(&self, b: &Panels<K>, threads: usize) -> Option<usize> {
        let shared = b.layout.groups(run_bytes());
        let own = shared.next_multiple_of(threads);
        let reads_of_a = (own - shared) * self.c.rows;
        (!self.ahead && own <= b.layout.count && reads_of_a <= 3 * self.c.cols).then_some(own)
    }

    /// Every task packs a run of columns for itself and goes through all rows. Panels that remain after every thread has the same number
    /// are shared: several threads pack the same panel and take a part of the rows each.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel.
    unsafe fn of_own_runs(&self, b: &Panels<K>, runs: usize, threads: usize) {
        let rows = self.a.layout.count;
        let (even, team) = shares(b.layout.count, threads);
        let of_thread = runs / threads;
        // A thread's tasks follow one another; its share of the remaining panels is the last.
        run(threads, threads * (of_thread + 1), 1, |task| {
            let (thread, number) = (task / (of_thread + 1), task % (of_thread + 1));
            if number < of_thread {
                let task = thread * of_thread + number;
                // SAFETY: by the caller's promise; these columns of C are this task's alone.
                unsafe { self.own_run(b, share(even, task, runs), 0..rows) };
            } else if even + thread / team < b.layout.count {
                let (panel, part) = (even + thread / team, thread % team);
                // SAFETY: by the caller's promise; these rows of this column panel are this task's alone.
                unsafe { self.own_run(b, panel..panel + 1, share(rows, part, team)) };
            }
        });
    }

    /// Packs column panels of B and multiplies them with row panels of A.
    ///
    /// # Safety
    ///
    /// As [`Product::of_own_runs`], and this part of C is the caller's alone.
    unsafe fn own_run(&self, b: &Panels<K>, columns: Range<usize>, rows: Range<usize>) {
        let layout = b.layout;
        let mut panels = Buffer::new::<K::Cell>(columns.len() * layout.cells);
        let to = Shared::new(panels.cells());
        for part in 0..b.tasks(columns.len()) {
            // SAFETY: by the caller's promise; each part is packed once.
            unsafe { b.pack(columns.clone(), part, to) };
        }
        // SAFETY: by the caller's promise.
        unsafe { self.part(rows, None, columns, Run { panels: panels.read(), layout }) };
    }

    /// All threads together pack groups of columns, or there is one group that was packed before.
    ///
    /// # Safety
    ///
    /// As [`Product::of_own_runs`].
    unsafe fn of_groups(&self, fresh: Option<&Panels<K>>, before: &[K::Cell], right: Layout, threads: usize) {
        let left = self.a.layout;
        let columns_fitting = if fresh.is_some() { right.even_group(PACKED_BYTES) } else { right.count };
        let row_group = if self.ahead { left.even_group(PACKED_BYTES) } else { left.count };
        let of_a = if self.ahead { row_group * left.cells } else { 0 };
        let of_b = if fresh.is_some() { columns_fitting * right.cells } else { 0 };
        let [mut packed_a, mut packed_b] = Buffer::two::<K::Cell>(of_a, of_b);

        for first_col in (0..right.count).step_by(columns_fitting) {
            let cols = first_col..right.count.min(first_col + columns_fitting);
            for first_row in (0..left.count).step_by(row_group) {
                let rows = first_row..left.count.min(first_row + row_group);
                // B is packed once for all groups of rows. A is packed again for each group of columns if it has several groups of rows.
                let packs_a = self.ahead && (first_col == 0 || row_group < left.count);
                let a_tasks = if packs_a { self.a.tasks(rows.len()) } else { 0 };
                let b_tasks = fresh.filter(|_| first_row == 0).map_or(0, |b| b.tasks(cols.len()));
                let (shared_a, shared_b) = (Shared::new(packed_a.cells()), Shared::new(packed_b.cells()));
                run(threads, a_tasks + b_tasks, 4, |task| {
                    // SAFETY: the instructions are there by the caller's promise; each task is done once.
                    unsafe {
                        match (task.checked_sub(a_tasks), fresh) {
                            (Some(task), Some(b)) => b.pack(cols.clone(), task, shared_b),
                            _ => self.a.pack(rows.clone(), task, shared_a),
                        }
                    }
                });
                let packed_a = self.ahead.then(|| packed_a.read::<K::Cell>());
                let packed_b = if fresh.is_some() { packed_b.read() } else { before };

                let runs = cols.len().div_ceil(right.fitting(run_bytes()));
                let parts = parts(threads, runs).min(rows.len());
                run(threads, runs * parts, 1, |task| {
                    let (part, number) = (task % parts, task / parts);
                    let part = share(rows.len(), part, parts);
                    let own = share(cols.len(), number, runs);
                    let packed_a = packed_a.map(|panels| &panels[part.start * left.cells..]);
                    let run = Run { panels: &packed_b[own.start * right.cells..], layout: right };
                    let columns = cols.start + own.start..cols.start + own.end;
                    // SAFETY: by the caller's promise; each block of C belongs to one task.
                    unsafe { self.part(rows.start + part.start..rows.start + part.end, packed_a, columns, run) };
                });
            }
        }
    }

    /// Computes the blocks of C in some row panels and some column panels. If A is packed ahead, `packed_a` begins with the first of the
    /// row panels.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of the kernel, and these blocks are the caller's alone.
    unsafe fn part(&self, rows: Range<usize>, packed_a: Option<&[K::Cell]>, columns: Range<usize>, run: Run<K>) {
        // SAFETY: the instructions are there by the caller's promise.
        let kernel = unsafe { K::enter() };
        let (left, right, depth) = (self.a.layout, run.layout, run.layout.depth);
        // The added product's A, if any, begins there.
        let first_depth = self.a.first_depth();
        let slice = if packed_a.is_some() { depth } else { even_slice::<K>(first_depth) };
        let own = if packed_a.is_some() { 0 } else { (slice + K::BETWEEN_ROWS) * K::ROWS };
        let mut own = [(); 2].map(|()| Buffer::new::<K::Cell>(own));
        let block = K::ROWS * K::COLS;
        let turned = if self.c.turned { turned::ELEMENTS } else { 0 };
        let mut sums = Buffer::new::<f32>(columns.len() * block + turned);
        let of_first = first_depth.div_ceil(slice);
        let slices = of_first + (depth - first_depth).div_ceil(slice);
        let piece = |number: usize| {
            let (panel, slice_number) = (rows.start + number / slices, number % slices);
            let (start, end, number_in) = match slice_number.checked_sub(of_first) {
                None => (0, first_depth, slice_number),
                Some(number) => (first_depth, depth, number),
            };
            let k = start + number_in * slice;
            (number < rows.len() * slices).then(|| (panel, k..end.min(k + slice)))
        };
        // Whether this piece was copied while the previous one was computed.
        let mut is_there = false;
        for number in 0..rows.len() * slices {
            let (panel, k) = piece(number).expect("a piece of the part");
            let (first, last) = (k.start == 0, k.end == depth);
            let [now, next] = &mut own;
            let (matrix, direct, from) = match &self.a.added {
                Some(added) if k.start >= first_depth => (added, self.direct_added, first_depth),
                _ => (&self.a.matrix, self.direct, 0),
            };
            let here = match (direct, packed_a) {
                (Some(direct), _) if self.a.cols(panel).len() == K::ROWS => {
                    Rows { data: direct.data.wrapping_add(panel * K::ROWS * direct.row + k.start - from), ..direct }
                }
                (_, Some(packed)) => {
                    packed_rows::<K>(packed[(panel - rows.start) * left.cells + k.start * K::ROWS..].as_ptr())
                }
                _ if is_there => packed_rows::<K>(now.read().as_ptr()),
                _ => {
                    let (of_k, cols) = (k.start - from..matrix.rows.min(k.end - from), self.a.cols(panel));
                    // SAFETY: as above.
                    unsafe {
                        let wide = matrix.wide();
                        let rows = wide.and_then(|a| K::rows(&a, cols.clone(), of_k.clone(), now.cells()));
                        rows.unwrap_or_else(|| {
                            let cells = &mut now.cells()[..k.len() * K::ROWS];
                            self.a.pack_part(matrix, cols, of_k, cells);
                            packed_rows::<K>(cells.as_ptr())
                        })
                    }
                }
            };
            let mut copying = match (self.copied, piece(number + 1)) {
                (Some(copied), Some((panel, next_k))) if packed_a.is_none() => {
                    self.copying(copied, panel, (next_k, k.len()), columns.len(), next)
                }
                _ => None,
            };
            is_there = copying.is_some();
            // In the last step, only as much as the operand has: the panels are filled up with zeros.
            let of_block = k.len().min((matrix.rows - (k.start - from)).next_multiple_of(K::LEAST));
            for column in columns.clone() {
                let at = (panel * K::ROWS, column * K::COLS);
                let place = column - columns.start;
                let b = &run.panels[place * right.cells + k.start * K::COLS..][..k.len() * K::COLS];
                let sums = &mut sums.cells()[place * block..];
                let whole = self.c.whole_block(at, (K::ROWS, K::COLS));
                let (c, stride, accumulate) = match whole {
                    Some(to) => (to, self.c.stride, self.accumulate || !first),
                    None => (sums.as_mut_ptr(), K::COLS, !first),
                };
                let beside = copying.as_mut().and_then(Copying::next);
                if K::PREFETCHES_C && last {
                    self.c.prefetch_block(at, K::ROWS);
                }
                // SAFETY: panels of this piece, rows of A that exist, and a buffer of this task; the block of C is the caller's alone.
                unsafe {
                    match beside {
                        None => kernel.block(here, b.as_ptr(), of_block, c, stride, accumulate),
                        Some(copied) => {
                            let depth = k.len();
                            kernel
                                .block_and_copy(Block { a: here, b: b.as_ptr(), depth, c, stride, accumulate }, copied);
                        }
                    }
                    if whole.is_none() && last {
                        write_block(&kernel, self.c, at, sums, self.accumulate);
                    }
                }
            }
            own.swap(0, 1);
        }
    }

    /// How to copy the next piece of A while the current piece, which is `depth` deep, is computed with this many columns. `None` if the
    /// next piece has to be packed by itself.
    fn copying(
        &self,
        a: Rows<K::Cell>,
        panel: usize,
        (k, depth): (Range<usize>, usize),
        columns: usize,
        to: &mut Buffer,
    ) -> Option<Copying<K::Cell>> {
        let is_whole = self.a.cols(panel).len() == K::ROWS && k.end <= self.a.matrix.rows;
        let at_a_time = K::ROWS.div_ceil(columns);
        (is_whole && k.len() == depth && at_a_time <= MAX_COPIED).then(|| Copying {
            from: a.data.wrapping_add(panel * K::ROWS * a.row + k.start),
            stride: a.row,
            to: to.cells::<K::Cell>().as_mut_ptr(),
            line: K::STEP,
            left: K::ROWS,
            at_a_time,
        })
    }
}

/// A panel that is copied some rows at a time.
struct Copying<T> {
    from: *const T,
    stride: usize,
    to: *mut T,
    line: usize,
    left: usize,
    at_a_time: usize,
}

impl<T> Copying<T> {
    fn next(&mut self) -> Option<Copied<T>> {
        let rows = self.at_a_time.min(self.left);
        let copied = Copied { from: self.from, stride: self.stride, to: self.to, rows };
        self.from = self.from.wrapping_add(rows * self.stride);
        self.to = self.to.wrapping_add(rows * self.line);
        self.left -= rows;
        (rows > 0).then_some(copied)
    }
}

/// The depth of the slices of K where A is packed just before use: as deep as possible, and equal where that costs little.
fn even_slice<K: Kernel>(depth: usize) -> usize {
    let steps = depth / K::STEP;
    let least = depth.div_ceil(K::SLICE).max(1);
    let slices = (least..2 * least).find(|slices| steps.is_multiple_of(*slices)).unwrap_or(least);
    steps.div_ceil(slices) * K::STEP
}

/// Part `part` of `parts` of the panels, with all parts as equal as possible.
fn share(panels: usize, part: usize, parts: usize) -> Range<usize> {
    panels * part / parts..panels * (part + 1) / parts
}

/// Returns the number of panels of B that threads take whole, the same number each, and the number of threads that share each remaining
/// panel. Sharing takes two threads at least; if there are fewer, some threads have a panel more.
pub(super) fn shares(panels: usize, threads: usize) -> (usize, usize) {
    let over = panels % threads;
    if over == 0 || threads / over < 2 { (panels, threads) } else { (panels - over, threads / over) }
}

/// Returns the number of parts that rows are cut into where columns are cut into `runs`. A few tasks a thread even out other work on the
/// machine, and every thread has the same number.
fn parts(threads: usize, runs: usize) -> usize {
    let least = if threads == 1 { 1 } else { (4 * threads).div_ceil(runs) };
    (least..least + threads).find(|parts| (runs * parts).is_multiple_of(threads)).unwrap_or(least)
}

/// Runs tasks on the pool, or on this thread if the product is one thread's. `grain` tasks are given out together.
fn run(threads: usize, tasks: usize, grain: usize, f: impl Fn(usize) + Sync + Send) {
    if threads == 1 {
        (0..tasks).for_each(f);
    } else {
        for_each_part(tasks.div_ceil(grain), |part| (part * grain..tasks.min((part + 1) * grain)).for_each(&f));
    }
}

impl MatrixMut<'_> {
    /// Returns the block at (i, j) if it lies inside C, its elements are f32, and its rows are lines of memory.
    fn whole_block(&self, (i, j): (usize, usize), (rows, cols): (usize, usize)) -> Option<*mut f32> {
        match self.data {
            Target::F32(target) if !self.turned && i + rows <= self.rows && j + cols <= self.cols => {
                Some(target.pointer(self.start + i * self.stride + j))
            }
            _ => None,
        }
    }

    /// Prefetches the rows of the block at (i, j), a line of each, if they are bf16 and will be written.
    fn prefetch_block(&self, (i, j): (usize, usize), rows: usize) {
        if let (Target::Bf16(target), false) = (&self.data, self.turned) {
            (i..self.rows.min(i + rows))
                .for_each(|row| cache::prefetch_write(target.pointer(self.start + row * self.stride + j)));
        }
    }
}

/// Writes the part of the block at (i, j) that lies inside C. The block is the first of `sums`.
///
/// # Safety
///
/// The block of C belongs to the caller, and the machine has the kernel's instructions.
unsafe fn write_block<K: Kernel>(
    kernel: &K,
    c: &MatrixMut,
    (i, j): (usize, usize),
    sums: &mut [f32],
    accumulate: bool,
) {
    let (rows, cols) = (K::ROWS.min(c.rows - i), K::COLS.min(c.cols - j));
    if c.turned {
        // SAFETY: by the caller's promise.
        return unsafe { turned::write::<K>(c, (i, j), sums, accumulate) };
    }
    let block = &sums[..K::ROWS * K::COLS];
    let start = c.start + i * c.stride + j;
    match c.data {
        Target::F32(target) => {
            for (row, block) in block.chunks_exact(K::COLS).take(rows).enumerate() {
                // SAFETY: inside C, and this task's alone.
                let to = unsafe { target.slice(start + row * c.stride, cols) };
                for (to, from) in to.iter_mut().zip(block) {
                    *to = if accumulate { *to + from } else { *from };
                }
            }
        }
        // SAFETY: inside C by the constructor's check, and this task's alone.
        Target::Bf16(target) => unsafe {
            kernel.write_bf16(block, target.pointer(start), c.stride, (rows, cols), accumulate);
        },
    }
}

crate::vector::vectorized! {
    /// Writes or adds a line of sums to a result.
    fn write_line(from: &[f32], to: &mut [bf16], accumulate: bool) {
        put(to, from.iter().copied(), accumulate);
    }
}
