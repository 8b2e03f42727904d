//! Linear + cross-entropy on the CPU, a block of the vocabulary at a time.
//!
//! Each chunk of rows takes two passes over the vocabulary. The first computes logits, and for each row keeps the largest logit and the sum
//! of the exponentials below it, block after block (Milakov and Gimelshein 2018). The second turns logits into their gradient, in the dtype
//! of `x`. A tile of the gradient goes into dX and dW while it is in the cache. Between the passes logits are either *kept* (`chunk_rows`
//! of them) or *computed again*. They are computed again if products cost less than memory, or if few rows are allowed. Then no more than a
//! block of them exists at a time.
//!
//! Logits lie transposed, one entry of the vocabulary after the other. Then W, by far the largest operand, is read row by row in place, and
//! the other operand, the rows of x, is packed once for the whole vocabulary. The same holds for dW.
//!
//! In the first pass the vocabulary is divided into extents. Each extent has its own statistics, which are combined
//! in order at the end. The second pass goes through the vocabulary tile by tile, and all threads work on one tile: on its
//! blocks of logits, then on its products. Extents and tiles depend on sizes only, and so does every sum.
//!
//! If a table comes by rows ([`crate::by_rows`]), only the rows in use are in memory: in the first pass a block for each thread, in the
//! second one tile for all.
//!
//! Shapes: C rows of a chunk, filled up with rows of zeros to whole vectors; S logits from one entry to the next;
//! L extents; E entries of a tile.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Result, Tensor};

use super::CrossEntropy;
use crate::by_rows::{OF_THREAD, Rows, WINDOW};
use crate::matmul::{
    Buffer, Factor, Matrix, MatrixMut, Packed, Threads, across_bytes, multiply_as_a, multiply_packed, product_bytes,
};
use crate::needs::{Kept, Needs, elements};
use crate::ops::soft_cap;
use crate::ops::token_loss::{LossSums, TokenLoss};
use crate::parallel::{Shared, for_each_part_by, for_each_rows, threads};
use crate::processor::processor;
use crate::quantised::Weight;
use crate::simd::{Lanes, WIDTH, simd};
use crate::storage::{Element, Operand, View, filled, scratch, update, with_element};
use crate::vector::exp;

/// Entries of the vocabulary whose logits are computed at a time: whole blocks of every kernel.
const BLOCK: usize = 96;
/// The same if larger blocks would leave threads idle: whole blocks of all kernels but one.
const SMALL_BLOCK: usize = 32;
/// Gradients of logits that go into dX and dW at a time.
const TILE_CELLS: usize = 480 << 10;
/// The fewest and the most blocks of a tile. A product as deep as the fewest is fast. With the most, the threads' common work on a tile is
/// long compared with the waits between tiles.
const TILE_BLOCKS: (usize, usize) = (10, 20);
/// `window_bytes` states the bytes of a tile, or of a block for each thread: neither may be larger.
const _: () = assert!(TILE_BLOCKS.1 * BLOCK <= WINDOW && BLOCK <= OF_THREAD);
/// The most extents of the vocabulary: a few for each of many threads.
const MAX_EXTENTS: usize = 64;
/// Rows at a time if logits are computed again. Reading W, and adding to dW, costs once for each chunk; sums of dX cost memory for each row
/// of a chunk.
const RECOMPUTED_ROWS: usize = 1024;

/// Treatment of logits between the two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logits {
    Kept,
    Recomputed,
}

/// With fewer rows than this, logits are not kept. Going through the vocabulary for every few rows takes longer than computing their logits
/// again, many rows at a time (t5-small, f32: 1.48 times the step with 16 rows kept at a time).
const FEWEST_KEPT: usize = 32;

impl Logits {
    /// The faster treatment for activations of this dtype on this machine, if `chunk_rows` rows may be kept.
    pub(super) fn choose(x: DType, chunk_rows: usize) -> Self {
        let again = (x == DType::BF16 && processor().has_tiles()) || chunk_rows < FEWEST_KEPT;
        if again { Logits::Recomputed } else { Logits::Kept }
    }
}

