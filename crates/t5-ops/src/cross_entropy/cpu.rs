//! Linear + cross-entropy on the CPU, a block of the vocabulary at a time.
//!
//! Each chunk of rows takes two passes over the vocabulary. The first computes logits and keeps of each row
//! the largest logit and the sum of the exponentials below it, block after block (Milakov and Gimelshein
//! 2018). The second turns logits into their gradient, in the dtype of `x`, and a tile of it goes into dX and
//! dW while it is in the cache. Between the passes logits are *kept* (`chunk_rows` of them), or, where
//! products cost less than memory, *computed again*, and then no more than a block of them ever exists.
//!
//! The vocabulary is divided among the threads once, in equal stretches. Each stretch has its own statistics
//! and its own sum of dX, which are combined in order at the end, and owns its rows of dW.
//!
//! Shapes: C rows of a chunk, L stretches.

use candle_core::{DType, Result, Tensor};

use super::CrossEntropy;
use crate::matmul::{Matrix, MatrixMut, Operand, Threads, multiply};
use crate::parallel::{Shared, for_each_part, for_each_rows};
use crate::simd::{Lanes, WIDTH, padded, simd};
use crate::storage::{Element, View, filled, scratch, update, with_element};
use crate::vector::{self, exp};
#[cfg(target_arch = "x86_64")]
use crate::vector::{Isa, isa};

/// Entries of the vocabulary whose logits are computed at a time.
const BLOCK: usize = 256;
/// Entries whose gradient goes into dX and dW at a time: a whole number of blocks.
const TILE: usize = 4 * BLOCK;
/// Rows at a time over all stretches where logits are computed again: packing W, and adding to dW, cost
/// once for each chunk, sums of dX cost memory for each of its rows.
const RECOMPUTED_ROWS: usize = 2048;

/// What becomes of logits between the two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Logits {
    Kept,
    ComputedAgain,
}

impl Logits {
    /// What is faster for activations of this dtype on this machine.
    pub(super) fn of(x: DType) -> Self {
        if x == DType::BF16 && has_tiles() { Logits::ComputedAgain } else { Logits::Kept }
    }
}

/// Whether bf16 products run on tile registers, at ten times the rate of vectors.
fn has_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        isa() == Isa::Amx
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// How a call is cut.
#[derive(Clone, Copy)]
struct Cut {
    logits: Logits,
    /// Rows of a chunk.
    chunk: usize,
    /// Stretches of the vocabulary, one for each thread.
    stretches: usize,
    /// Entries of a stretch.
    stretch: usize,
}

impl Cut {
    fn new(logits: Logits, rows: usize, vocabulary: usize, chunk_rows: usize) -> Self {
        let threads = rayon::current_num_threads();
        let stretch = vocabulary.div_ceil(threads).next_multiple_of(BLOCK);
        let chunk = match logits {
            Logits::Kept => chunk_rows,
            Logits::ComputedAgain => (RECOMPUTED_ROWS / threads).clamp(256, 1024),
        };
        Self { logits, chunk: chunk.min(rows), stretches: vocabulary.div_ceil(stretch), stretch }
    }

    /// Bytes of the buffers below for activations of `size` bytes.
    fn bytes(&self, vocabulary: usize, width: usize, size: usize, gradients: bool) -> usize {
        let Self { chunk, stretches, .. } = *self;
        let logits = match self.logits {
            Logits::Kept if gradients => chunk * vocabulary * 4,
            _ => stretches * chunk * BLOCK * 4,
        };
        let sums = stretches * chunk * (TILE * size + width * 4);
        chunk * (width * size + 8 * stretches) + logits + if gradients { sums } else { 0 }
    }
}

/// What a call holds beside its operands and results.
pub(super) fn bytes(rows: usize, vocabulary: usize, width: usize, x: DType, c: usize, gradients: bool) -> usize {
    let cut = Cut::new(Logits::of(x), rows, vocabulary, c);
    cut.bytes(vocabulary, width, x.size_in_bytes(), gradients)
}

pub(super) fn loss(x: &Tensor, w: &Tensor, labels: &[u32], rows: &[u32], c: &CrossEntropy) -> Result<f64> {
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    let (x_view, w_view) = (View::new(&x)?, View::new(&w)?);
    let (v, d) = w.dims2()?;
    with_element!(x.dtype(), T, {
        // Without a second pass there is nothing to keep logits for.
        let cut = Cut::new(Logits::ComputedAgain, rows.len(), v, c.chunk_rows);
        let mut pass = Pass::<T>::new(x_view.slice::<T>()?, w_view.operand()?, (v, d), labels, c, cut);
        Ok(rows.chunks(cut.chunk.max(1)).map(|rows| pass.statistics(rows)).sum())
    })
}

