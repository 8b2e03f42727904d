//! The operations that layers use, as a trait with two implementors.
//!
//! [`Tensor`] computes: each operation is the function of that name in [`t5_ops`]. [`Counted`] only counts: it has a shape, a
//! dtype and a place in a [`Ledger`]. The ledger adds up the bytes that are alive, their peak, the bytes that go to files and
//! the arithmetic. Layers, the step and generation are written once, over this trait. So the bill of a pass comes from
//! the code of that pass.
//!
//! Invariant: an operation that reuses the memory of an argument takes it by value, and both implementors reuse it.

mod compute;
mod counted;
mod files;
mod offload_store;

use std::fmt::Debug;
use std::ops::Range;

use candle_core::{DType, Tensor};
pub(crate) use counted::{Counted, Ledger, Work};
pub use files::Files;
pub(crate) use t5_ops::Kept;
pub(crate) use t5_ops::Position;
use t5_ops::{
    Activation, CrossEntropy, Distillation, Dropout, LossSums, Mask, Quantisation, RelativePosition, Rope, TokenLoss,
    TopLogits,
};

use crate::error::Result;
use crate::label_loss::LabelLoss;
use crate::pooling::Pooling;

/// The weight of a product, (out, in).
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    /// The weight's values, or its codes and scales.
    pub tensor: &'a T,
    /// How codes and scales are read.
    pub quantisation: Option<Quantisation>,
    /// Whether operations copy a few of its rows at a time from its file to memory ([`t5_ops::Weight::ByRows`]).
    pub is_paged_by_rows: bool,
}

impl<'a, T> From<&'a T> for Matrix<'a, T> {
    fn from(tensor: &'a T) -> Self {
        Matrix { tensor, quantisation: None, is_paged_by_rows: false }
    }
}

/// How attention is applied; [`t5_ops::Attention`] over any implementor.
///
/// [`AttentionSettings::new`] is T5's attention to an encoder; other fields are set from there.
pub struct AttentionSettings<'a, T> {
    pub heads: usize,
    /// Heads of keys and values: they divide `heads`.
    pub key_heads: usize,
    /// Position bias by offset, (H, T+S-1).
    pub bias: Option<&'a T>,
    /// Valid keys of each sample. Not read where operations are counted.
    pub key_lengths: &'a [usize],
    /// The keys that a query sees around its own position.
    pub mask: Mask,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Scores are `c tanh(s / c)`.
    pub soft_cap: Option<f64>,
    pub dropout: Option<Dropout<'a>>,
}

impl<'a, T> AttentionSettings<'a, T> {
    /// Each query sees all valid keys; no bias, scale, cap or dropout.
    pub fn new(heads: usize, key_lengths: &'a [usize]) -> Self {
        let (mask, scale) = (Mask::ALL, 1.0);
        Self { heads, key_heads: heads, bias: None, key_lengths, mask, scale, soft_cap: None, dropout: None }
    }

    /// The same for kernels, with another type of bias.
    fn with_bias<'b>(&'b self, bias: Option<&'b Tensor>) -> t5_ops::Attention<'b> {
        let &AttentionSettings { heads, key_heads, bias: _, key_lengths, mask, scale, soft_cap, dropout } = self;
        t5_ops::Attention { heads, key_heads, bias, key_lengths, mask, scale, soft_cap, dropout }
    }
}

/// The weight of a norm, and the number that is added to it.
#[derive(Clone, Copy, Debug)]
pub struct NormWeight<'a, T> {
    pub tensor: &'a T,
    /// Rows are multiplied by `weight + offset`: 0 in T5, 1 in Gemma.
    pub offset: f64,
}

impl<'a, T> From<&'a T> for NormWeight<'a, T> {
    fn from(tensor: &'a T) -> Self {
        Self { tensor, offset: 0.0 }
    }
}

/// The arguments and results of attention that its backward needs.
pub struct Attended<'a, T> {
    pub q: &'a T,
    pub k: &'a T,
    pub v: &'a T,
    pub out: &'a T,
    pub lse: &'a T,
}

/// A store for offloaded tensors: files, or the host's memory beside a device.
pub trait OffloadStore<T: Ops>: Debug {
    /// Writes a tensor behind those already there.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    fn put(&mut self, x: T) -> Result<T::Extent>;