/// The sizes that a call is cut into.
#[derive(Clone, Copy)]
struct Tiling {
    logits: Logits,
    /// Rows of a chunk.
    chunk: usize,
    /// Extents of the vocabulary.
    extents: usize,
    /// Entries of an extent.
    extent: usize,
    /// Entries of a tile.
    tile: usize,
}

impl Tiling {
    fn new(logits: Logits, rows: usize, vocabulary: usize, chunk_rows: usize) -> Self {
        let extent = vocabulary.div_ceil(MAX_EXTENTS).next_multiple_of(BLOCK).max(BLOCK);
        let chunk = match logits {
            Logits::Kept => chunk_rows,
            Logits::Recomputed => RECOMPUTED_ROWS,
        };
        let chunk = chunk.min(rows);
        let blocks = (TILE_CELLS / chunk.next_multiple_of(WIDTH).max(1) / BLOCK).clamp(TILE_BLOCKS.0, TILE_BLOCKS.1);
        Self { logits, chunk, extents: vocabulary.div_ceil(extent), extent, tile: blocks * BLOCK }
    }

    /// C.
    fn lanes(&self) -> usize {
        self.chunk.next_multiple_of(WIDTH)
    }

    /// The number of logits in the buffer of [`Pass`].
    fn held(&self, vocabulary: usize) -> u64 {
        if self.logits == Logits::Kept { elements([vocabulary, stride(self.lanes())]) } else { 0 }
    }

    /// A block of logits for each thread, if they are computed again.
    fn workers(&self) -> Vec<Buffer> {
        (0..threads()).map(|_| Buffer::new::<f32>(self.of_worker())).collect()
    }

    /// Bytes of all these blocks. The threads keep them for the next call.
    fn bytes_of_workers(&self) -> u64 {
        elements([processor().threads, self.of_worker(), size_of::<f32>()])
    }

    /// The number of logits in such a block.
    fn of_worker(&self) -> usize {
        if self.logits == Logits::Kept { 0 } else { BLOCK * stride(self.lanes()) }
    }

    /// Entries of a tile whose logits a thread turns into gradients at a time.
    fn block(&self) -> usize {
        if self.tile / BLOCK >= 4 * threads() { BLOCK } else { SMALL_BLOCK }
    }

    /// Bytes of the sums of logits, which smoothed labels need.
    fn bytes_of_logit_sums(&self, loss: TokenLoss) -> u64 {
        if loss.label_smoothing == 0.0 { 0 } else { elements([4, self.lanes(), self.extents]) }
    }

    /// Bytes of the buffers of [`Pass`].
    fn bytes(&self, vocabulary: usize, width: usize, x: DType, gradients: bool) -> u64 {
        let (rows, extents, size, rounds) = (self.lanes(), self.extents, x.size_in_bytes(), x == DType::BF16);
        let statistics = elements([4, rows, 2 * extents + 2]);
        let of_both = elements([rows, width, size]) + Packed::bytes(width, rows, rounds) + statistics;
        let of_gradients = Packed::bytes(rows, width, rounds) + elements([rows, self.tile * size + width * 4]);
        of_both + 4 * self.held(vocabulary) + if gradients { of_gradients } else { 0 }
    }
}

/// Logits from one entry to the next, for `rows` rows. Never a multiple of a page: then the same row of all entries would fall into one set
/// of the first-level cache.
fn stride(rows: usize) -> usize {
    if rows.is_multiple_of(1024) { rows + WIDTH } else { rows }
}

/// The number of chunks that `rows` rows are cut into.
pub(super) fn chunks(x: DType, rows: usize, chunk_rows: usize, with_gradients: bool) -> usize {
    let logits = if with_gradients { Logits::choose(x, chunk_rows) } else { Logits::Recomputed };
    rows.div_ceil(Tiling::new(logits, rows, 1, chunk_rows).chunk.max(1))
}

/// Without a second pass there is no reason to keep logits.
pub(super) fn loss_needs(rows: usize, (vocabulary, width): (usize, usize), x: DType, chunk_rows: usize) -> Needs {
    let tiling = Tiling::new(Logits::Recomputed, rows, vocabulary, chunk_rows);
    let weights = product_bytes(rows, (width, 0, vocabulary), x);
    let kept = Kept { weights, loss: tiling.bytes_of_workers(), ..Kept::default() };
    let transient = tiling.bytes(vocabulary, width, x, false);
    Needs { transient, kept, ..Needs::default() }.with_products(1, (rows, width, vocabulary))
}