pub(super) fn gradients(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    rows: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
    logits: Logits,
) -> Result<(f64, Tensor)> {
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    let (x_view, w_view) = (View::new(&x)?, View::new(&w)?);
    let (v, d) = w.dims2()?;
    let cut = Cut::new(logits, rows.len(), v, c.chunk_rows);
    if let (Some((dw, false)), true) = (dw, rows.is_empty()) {
        crate::zero(dw)?;
    }
    let mut loss = 0.0;
    let dx = with_element!(x.dtype(), T, {
        let mut pass = Pass::<T>::new(x_view.slice::<T>()?, w_view.operand()?, (v, d), labels, c, cut);
        pass.prepare_gradients();
        filled::<T>(x.shape(), |dx| {
            clear_ignored(dx, rows, d);
            let dx = Shared::new(dx);
            for (chunk, rows) in rows.chunks(cut.chunk.max(1)).enumerate() {
                loss += pass.statistics(rows);
                match dw {
                    None => pass.gradients::<f32>(rows, None),
                    Some((dw, accumulate)) => with_element!(dw.dtype(), G, {
                        update::<G, _>("linear_cross_entropy_backward", dw, &[&x, &w], |dw| {
                            pass.gradients::<G>(rows, Some((Shared::new(dw), accumulate || chunk > 0)));
                            Ok(())
                        })?
                    }),
                }
                pass.add_up(rows, dx);
            }
            Ok(())
        })?
    });
    Ok((loss, dx))
}

/// Sets the rows between those that count to zero.
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
    w: Operand<'a>,
    vocabulary: usize,
    width: usize,
    labels: &'a [u32],
    logit_scale: f32,
    gradient_scale: f32,
    cut: Cut,
    x_rows: Vec<T>,    // (C, D): the rows of the chunk, gathered
    logits: Vec<f32>,  // kept: (V, C) in blocks of (C, BLOCK); else a block for each stretch
    largest: Vec<f32>, // (L, C), then (C): largest scaled logit
    total: Vec<f32>,   // (L, C), then (C): sum of exp(logit - largest)
    dlogits: Vec<T>,   // (L, C, TILE)
    dx: Vec<f32>,      // (L, C, D)
}

impl<'a, T: Lanes> Pass<'a, T> {
    fn new(
        x: &'a [T],
        w: Operand<'a>,
        (vocabulary, width): (usize, usize),
        labels: &'a [u32],
        c: &CrossEntropy,
        cut: Cut,
    ) -> Self {
        let Cut { chunk, stretches, .. } = cut;
        let logits = match cut.logits {
            Logits::Kept => chunk * vocabulary,
            Logits::ComputedAgain => stretches * chunk * BLOCK,
        };
        Self {
            x,
            w,
            vocabulary,
            width,
            labels,
            logit_scale: c.logit_scale as f32,
            gradient_scale: (c.gradient_scale * c.logit_scale) as f32,
            cut,
            x_rows: scratch(chunk * width),
            logits: scratch(logits),
            largest: scratch(stretches * chunk),
            total: scratch(stretches * chunk),
            dlogits: Vec::new(),
            dx: Vec::new(),
        }
    }

    fn prepare_gradients(&mut self) {
        let Cut { chunk, stretches, .. } = self.cut;
        self.dlogits = scratch(stretches * chunk * TILE);
        self.dx = scratch(stretches * chunk * self.width);
    }

    /// The entries of a stretch.
    fn stretch(&self, stretch: usize) -> std::ops::Range<usize> {
        let size = self.cut.stretch;
        stretch * size..self.vocabulary.min((stretch + 1) * size)
    }

