//! The implementor that only counts. A [`Counted`] tensor has a shape and no elements.
//!
//! Each operation makes the results that the kernel makes, reuses the memory that the kernel reuses, and asks [`t5_ops`] how much
//! a kernel holds beside them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use candle_core::DType;
use t5_ops::{Activation, CrossEntropy, Dropout, RelativePosition};

use super::{Attended, AttentionSettings, Files, Ops, Spill};
use crate::error::Result;

/// Multiply-adds of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Of all products.
    pub all: f64,
    /// Of these, in attention: scores and weighted values.
    pub attention: f64,
}

impl std::ops::Sub for Work {
    type Output = Work;

    fn sub(self, other: Work) -> Work {
        Work { all: self.all - other.all, attention: self.attention - other.attention }
    }
}

/// Bytes that threads keep from one product to the next: of each kind, the most that any product needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    weights: u64,
    loss: u64,
    left: u64,
    right: u64,
    sums: u64,
}

impl Kept {
    /// All of it.
    pub fn total(self) -> u64 {
        self.weights + self.loss + self.along_tokens()
    }

    /// What depends on the tokens of a pass: the operands of the gradients of weights.
    pub fn along_tokens(self) -> u64 {
        self.left + self.right + self.sums
    }

    /// The larger of each kind.
    pub fn max(self, other: Kept) -> Kept {
        Kept {
            weights: self.weights.max(other.weights),
            loss: self.loss.max(other.loss),
            left: self.left.max(other.left),
            right: self.right.max(other.right),
            sums: self.sums.max(other.sums),
        }
    }
}

/// What is added up.
#[derive(Debug, Default)]
struct Sums {
    live: Cell<u64>,
    peak: Cell<u64>,
    /// Of weights in a file, those that are resident. They are a part of `live`.
    resident: Cell<u64>,
    /// The most that a loss held beside its operands and results. It is a part of `peak`.
    loss: Cell<u64>,
    work: Cell<Work>,
    kept: Cell<Kept>,
}

impl Sums {
    fn add(&self, bytes: u64) {
        self.live.set(self.live.get() + bytes);
        self.peak.set(self.peak.get().max(self.live.get()));
    }

    fn take(&self, bytes: u64) {
        self.live.set(self.live.get() - bytes);
    }
}

/// Where counted tensors are added up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    sums: Rc<Sums>,
}

impl Ledger {
    /// A tensor that counts.
    pub fn tensor(&self, dims: &[usize], dtype: DType) -> Counted {
        let bytes = (dims.iter().product::<usize>() * dtype.size_in_bytes()) as u64;
        self.sums.add(bytes);
        self.of(bytes, None, dims, dtype)
    }

    /// A tensor whose memory is counted elsewhere: a parameter, token ids.
    pub fn beside(&self, dims: &[usize], dtype: DType) -> Counted {
        self.of(0, None, dims, dtype)
    }

    /// A weight that lies in a file, and in memory from its first use until it is paged out.
    #[cfg(test)]
    pub fn in_file(&self, dims: &[usize], dtype: DType) -> Counted {
        self.of(0, Some(Cell::new(false)), dims, dtype)
    }

    fn of(&self, bytes: u64, is_resident: Option<Cell<bool>>, dims: &[usize], dtype: DType) -> Counted {
        let mut all = [1; 3];
        all[..dims.len()].copy_from_slice(dims);
        let memory = Rc::new(Memory { sums: Rc::clone(&self.sums), bytes, is_resident });
        Counted { memory, dims: all, rank: dims.len(), dtype }
    }

    /// Bytes that are alive.
    pub fn live(&self) -> u64 {
        self.sums.live.get()
    }

    /// The most that were alive at a time since the last [`Ledger::begin`].
    pub fn peak(&self) -> u64 {
        self.sums.peak.get()
    }

    /// What a loss held at its peak beside its operands and results.
    pub fn loss(&self) -> u64 {
        self.sums.loss.get()
    }

    /// The arithmetic so far.
    pub fn work(&self) -> Work {
        self.sums.work.get()
    }

    /// What threads keep from one product to the next.
    pub fn kept(&self) -> Kept {
        self.sums.kept.get()
    }