pub(super) fn gradients_needs(rows: usize, (vocabulary, width): (usize, usize), x: DType, c: &CrossEntropy) -> Needs {
    let tiling = Tiling::new(Logits::choose(x, c.chunk_rows), rows, vocabulary, c.chunk_rows);
    // The product for dX sums over the entries of a tile. Both its operands lie across these: the gradients of the logits, and rows of W.
    let operands = across_bytes((tiling.lanes(), tiling.tile.min(vocabulary), width), x);
    let kept = Kept { loss: tiling.bytes_of_workers(), ..operands };
    let transient = tiling.bytes(vocabulary, width, x, true) + tiling.bytes_of_logit_sums(c.token_loss);
    Needs { transient, kept, ..Needs::default() }.with_products(3, (rows, width, vocabulary))
}

/// The losses of `rows`.
pub(super) fn losses(x: &Tensor, w: Weight, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<Vec<LossSums>> {
    let x = x.contiguous()?;
    let x_view = View::new(&x)?;
    let (v, d) = w.dims2()?;
    w.with_rows(|w| {
        with_element!(x.dtype(), T, {
            // Without a second pass there is no reason to keep logits.
            let tiling = Tiling::new(Logits::Recomputed, rows.len(), v, c.chunk_rows);
            let plain = CrossEntropy { token_loss: c.token_loss.alone(), ..*c };
            let mut pass = Pass::<T>::new(x_view.slice::<T>()?, w, (v, d), labels, &plain, tiling);
            Ok(rows.chunks(tiling.chunk.max(1)).flat_map(|rows| pass.statistics(rows)).collect())
        })
    })
}

pub(super) fn gradients(
    x: &Tensor,
    w: Weight,
    labels: &[u32],
    rows: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
    (logits, factors): (Logits, Option<&[f32]>),
) -> Result<(LossSums, Tensor)> {
    let x = x.contiguous()?;
    let x_view = View::new(&x)?;
    let (v, d) = w.dims2()?;
    let tiling = Tiling::new(logits, rows.len(), v, c.chunk_rows);
    if let (Some((dw, false)), true) = (dw, rows.is_empty()) {
        crate::zero(dw)?;
    }
    let mut loss = LossSums::default();
    let dx = w.with_rows(|table| {
        with_element!(x.dtype(), T, {
            let mut pass = Pass::<T>::new(x_view.slice::<T>()?, table, (v, d), labels, c, tiling);
            pass.prepare_gradients();
            filled::<T>(x.shape(), |dx| {
                clear_ignored(dx, rows, d);
                let dx = Shared::new(dx);
                for (chunk, rows) in rows.chunks(tiling.chunk.max(1)).enumerate() {
                    loss += pass.statistics(rows).into_iter().sum::<LossSums>();
                    match dw {
                        None => pass.gradients::<f32>(rows, None),
                        Some((dw, accumulate)) => with_element!(dw.dtype(), G, {
                            update::<G, _>("linear_cross_entropy_backward", dw, &[&x, w.tensor()], |dw| {
                                pass.gradients::<G>(rows, Some((Shared::new(dw), accumulate || chunk > 0)));
                                Ok(())
                            })?
                        }),
                    }
                    pass.write(rows, dx, factors);
                }
                Ok(())
            })
        })
    })?;
    Ok((loss, dx))
}

/// Sets the rows of `dx` that do not count to zero.
fn clear_ignored<T: Element>(dx: &mut [T], rows: &[u32], width: usize) {
    let mut next = 0;
    for &row in rows {
        let row = row as usize * width;
        dx[next..row].fill(T::from_f32(0.0));
        next = row + width;
    }
    dx[next..].fill(T::from_f32(0.0));
}

/// The operands and the buffers of a call.
struct Pass<'a, T> {
    x: &'a [T],
    w: Rows<'a>, // (V, D)
    vocabulary: usize,
    width: usize,
    labels: &'a [u32],
    /// The factor of the logits as [`Pass::compute`] leaves them: 1 if it caps them.
    logit_scale: f32,
    /// Scale and cap, where there is a cap.
    soft_cap: Option<[f32; 2]>,
    gradient_scale: f32,
    token_loss: TokenLoss,
    tiling: Tiling,
    /// Whether products with W round to bf16: if X is bf16.
    rounds: bool,
    x_rows: Vec<T>,          // (C, D): the rows of the chunk, gathered, then zeros
    columns: Option<Packed>, // (D, C): the same as the columns of a right-hand operand
    logits: Vec<f32>,        // kept: (V, S)
    largest: Vec<f32>,       // (L, C), then (C): largest scaled logit
    total: Vec<f32>,         // (L, C), then (C): sum of exp(logit - largest)
    logit_sums: Vec<f32>,    // (L, C) for smoothed labels: sum of the unscaled logits
    dlogits: Vec<T>,         // (E, C)
    dx: Vec<f32>,            // (C, D)
}