    /// Rows `first` to `first + count` of W.
    fn entries(&self, first: usize, count: usize) -> Matrix<'a> {
        let range = first * self.width..(first + count) * self.width;
        match self.w {
            Operand::F32(data) => Matrix::new(data[range].into(), count, self.width),
            Operand::Bf16(data) => Matrix::new(data[range].into(), count, self.width),
        }
    }

    /// Where the logits of the block at `entry` of a stretch lie: offset and length.
    fn place(&self, stretch: usize, entry: usize, rows: usize) -> (usize, usize) {
        let len = BLOCK.min(self.vocabulary - entry) * rows;
        match self.cut.logits {
            Logits::Kept => (entry * rows, len),
            Logits::ComputedAgain => (stretch * self.cut.chunk * BLOCK, len),
        }
    }

    /// Computes the logits of the block at `entry`, (rows, entries of the block).
    fn compute(&self, x_rows: &[T], entry: usize, rows: usize, logits: &mut [f32]) {
        let count = logits.len() / rows;
        let x = Matrix::new(T::operand(x_rows), rows, self.width);
        let w = self.entries(entry, count);
        multiply(MatrixMut::new(logits, rows, count), x, w.t(), false, Threads::One);
    }

    /// The first pass: statistics of the softmax of each row. Returns the sum of the losses.
    fn statistics(&mut self, rows: &[u32]) -> f64 {
        let (d, n) = (self.width, rows.len());
        for (&row, x) in rows.iter().zip(self.x_rows.chunks_exact_mut(d.max(1))) {
            x.copy_from_slice(&self.x[row as usize * d..][..d]);
        }
        let mut of_label = vec![0f32; n];
        let label_out = Shared::new(&mut of_label);
        let logits = Shared::new(&mut self.logits);
        let (largest, total) = (Shared::new(&mut self.largest), Shared::new(&mut self.total));
        let this = &*self;
        for_each_part(this.cut.stretches, |stretch| {
            // SAFETY: each stretch has its own statistics.
            let (largest, total) = unsafe { (largest.slice(stretch * n, n), total.slice(stretch * n, n)) };
            largest.fill(f32::NEG_INFINITY);
            total.fill(0.0);
            let entries = this.stretch(stretch);
            for entry in entries.clone().step_by(BLOCK) {
                let (at, len) = this.place(stretch, entry, n);
                // SAFETY: each stretch has its own blocks.
                let logits = unsafe { logits.slice(at, len) };
                this.compute(&this.x_rows[..n * d], entry, n, logits);
                absorb(logits, this.logit_scale, largest, total);
                let count = len / n;
                for (i, &row) in rows.iter().enumerate() {
                    let label = (this.labels[row as usize] as usize).wrapping_sub(entry);
                    if label < count {
                        // SAFETY: a label lies in one block.
                        let of_label = unsafe { label_out.slice(i, 1) };
                        of_label[0] = logits[i * count + label] * this.logit_scale;
                    }
                }
            }
        });
        self.combine(n);
        let losses =
            (0..n).map(|i| f64::from(self.largest[i]) + f64::from(self.total[i]).ln() - f64::from(of_label[i]));
        losses.sum()
    }

    /// Combines the statistics of the stretches, in order.
    fn combine(&mut self, rows: usize) {
        for i in 0..rows {
            let of = |stretch: usize| stretch * rows + i;
            let stretches = 1..self.cut.stretches;
            let (mut largest, mut total) = (self.largest[i], self.total[i]);
            for (other, part) in stretches.map(|stretch| (self.largest[of(stretch)], self.total[of(stretch)])) {
                let both = if other > largest { other } else { largest };
                total = total * exp(largest - both) + part * exp(other - both);
                largest = both;
            }
            (self.largest[i], self.total[i]) = (largest, total);
        }
    }

    /// The second pass: sums of dX, and dW in place.
    fn gradients<G: Element>(&mut self, rows: &[u32], dw: Option<(Shared<G>, bool)>) {
        let (d, n, scale) = (self.width, rows.len(), self.gradient_scale);
        let factors: Vec<f32> = self.total[..n].iter().map(|total| scale / total).collect();
        let logits = Shared::new(&mut self.logits);
        let (dlogits, dx) = (Shared::new(&mut self.dlogits), Shared::new(&mut self.dx));
        let this = &*self;
        for_each_part(this.cut.stretches, |stretch| {
            // SAFETY: each stretch has its own tile and its own sum.
            let (dlogits, dx) =
                unsafe { (dlogits.slice(stretch * this.cut.chunk * TILE, n * TILE), dx.slice(stretch * n * d, n * d)) };
            let entries = this.stretch(stretch);
            for first in entries.clone().step_by(TILE) {
                let count = TILE.min(entries.end - first);
                let dlogits = &mut dlogits[..n * count];
                for entry in (first..first + count).step_by(BLOCK) {
                    let (at, len) = this.place(stretch, entry, n);
                    // SAFETY: each stretch has its own blocks.
                    let logits = unsafe { logits.slice(at, len) };
                    if this.cut.logits == Logits::ComputedAgain {
                        this.compute(&this.x_rows[..n * d], entry, n, logits);
                    }
                    softmax(
                        logits,
                        this.logit_scale,
                        &this.largest[..n],
                        &factors,
                        &mut dlogits[entry - first..],
                        count,
                    );
                    for (i, &row) in rows.iter().enumerate() {
                        let label = (this.labels[row as usize] as usize).wrapping_sub(entry);
                        if label < len / n {
                            // The difference of two numbers that may be close: rounded once, afterwards.
                            let logit = logits[i * (len / n) + label] * this.logit_scale;
                            let p = exp(logit - this.largest[i]) * factors[i];
                            dlogits[i * count + entry - first + label] = T::from_f32(p - scale);
                        }
                    }
                }
                let dlogits = Matrix::new(T::operand(dlogits), n, count);
                let w = this.entries(first, count);
                multiply(MatrixMut::new(dx, n, d), dlogits, w, first > entries.start, Threads::One);
                let Some((dw, accumulate)) = dw else { continue };
                let x = Matrix::new(T::operand(&this.x_rows[..n * d]), n, d);
                // SAFETY: each stretch has its own rows of dW.
                let dw = unsafe { MatrixMut::part(dw, first * d, count, d, d) };
                multiply(dw, dlogits.t(), x, accumulate, Threads::One);
            }
        });
    }

    /// Adds up the sums of dX and writes them to their rows.
    fn add_up(&self, rows: &[u32], dx: Shared<T>) {
        let (d, n) = (self.width, rows.len());
        for_each_rows(n, d, |part| {
            let mut sum = vec![0f32; d];
            for i in part {
                sum.copy_from_slice(&self.dx[i * d..][..d]);
                for stretch in 1..self.cut.stretches {
                    vector::add(&mut sum, &self.dx[(stretch * n + i) * d..][..d]);
                }
                // SAFETY: each row of the chunk is another row of dX.
                let dx = unsafe { dx.slice(rows[i] as usize * d, d) };
                for (dx, &sum) in dx.iter_mut().zip(&sum) {
                    *dx = T::from_f32(sum);
                }
            }
        });
    }
}