    /// Begins a new count. Tensors that are alive stay so.
    pub fn begin(&self) {
        let Sums { live, peak, loss, work, kept, .. } = &*self.sums;
        peak.set(live.get());
        loss.set(0);
        work.set(Work::default());
        kept.set(Kept::default());
    }
}

/// The memory of counted tensors that share it.
#[derive(Debug)]
struct Memory {
    sums: Rc<Sums>,
    /// While it exists.
    bytes: u64,
    /// Of a weight in a file.
    is_resident: Option<Cell<bool>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.sums.take(self.bytes);
    }
}

/// A tensor of at most three dimensions without elements.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    memory: Rc<Memory>,
    dims: [usize; 3],
    rank: usize,
    dtype: DType,
}

impl Counted {
    fn sums(&self) -> &Sums {
        &self.memory.sums
    }

    fn ledger(&self) -> Ledger {
        Ledger { sums: Rc::clone(&self.memory.sums) }
    }

    fn like(&self) -> Counted {
        self.ledger().tensor(Ops::dims(self), self.dtype)
    }

    fn with_width(&self, width: usize) -> Counted {
        let mut dims = self.dims;
        dims[self.rank - 1] = width;
        self.ledger().tensor(&dims[..self.rank], self.dtype)
    }

    fn width(&self) -> usize {
        self.dims[self.rank - 1]
    }

    fn rows(&self) -> usize {
        self.dims[..self.rank - 1].iter().product()
    }

    /// A weight in a file comes into memory when it is used.
    fn used(&self) {
        if self.memory.is_resident.as_ref().is_some_and(|is_resident| !is_resident.replace(true)) {
            self.sums().add(Ops::bytes(self));
            self.sums().resident.set(self.sums().resident.get() + Ops::bytes(self));
        }
    }

    /// Whether it lies in a file.
    #[cfg(test)]
    pub fn is_in_file(&self) -> bool {
        self.memory.is_resident.is_some()
    }

    /// Statistics are F32, or F64 of F64.
    fn statistics(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }

    fn works(&self, multiply_adds: f64, in_attention: f64) {
        let Work { all, attention } = self.sums().work.get();
        self.sums().work.set(Work { all: all + multiply_adds, attention: attention + in_attention });
    }

    fn keeps(&self, kept: Kept) {
        self.sums().kept.set(self.sums().kept.get().max(kept));
    }

    /// A product with a weight, (R, K) times (K, N).
    fn product(&self, k: usize, n: usize) {
        self.works(product(self.rows(), k, n), 0.0);
        self.keeps(Kept { weights: t5_ops::product_bytes(k, n, self.dtype) as u64, ..Kept::default() });
    }

    /// Scores, or sums of values, of all heads.
    fn attention_product(&self, keys: &Counted) -> f64 {
        product(self.dims[0] * self.dims[1], keys.dims[1], self.width())
    }

    fn loss(&self, weight: &Counted, settings: &CrossEntropy, gradients: bool) {
        weight.used();
        let (rows, vocabulary, chunk) = (self.rows(), weight.dims[0], settings.chunk_rows);
        let shape = (vocabulary, self.width());
        let held = t5_ops::linear_cross_entropy_bytes(rows, shape, self.dtype, chunk, gradients) as u64;
        self.sums().loss.set(self.sums().loss.get().max(held));
        self.sums().add(held);
        self.sums().take(held);
        let products = if gradients { 3.0 } else { 1.0 };
        self.works(products * product(rows, self.width(), vocabulary), 0.0);
        let kept = t5_ops::linear_cross_entropy_kept_bytes(rows, vocabulary, self.dtype, chunk, gradients);
        let (weights, left) = match gradients {
            true => (0, packed(chunk.min(rows) * vocabulary, self.dtype)),
            false => (t5_ops::product_bytes(self.width(), vocabulary, self.dtype) as u64, 0),
        };
        self.keeps(Kept { weights, loss: kept as u64, left, ..Kept::default() });
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes of matrices")]
fn product(m: usize, k: usize, n: usize) -> f64 {
    m as f64 * k as f64 * n as f64
}

/// An operand of so many elements, as it is packed along tokens.
fn packed(elements: usize, dtype: DType) -> u64 {
    (elements * dtype.size_in_bytes()).min(t5_ops::PACKED_BYTES) as u64
}

/// Counted files: what was written, and the tensor that is read ahead.
#[derive(Debug)]
pub(crate) struct CountedFiles {
    ledger: Ledger,
    written: u64,
    ahead: RefCell<Option<(CountedStretch, Counted)>>,
}

/// Where a counted tensor lies in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CountedStretch {
    start: u64,
    dims: Vec<usize>,
    dtype: DType,
}

impl Spill<Counted> for CountedFiles {
    fn put(&mut self, x: Counted) -> Result<CountedStretch> {
        let stretch = CountedStretch { start: self.written, dims: Ops::dims(&x).to_vec(), dtype: x.dtype };
        self.written += Ops::bytes(&x);
        Ok(stretch)
    }