impl<'a, T: Lanes> Pass<'a, T> {
    fn new(
        x: &'a [T],
        w: Rows<'a>,
        (vocabulary, width): (usize, usize),
        labels: &'a [u32],
        c: &CrossEntropy,
        tiling: Tiling,
    ) -> Self {
        let rows = tiling.lanes();
        Self {
            x,
            w,
            vocabulary,
            width,
            labels,
            logit_scale: if c.soft_cap.is_some() { 1.0 } else { c.logit_scale as f32 },
            soft_cap: c.soft_cap.map(|cap| [c.logit_scale as f32, cap as f32]),
            gradient_scale: (c.gradient_scale * c.logit_scale) as f32,
            token_loss: c.token_loss,
            tiling,
            rounds: matches!(T::operand(x), Operand::Bf16(_)),
            x_rows: scratch(rows * width),
            columns: None,
            logits: scratch(tiling.held(vocabulary) as usize),
            largest: scratch(tiling.extents * rows),
            total: scratch(tiling.extents * rows),
            logit_sums: scratch(if c.token_loss.label_smoothing == 0.0 { 0 } else { tiling.extents * rows }),
            dlogits: Vec::new(),
            dx: Vec::new(),
        }
    }

    fn prepare_gradients(&mut self) {
        let rows = self.tiling.lanes();
        self.dlogits = scratch(rows * self.tiling.tile);
        self.dx = scratch(rows * self.width);
    }

    /// The entries of an extent.
    fn extent(&self, extent: usize) -> Range<usize> {
        let size = self.tiling.extent;
        extent * size..self.vocabulary.min((extent + 1) * size)
    }