simd! {
    /// Brings the statistics of each row up to date with a block of its logits.
    fn absorb<S>(s, logits: &[f32], scale: f32, largest: &mut [f32], total: &mut [f32]) {
        let count = logits.len() / largest.len();
        let scales = s.splat(scale);
        for ((logits, largest), total) in logits.chunks_exact(count).zip(largest).zip(total) {
            let (chunks, rest) = logits.as_chunks::<WIDTH>();
            let rest = (!rest.is_empty()).then(|| padded(rest, f32::NEG_INFINITY * scale));
            let mut top = s.splat(f32::NEG_INFINITY);
            for logits in chunks.iter().chain(&rest) {
                top = s.max(s.mul(s.load(logits), scales), top);
            }
            let of_block = s.largest(top);
            let both = if of_block > *largest { of_block } else { *largest };
            let (shift, mut sum) = (s.splat(both), s.splat(0.0));
            for logits in chunks.iter().chain(&rest) {
                sum = s.add(sum, s.exp(s.sub(s.mul(s.load(logits), scales), shift)));
            }
            *total = *total * exp(*largest - both) + s.sum(sum);
            *largest = both;
        }
    }

    /// Writes `factor * exp(scale * logit - largest)` into rows that are `stride` apart.
    fn softmax<S, T: Lanes>(
        s,
        logits: &[f32],
        scale: f32,
        largest: &[f32],
        factors: &[f32],
        to: &mut [T],
        stride: usize,
    ) {
        let count = logits.len() / largest.len();
        let scales = s.splat(scale);
        for (i, logits) in logits.chunks_exact(count).enumerate() {
            let (largest, factor) = (s.splat(largest[i]), s.splat(factors[i]));
            let (chunks, rest) = logits.as_chunks::<WIDTH>();
            let (to, to_rest) = to[i * stride..][..count].as_chunks_mut::<WIDTH>();
            for (logits, to) in chunks.iter().zip(to) {
                let e = s.exp(s.sub(s.mul(s.load(logits), scales), largest));
                T::store(s, s.mul(e, factor), to);
            }
            if !rest.is_empty() {
                let mut last = [T::from_f32(0.0); WIDTH];
                let e = s.exp(s.sub(s.mul(s.load(&padded(rest, 0.0)), scales), largest));
                T::store(s, s.mul(e, factor), &mut last);
                to_rest.copy_from_slice(&last[..rest.len()]);
            }
        }
    }
}