    fn get(&mut self, stretch: CountedStretch, after: Option<&CountedStretch>) -> Result<Counted> {
        let read = |stretch: &CountedStretch| self.ledger.tensor(&stretch.dims, stretch.dtype);
        let tensor = match self.ahead.take() {
            Some((ahead, tensor)) if ahead == stretch => tensor,
            _ => read(&stretch),
        };
        *self.ahead.borrow_mut() = after.map(|after| (after.clone(), read(after)));
        Ok(tensor)
    }

    #[cfg(test)]
    fn written_bytes(&self) -> u64 {
        self.written
    }
}

impl Ops for Counted {
    type Spill = CountedFiles;
    type Stretch = CountedStretch;

    fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn zeros(&self, dims: &[usize], dtype: DType) -> Result<Self> {
        Ok(self.ledger().tensor(dims, dtype))
    }

    fn clear(&self) -> Result<()> {
        Ok(())
    }

    fn copied(&self) -> Result<Self> {
        Ok(self.like())
    }

    fn as_rows(&self) -> Result<Self> {
        self.shaped(&[self.rows(), self.width()])
    }

    fn shaped(&self, dims: &[usize]) -> Result<Self> {
        let mut all = [1; 3];
        all[..dims.len()].copy_from_slice(dims);
        Ok(Counted { memory: Rc::clone(&self.memory), dims: all, rank: dims.len(), dtype: self.dtype })
    }

    fn scaled(&self, scale: f64) -> Result<Self> {
        if scale == 1.0 { Ok(self.clone()) } else { Ok(self.like()) }
    }

    fn spill(&self, _: &Files) -> Result<CountedFiles> {
        Ok(CountedFiles { ledger: self.ledger(), written: 0, ahead: RefCell::new(None) })
    }

    fn read_ahead(&self) {}

    fn page_in(&self) {
        self.used();
    }

    fn page_out(&self) {
        if self.memory.is_resident.as_ref().is_some_and(|is_resident| is_resident.replace(false)) {
            self.sums().take(Ops::bytes(self));
            self.sums().resident.set(self.sums().resident.get() - Ops::bytes(self));
        }
    }

    fn release_unused(&self) {}

    fn embedding(ids: &Self, table: &Self, dtype: DType) -> Result<Self> {
        table.used();
        Ok(table.ledger().tensor(&[ids.dims[0], ids.dims[1], table.dims[1]], dtype))
    }

    fn embedding_backward(_: &Self, _: &Self, _: &Self) -> Result<()> {
        Ok(())
    }

    fn linear(x: &Self, weight: &Self) -> Result<Self> {
        weight.used();
        x.product(weight.dims[1], weight.dims[0]);
        Ok(x.with_width(weight.dims[0]))
    }

    fn linear_backward_input(dy: &Self, weight: &Self, sum: Option<Self>) -> Result<Self> {
        weight.used();
        dy.product(weight.dims[0], weight.dims[1]);
        Ok(sum.unwrap_or_else(|| dy.with_width(weight.dims[1])))
    }