    /// Reads a tensor. Begins to read `after`, which will be asked for next.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    fn get(&mut self, extent: T::Extent, after: Option<&T::Extent>) -> Result<T>;

    /// Where copies overlap with computation, prefetches a tensor that will be asked for next. It has memory from here on.
    ///
    /// # Errors
    /// The device reports an error.
    fn prefetch(&mut self, extent: &T::Extent) -> Result<()>;

    /// Carries out copies while something is computed: of tensors that were put, which keep their memory until then, and of
    /// tensors that are being prefetched.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    fn copy(&mut self) -> Result<()>;
}

/// A tensor, real or counted, and the operations that layers use. Shapes are those of the functions of [`t5_ops`].
pub trait Ops: Clone + Debug + Sized {
    /// Holds the tensors that do not stay in memory.
    type OffloadStore: OffloadStore<Self>;
    /// A tensor's place there.
    type Extent: Clone + Debug + PartialEq;

    fn dims(&self) -> &[usize];
    fn dtype(&self) -> DType;

    /// Bytes of the elements.
    fn bytes(&self) -> u64 {
        self.dims().iter().map(|&size| size as u64).product::<u64>() * self.dtype().size_in_bytes() as u64
    }

    /// Zeros on the device of `self`.
    fn zeros(&self, dims: &[usize], dtype: DType) -> Result<Self>;
    /// Sets every element to zero.
    fn clear(&self) -> Result<()>;
    /// Adds the elements of `other`, in place.
    fn add_in_place(&self, other: &Self) -> Result<()>;
    /// The same elements in memory of their own.
    fn copied(&self) -> Result<Self>;
    /// (.., D) as (R, D), in the same memory.
    fn as_rows(&self) -> Result<Self>;
    /// The same elements in another shape, in the same memory.
    fn shaped(&self, dims: &[usize]) -> Result<Self>;
    /// `self * scale`, in the same memory where the scale is 1.
    fn scaled(&self, scale: f64) -> Result<Self>;
    /// New files for tensors like this one. Their copies may overlap with computation.
    fn offload_store(&self, files: &Files, copies_overlap: bool) -> Result<Self::OffloadStore>;

    /// Begins to read a weight that lies in a file, without waiting for it.
    fn read_ahead(&self);
    /// Makes a weight that lies in a file resident.
    fn page_in(&self);
    /// Lets the system drop a weight that lies in a file from memory.
    fn page_out(&self);
    /// Gives free memory back to the system.
    fn release_unused(&self);