    /// The logits of the `count` entries at `entry`, for `rows` rows: among all that are kept, or at the beginning of the worker's block.
    ///
    /// # Safety
    ///
    /// Nothing else reaches the logits of these entries.
    unsafe fn place<'b>(
        &self,
        kept: Shared<f32>,
        worker: &'b mut Buffer,
        (entry, count): (usize, usize),
        rows: usize,
    ) -> &'b mut [f32] {
        let stride = stride(rows);
        match self.tiling.logits {
            // SAFETY: by the caller's promise.
            Logits::Kept => unsafe { kept.slice(entry * stride, count * stride) },
            Logits::Recomputed => &mut worker.cells()[..count * stride],
        }
    }

    /// Computes the logits of entries for `rows` rows of x, with their cap. `entries` are their rows of W.
    fn compute(&self, entries: Factor, rows: usize, logits: &mut [f32]) {
        let columns = self.columns.as_ref().expect("packed by the first pass");
        // SAFETY: `logits` lives longer than the product.
        let target = unsafe { MatrixMut::part(Shared::new(logits), 0, entries.rows(), rows, stride(rows)) };
        multiply_packed(target, entries, columns, false, Threads::One);
        if let Some([scale, cap]) = self.soft_cap {
            soft_cap::apply(logits, scale, cap);
        }
    }

    /// The first pass: statistics of the softmax of each row. Returns the losses.
    fn statistics(&mut self, rows: &[u32]) -> Vec<LossSums> {
        let (d, n) = (self.width, rows.len());
        let lanes = n.next_multiple_of(WIDTH);
        for (&row, x) in rows.iter().zip(self.x_rows.chunks_exact_mut(d.max(1))) {
            x.copy_from_slice(&self.x[row as usize * d..][..d]);
        }
        self.x_rows[n * d..lanes * d].fill(T::from_f32(0.0));
        let x_rows = Matrix::new(T::operand(&self.x_rows), lanes, d);
        self.columns = Some(Packed::new(x_rows.t(), self.rounds, Threads::All));

        let mut of_label = vec![0f32; n];
        let label_out = Shared::new(&mut of_label);
        let logits = Shared::new(&mut self.logits);
        let (largest, total) = (Shared::new(&mut self.largest), Shared::new(&mut self.total));
        let sums = (!self.logit_sums.is_empty()).then(|| Shared::new(&mut self.logit_sums));
        let this = &*self;
        let mut workers: Vec<_> =
            this.tiling.workers().into_iter().map(|worker| (worker, this.w.buffer(BLOCK))).collect();
        let (count_of_workers, waited) = (workers.len() as u32, AtomicU64::new(0));
        for_each_part_by(&mut workers, this.tiling.extents, |(worker, buffer), extent| {
            // SAFETY: each extent has its own statistics.
            let (largest, total) =
                unsafe { (largest.slice(extent * lanes, lanes), total.slice(extent * lanes, lanes)) };
            largest.fill(f32::NEG_INFINITY);
            total.fill(0.0);
            // SAFETY: as above.
            let mut sums = sums.map(|sums| unsafe { sums.slice(extent * lanes, lanes) });
            sums.iter_mut().for_each(|sums| sums.fill(0.0));
            let entries = this.extent(extent);
            for entry in entries.clone().step_by(BLOCK) {
                let count = BLOCK.min(entries.end - entry);
                // SAFETY: each extent has its own entries.
                let logits = unsafe { this.place(logits, worker, (entry, count), lanes) };
                let began = this.w.is_copied().then(Instant::now);
                let of_entries = this.w.here(entry..entry + count, buffer);
                waited.fetch_add(began.map_or(0, |began| began.elapsed().as_nanos() as u64), Ordering::Relaxed);
                this.compute(of_entries, lanes, logits);
                online_softmax_update(logits, stride(lanes), this.logit_scale, largest, total);
                if let Some(sums) = &mut sums {
                    add_entries(logits, stride(lanes), sums);
                }
                for (i, &row) in rows.iter().enumerate() {
                    let label = (this.labels[row as usize] as usize).wrapping_sub(entry);
                    if label < count {
                        // SAFETY: a label lies in one block.
                        let of_label = unsafe { label_out.slice(i, 1) };
                        of_label[0] = logits[label * stride(lanes) + i] * this.logit_scale;
                    }
                }
            }
            // The threads take the next extents now. The first extent after those is read ahead.
            let next = extent + 1 + threads();
            if next < this.tiling.extents {
                this.w.read_ahead(this.extent(next));
            }
        });
        drop(workers);
        heap::count_waits(Duration::from_nanos(waited.into_inner()), count_of_workers);
        self.combine(lanes);
        let of_row = |i: usize| {
            let sum = || {
                self.logit_sums.chunks_exact(lanes).take(self.tiling.extents).map(|of| f64::from(of[i])).sum::<f64>()
            };
            let mean = || sum() * f64::from(self.logit_scale) / self.vocabulary as f64;
            self.token_loss.of_row(self.log_z(i), f64::from(of_label[i]), mean)
        };
        (0..n).map(of_row).collect()
    }

    /// The logarithm of the sum of the exponentials of a row of the chunk, after the first pass.
    fn log_z(&self, row: usize) -> f64 {
        f64::from(self.largest[row]) + f64::from(self.total[row]).ln()
    }

    /// Combines the statistics of the extents, in order, into those of the first extent.
    fn combine(&mut self, rows: usize) {
        let ((largest, of_others), (total, others)) = (self.largest.split_at_mut(rows), self.total.split_at_mut(rows));
        let extents = 0..self.tiling.extents.saturating_sub(1);
        for of in extents.map(|extent| extent * rows..(extent + 1) * rows) {
            merge(&of_others[of.clone()], &others[of], largest, total);
        }
    }

    /// The second pass: sums of dX, and dW in place.
    fn gradients<G: Element>(&mut self, rows: &[u32], dw: Option<(Shared<G>, bool)>) {
        let (d, n, scale) = (self.width, rows.len(), self.gradient_scale);
        let lanes = n.next_multiple_of(WIDTH);
        // Rows of zeros have no gradient.
        let factor = |i: usize| {
            if i >= n {
                return 0.0;
            }
            let of_row = if self.token_loss.has_plain_softmax() {
                scale
            } else {
                (f64::from(scale) * self.token_loss.of_softmax(self.log_z(i))) as f32
            };
            of_row / self.total[i]
        };
        let factors: Vec<f32> = (0..lanes).map(factor).collect();
        let x_rows = Matrix::new(T::operand(&self.x_rows), lanes, d);
        let x_rows = dw.map(|_| Packed::new(x_rows, matches!(T::operand(&[]), Operand::Bf16(_)), Threads::All));
        let (mut dlogits, mut dx) = (std::mem::take(&mut self.dlogits), std::mem::take(&mut self.dx));
        let (table, mut buffer) = (self.w, self.w.buffer(self.tiling.tile));
        table.read_ahead(self.tile(0));
        for first in (0..self.vocabulary).step_by(self.tiling.tile) {
            let tile = self.tile(first);
            table.read_ahead(self.tile(tile.end));
            let w = table.load_in_parallel(tile.clone(), &mut buffer);
            let dlogits = &mut dlogits[..tile.len() * lanes];
            self.of_tile(rows, (tile.clone(), w), &factors, dlogits);
            let dlogits = Matrix::new(T::operand(dlogits), tile.len(), lanes);
            multiply_as_a(MatrixMut::new(&mut dx, lanes, d), dlogits.t(), w, first > 0, Threads::All);
            let (Some((dw, accumulate)), Some(x_rows)) = (dw, &x_rows) else { continue };
            // SAFETY: dW is this call's alone.
            let dw = unsafe { MatrixMut::part(dw, first * d, tile.len(), d, d) };
            multiply_packed(dw, dlogits, x_rows, accumulate, Threads::All);
        }
        (self.dlogits, self.dx) = (dlogits, dx);
    }

    /// The entries of the tile at `first`.
    fn tile(&self, first: usize) -> Range<usize> {
        first..self.vocabulary.min(first + self.tiling.tile)
    }

    /// Writes the gradients of the logits of a tile. `w` are the tile's rows of W.
    fn of_tile(&mut self, rows: &[u32], (tile, w): (Range<usize>, Factor), factors: &[f32], dlogits: &mut [T]) {
        let (lanes, block) = (factors.len(), self.tiling.block());
        let of_label = (f64::from(self.gradient_scale) * self.token_loss.of_label()) as f32;
        let of_each = (f64::from(self.gradient_scale) * self.token_loss.of_each(self.vocabulary)) as f32;
        let (logits, dlogits) = (Shared::new(&mut self.logits), Shared::new(dlogits));
        let this = &*self;
        for_each_part_by(&mut this.tiling.workers(), tile.len().div_ceil(block), |worker, number| {
            let entry = tile.start + number * block;
            let count = block.min(tile.end - entry);
            // SAFETY: each block has its own entries.
            let logits = unsafe { this.place(logits, worker, (entry, count), lanes) };
            // SAFETY: as above.
            let dlogits = unsafe { dlogits.slice(number * block * lanes, count * lanes) };
            if this.tiling.logits == Logits::Recomputed {
                this.compute(w.some_rows(number * block..number * block + count), lanes, logits);
            }
            softmax(logits, stride(lanes), this.logit_scale, &this.largest[..lanes], factors, of_each, dlogits);
            for (i, &row) in rows.iter().enumerate() {
                let label = (this.labels[row as usize] as usize).wrapping_sub(entry);
                if label < count {
                    // The difference of two numbers that may be close: rounded once, after the subtraction.
                    let logit = logits[label * stride(lanes) + i] * this.logit_scale;
                    let p = exp(logit - this.largest[i]) * factors[i];
                    dlogits[label * lanes + i] = T::from_f32(p - of_each - of_label);
                }
            }
            if let Some([_, cap]) = this.soft_cap {
                for (capped, dlogits) in logits.chunks_exact(stride(lanes)).zip(dlogits.chunks_exact_mut(lanes)) {
                    soft_cap::apply_slope(capped, cap, dlogits);
                }
            }
        });
    }

    /// Writes the sums of dX to their rows, each times the row's factor if there are factors.
    fn write(&self, rows: &[u32], dx: Shared<T>, factors: Option<&[f32]>) {
        let d = self.width;
        for_each_rows(rows.len(), d, |part| {
            for i in part {
                // SAFETY: each row of the chunk is another row of dX.
                let dx = unsafe { dx.slice(rows[i] as usize * d, d) };
                let factor = factors.map_or(1.0, |factors| factors[rows[i] as usize]);
                for (dx, &sum) in dx.iter_mut().zip(&self.dx[i * d..][..d]) {
                    *dx = T::from_f32(sum * factor);
                }
            }
        });
    }
}