    fn linear_backward_weight(dy: &Self, x: &Self, dweight: &Self, _: bool) -> Result<()> {
        let (rows, n, k) = (dy.rows(), dy.width(), x.width());
        dy.works(product(rows, n, k), 0.0);
        // A bf16 gradient is summed in f32 where its product is cut along the tokens.
        let is_summed_apart = dweight.dtype == DType::BF16 && rows > t5_ops::longest_sum(dy.dtype);
        let sums = if is_summed_apart { (n * k * 4) as u64 } else { 0 };
        let (left, right) = (packed(rows * n, dy.dtype), packed(rows * k, x.dtype));
        dy.keeps(Kept { left, right, sums, ..Kept::default() });
        Ok(())
    }

    fn rms_norm(x: &Self, weight: &Self, _: f64) -> Result<(Self, Self)> {
        weight.used();
        Ok((x.like(), x.ledger().tensor(&[x.rows()], x.statistics())))
    }

    fn rms_norm_backward(
        _: &Self,
        weight: &Self,
        _: &Self,
        dy: Self,
        _: Option<&Self>,
        _: Option<&Self>,
    ) -> Result<Self> {
        weight.used();
        Ok(dy)
    }

    fn attention(q: &Self, k: &Self, _: &Self, settings: &AttentionSettings<Self>) -> Result<(Self, Self)> {
        let multiply_adds = 2.0 * q.attention_product(k);
        q.works(multiply_adds, multiply_adds);
        Ok((q.like(), q.ledger().tensor(&[q.dims[0], settings.heads, q.dims[1]], q.statistics())))
    }

    fn attention_backward(
        of: &Attended<Self>,
        _: &Self,
        _: &AttentionSettings<Self>,
        _: Option<&Self>,
    ) -> Result<(Self, Self, Self)> {
        // Two products for each of forward's; the scores that are computed again are hidden behind them.
        let multiply_adds = 4.0 * of.q.attention_product(of.k);
        of.q.works(multiply_adds, multiply_adds);
        Ok((of.q.like(), of.k.like(), of.v.like()))
    }

    fn activation(gate: &Self, _: Option<&Self>, _: Activation, _: Option<&Dropout>) -> Result<Self> {
        Ok(gate.like())
    }

    fn activation_backward(
        gate: Self,
        up: Option<Self>,
        _: Activation,
        _: Option<&Dropout>,
        dh: Self,
    ) -> Result<(Self, Self, Option<Self>)> {
        Ok((gate, dh, up))
    }

    fn dropout(x: &Self, dropout: Option<&Dropout>) -> Result<Self> {
        Ok(if dropout.is_some() { x.like() } else { x.clone() })
    }

    fn dropout_add(residual: &Self, _: &Self, _: Option<&Dropout>) -> Result<Self> {
        Ok(residual.like())
    }

    fn relative_bias(table: &Self, _: &RelativePosition, queries: usize, keys: usize, _: usize) -> Result<Self> {
        table.used();
        Ok(table.ledger().tensor(&[table.dims[1], queries + keys - 1], table.statistics()))
    }

    fn relative_bias_backward(_: &Self, _: &RelativePosition, _: usize, _: usize, _: &Self) -> Result<()> {
        Ok(())
    }

    fn linear_cross_entropy(x: &Self, weight: &Self, _: &[u32], settings: &CrossEntropy) -> Result<f64> {
        x.loss(weight, settings, false);
        Ok(0.0)
    }

    fn linear_cross_entropy_backward(
        x: &Self,
        weight: &Self,
        _: &[u32],
        settings: &CrossEntropy,
        _: Option<(&Self, bool)>,
    ) -> Result<(f64, Self)> {
        let dx = x.like();
        x.loss(weight, settings, true);
        Ok((0.0, dx))
    }

    fn set_positions(&self, _: &Self, _: usize) -> Result<()> {
        Ok(())
    }

    fn select(&self, rows: &[u32]) -> Result<Self> {
        let mut dims = self.dims;
        dims[0] = rows.len();
        Ok(self.ledger().tensor(&dims[..self.rank], self.dtype))
    }

    /// The logits as f32, a row at a time, and the list of rows.
    fn largest(&self) -> Result<Vec<u32>> {
        let beside = (self.rows() * self.width() * 8) as u64;
        self.sums().add(beside);
        self.sums().take(beside);
        Ok(vec![0; self.rows()])
    }
}