    fn embedding<'a>(ids: &Self, table: impl Into<Matrix<'a, Self>>, dtype: DType) -> Result<Self>
    where
        Self: 'a;
    fn embedding_backward(ids: &Self, dy: &Self, dtable: &Self) -> Result<()>;
    fn linear<'a>(x: &Self, weight: impl Into<Matrix<'a, Self>>) -> Result<Self>
    where
        Self: 'a,
    {
        Self::linear_plus_product(x, weight, None)
    }
    /// As `linear`, plus a product of other rows with another weight.
    fn linear_plus_product<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
    ) -> Result<Self>
    where
        Self: 'a;
    /// `scale · x Wᵀ`.
    fn linear_scaled(x: &Self, weight: &Self, scale: f64) -> Result<Self>;
    fn linear_backward_input<'a>(dy: &Self, weight: impl Into<Matrix<'a, Self>>, sum: Option<Self>) -> Result<Self>
    where
        Self: 'a,
    {
        Self::linear_backward_input_plus_product(dy, weight, None, sum)
    }
    /// As `linear_backward_input`, plus a product of other rows with another weight.
    fn linear_backward_input_plus_product<'a>(
        dy: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
        sum: Option<Self>,
    ) -> Result<Self>
    where
        Self: 'a;
    /// `scale · dy W`.
    fn linear_backward_input_scaled(dy: &Self, weight: &Self, scale: f64) -> Result<Self>;
    fn linear_backward_weight(dy: &Self, x: &Self, dweight: &Self, accumulate: bool) -> Result<()>;
    /// Norms of heads are norms of rows (R, K): `x` in another shape.
    fn rms_norm<'a>(x: &Self, weight: impl Into<NormWeight<'a, Self>>, epsilon: f64) -> Result<(Self, Self)>
    where
        Self: 'a;
    fn rms_norm_backward<'a>(
        x: &Self,
        weight: impl Into<NormWeight<'a, Self>>,
        inv_rms: &Self,
        dy: Self,
        residual: Option<&Self>,
        dweight: Option<&Self>,
    ) -> Result<Self>
    where
        Self: 'a;
    /// Rotates the heads of `self` (B, T, H*K) by their positions, in its memory; see [`t5_ops::rope`].
    fn rope(self, heads: usize, rope: &Rope) -> Result<Self>;
    /// The gradient of the argument of [`Ops::rope`], in the memory of the gradient of its result.
    fn rope_backward(self, heads: usize, rope: &Rope) -> Result<Self>;
    /// `c tanh(self / c)`, in the memory of `self`: logits of generation.
    fn soft_cap(self, cap: f64) -> Result<Self>;
    fn attention(q: &Self, k: &Self, v: &Self, settings: &AttentionSettings<Self>) -> Result<(Self, Self)>;
    /// One softmax over two sets of keys, from attention to each: results and log-sum-exps, the first in its memory. The backward of each
    /// set is [`Ops::attention_backward`] with the merged result and log-sum-exp; see [`t5_ops::merge_attention`].
    fn merge_attention(first: (Self, Self), second: (&Self, &Self), heads: usize) -> Result<(Self, Self)>;
    fn attention_backward(
        of: &Attended<Self>,
        dout: &Self,
        settings: &AttentionSettings<Self>,
        dbias: Option<&Self>,
    ) -> Result<(Self, Self, Self)>;
    fn activation(gate: &Self, up: Option<&Self>, function: Activation, dropout: Option<&Dropout>) -> Result<Self>;
    fn activation_backward(
        gate: Self,
        up: Option<Self>,
        function: Activation,
        dropout: Option<&Dropout>,
        dh: Self,
    ) -> Result<(Self, Self, Option<Self>)>;
    fn dropout(x: &Self, dropout: Option<&Dropout>) -> Result<Self>;
    fn dropout_add(residual: &Self, x: &Self, dropout: Option<&Dropout>) -> Result<Self>;
    fn relative_bias(
        table: &Self,
        position: &RelativePosition,
        queries: usize,
        keys: usize,
        first_query: usize,
    ) -> Result<Self>;
    fn relative_bias_backward(
        dbias: &Self,
        position: &RelativePosition,
        queries: usize,
        keys: usize,
        dtable: &Self,
    ) -> Result<()>;
    fn linear_cross_entropy<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        settings: &CrossEntropy,
    ) -> Result<f64>
    where
        Self: 'a;
    fn linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        settings: &CrossEntropy,
        dweight: Option<(&Self, bool)>,
    ) -> Result<(LossSums, Self)>
    where
        Self: 'a;
    /// [`Ops::linear_cross_entropy`] of each group of rows, of these sizes.
    fn linear_cross_entropies<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        sizes: &[usize],
        settings: &CrossEntropy,
    ) -> Result<Vec<f64>>
    where
        Self: 'a;
    /// [`Ops::linear_cross_entropy_backward`] without a gradient of the weight, each group of rows with a factor. Groups are equally large.
    fn weighted_linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        factors: &[f64],
        settings: &CrossEntropy,
    ) -> Result<(LossSums, Self)>
    where
        Self: 'a;

    /// The cross-entropy of logits (.., V), all of which exist at once, after a soft cap.
    fn logit_cross_entropy(logits: &Self, labels: &[u32], soft_cap: Option<f64>) -> Result<f64>;
    /// The losses. The gradient of the objective, times the scale, takes the memory of the logits.
    fn logit_cross_entropy_backward(
        logits: Self,
        labels: &[u32],
        gradient_scale: f64,
        loss: TokenLoss,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)>;
    /// The losses beside a teacher's logits (.., V); see [`t5_ops::distillation_backward`]. The gradient takes the memory of the logits.
    fn distillation_backward(
        logits: Self,
        teacher: &Self,
        labels: &[u32],
        gradient_scale: f64,
        of: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)>;
    /// As [`Ops::distillation_backward`], beside some rows of a teacher's largest logits.
    fn top_distillation_backward(
        logits: Self,
        teacher: (&TopLogits, Range<usize>),
        labels: &[u32],
        gradient_scale: f64,
        of: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)>;
    /// The lengths of the rows of `W + scale · B A`, (out).
    fn adapted_row_norms(weight: Matrix<Self>, a: &Self, b: &Self, scale: f64) -> Result<Self>;
    /// `a / b` of two vectors.
    fn ratio(a: &Self, b: &Self) -> Result<Self>;
    /// `self - other`, in new memory.
    fn minus(&self, other: &Self) -> Result<Self>;
    /// Multiplies the columns of `self` (.., D) by `factors` (D), in its memory.
    fn scale_columns(self, factors: &Self) -> Result<Self>;
    /// Adds to `dmagnitude` (D) the sums over rows of `dy z`, (.., D), over `lengths` (D).
    fn magnitude_backward(dy: &Self, z: &Self, lengths: &Self, dmagnitude: &Self) -> Result<()>;

    /// `self` (.., N) plus a vector (N), in new memory.
    fn plus_row(&self, row: &Self) -> Result<Self>;
    /// Adds the sums over rows of `self` (.., N) to `sums` (N).
    fn add_rows_to(&self, sums: &Self) -> Result<()>;
    /// The hyperbolic tangent of each element.
    fn tanh(&self) -> Result<Self>;
    /// The gradient of the argument of [`Ops::tanh`], whose result is `self`.
    fn tanh_backward(&self, dy: &Self) -> Result<Self>;
    /// The losses of a classifier's outputs (.., N), and the gradient of the objective times `scale`.
    fn label_loss_backward(&self, labels: &[u32], loss: LabelLoss, scale: f64) -> Result<(LossSums, Self)>;

    /// The gradient of an encoder's output `self` (B, S, D) from those of its vectors (B, D), of the first `lengths[b]` rows of each sample.
    fn pool_backward(&self, pooling: Pooling, lengths: &[usize], dvectors: &[f64]) -> Result<Self>;

    /// Writes `rows` (B, n, D) over the positions of `self` (B, T, D) from `position` on.
    fn set_positions(&self, rows: &Self, position: usize) -> Result<()>;
    /// Writes keys and values (B, 1, D) over a position of two caches (B, T, D).
    fn append(caches: [&Self; 2], new: [&Self; 2], position: Position<Self>) -> Result<()>;
    /// Attention of one query of each row (B, 1, D) over the two caches, up to a position, and its log-sum-exp; see
    /// [`t5_ops::attention_at`].
    fn attention_at(
        q: &Self,
        caches: [&Self; 2],
        settings: &AttentionSettings<Self>,
        position: Position<Self>,
    ) -> Result<(Self, Self)>;
    /// Samples `from` to `from + count` of `self` (B, ..), in the same memory.
    fn part(&self, from: usize, count: usize) -> Result<Self>;
    /// The samples of all parts, one part after the other.
    fn joined(parts: Vec<Self>) -> Result<Self>;
    /// (B, H, T) as (B, T, H), in new memory.
    fn transposed(&self) -> Result<Self>;
    /// Samples `rows` of `self` (B, ..).
    fn select(&self, rows: &[u32]) -> Result<Self>;
    /// Copies the first `positions` of samples of `self` (B, T, D) over those of others: of each pair the first to the second.
    fn copy_rows(&self, pairs: &[(usize, usize)], positions: usize) -> Result<()>;
    /// The values of (R, V) as f32, row after row; normalised: their log-softmax.
    fn scores(&self, normalised: bool) -> Result<Vec<f32>>;
    /// The likeliest tokens of each row of (R, V) with their log-probabilities; see [`t5_ops::candidates`].
    fn candidates(&self, offsets: &[f32], count: usize) -> Result<Option<(Vec<u32>, Vec<f32>)>>;
    /// The index of the largest value of each row of (R, V); the first of equal values.
    fn largest(&self) -> Result<Vec<u32>>;
}