simd! {
    /// Updates the statistics of each row from a block of logits, which lie `stride` apart for each entry.
    fn online_softmax_update<S>(s, logits: &[f32], stride: usize, scale: f32, largest: &mut [f32], total: &mut [f32]) {
        let scales = s.splat(scale);
        let (largest, total) = (largest.as_chunks_mut::<WIDTH>().0, total.as_chunks_mut::<WIDTH>().0);
        for (i, (largest, total)) in largest.iter_mut().zip(total).enumerate() {
            let before = s.load(largest);
            let mut top = before;
            for of_entry in logits.chunks_exact(stride) {
                let logits = &of_entry.as_chunks::<WIDTH>().0[i];
                top = s.max(s.mul(s.load(logits), scales), top);
            }
            let mut sum = s.mul(s.load(total), s.exp(s.sub(before, top)));
            for of_entry in logits.chunks_exact(stride) {
                let logits = &of_entry.as_chunks::<WIDTH>().0[i];
                sum = s.add(sum, s.exp(s.sub(s.mul(s.load(logits), scales), top)));
            }
            s.store(top, largest);
            s.store(sum, total);
        }
    }

    /// Merges the statistics of each row with those of other logits.
    fn merge<S>(s, of_others: &[f32], others: &[f32], largest: &mut [f32], total: &mut [f32]) {
        let (of_others, others) = (of_others.as_chunks::<WIDTH>().0, others.as_chunks::<WIDTH>().0);
        let (largest, total) = (largest.as_chunks_mut::<WIDTH>().0, total.as_chunks_mut::<WIDTH>().0);
        for (((other, part), largest), total) in of_others.iter().zip(others).zip(largest).zip(total) {
            let (other, before) = (s.load(other), s.load(largest));
            let top = s.max(other, before);
            let sum = s.mul(s.load(total), s.exp(s.sub(before, top)));
            s.store(s.add(sum, s.mul(s.load(part), s.exp(s.sub(other, top)))), total);
            s.store(top, largest);
        }
    }

    /// Adds the logits of each row of a block.
    fn add_entries<S>(s, logits: &[f32], stride: usize, sums: &mut [f32]) {
        for (i, sum) in sums.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
            let mut all = s.load(sum);
            for of_entry in logits.chunks_exact(stride) {
                all = s.add(all, s.load(&of_entry.as_chunks::<WIDTH>().0[i]));
            }
            s.store(all, sum);
        }
    }

    /// Writes `factor * exp(scale * logit - largest) - less`, an entry after the other.
    fn softmax<S, T: Lanes>(
        s,
        logits: &[f32],
        stride: usize,
        scale: f32,
        largest: &[f32],
        factors: &[f32],
        less: f32,
        to: &mut [T],
    ) {
        let (scales, less) = (s.splat(scale), s.splat(less));
        let (rows, factors) = (largest.len(), factors.as_chunks::<WIDTH>().0);
        let largest = largest.as_chunks::<WIDTH>().0;
        for (logits, to) in logits.chunks_exact(stride).zip(to.chunks_exact_mut(rows)) {
            let logits = logits.as_chunks::<WIDTH>().0;
            let to = to.as_chunks_mut::<WIDTH>().0;
            for (((logits, to), largest), factor) in logits.iter().zip(to).zip(largest).zip(factors) {
                let e = s.exp(s.sub(s.mul(s.load(logits), scales), s.load(largest)));
                T::store(s, s.sub(s.mul(e, s.load(factor)), less), to);
            }
        }
    }
}
