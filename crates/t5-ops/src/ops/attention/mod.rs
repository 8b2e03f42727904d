//! Multi-head attention with a relative-position bias, padding, causal masks and windows, and dropout.
//!
//! `out = dropout(softmax(cap(scale q kᵀ) + bias)) v` for each head. T5 has a scale of 1: its initialisation absorbs 1/sqrt(K).
//! T5Gemma has a scale, T5Gemma 1 also a soft cap, `cap(s) = c tanh(s / c)`. G = H / KH heads of queries may share a head of keys
//! and values. The probabilities are never stored: the forward keeps the log-sum-exp of each row of scores,
//! and the backward computes the probabilities again from it (Dao et al. 2022, section 3.1).
//!
//! One softmax over two sets of keys, as in T5Gemma 2's decoder (its own keys and the encoder's), needs no tensor that has both: see
//! [`merge_attention`].
//!
//! Shapes: q, out (B, T, H*K); k, v (B, S, KH*K); lse (B, H, T); bias, dbias (H, T+S-1).

mod ahead;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod few;
pub(crate) mod reference;
mod rows;
mod task;
#[cfg(test)]
mod tests;
mod tiles;
mod vectors;

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::elements;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{self, Needs};
use crate::ops::decoding::Position;
use crate::ops::dropout::{Dropout, active};

/// The inputs of attention besides queries, keys and values.
///
/// [`Attention::new`] is T5's attention to an encoder; other fields are set from there.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The number of heads H of queries; it divides the width of `q`.
    pub heads: usize,
    /// The number of heads KH of keys and values; it divides H. Heads `G i` to `G (i + 1)` of queries share head `i`, where G = H / KH.
    pub key_heads: usize,
    /// (H, T+S-1): entry `[h, j - i + T - 1]` is added to the score of query `i` and key `j`.
    /// See [`relative_bias`](crate::relative_bias).
    pub bias: Option<&'a Tensor>,
    /// The number of keys that count in each of the B sequences: keys `j >= length` are masked.
    pub key_lengths: &'a [usize],
    /// The keys that a query sees around its own position, `i + S - T`: the last query is at the last key.
    pub mask: Mask,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Scores are `c tanh(s / c)`, before the bias is added.
    pub soft_cap: Option<f64>,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout<'a>>,
}

impl<'a> Attention<'a> {
    /// Each query sees all valid keys; no bias, scale, cap or dropout.
    pub fn new(heads: usize, key_lengths: &'a [usize]) -> Self {
        let (mask, scale) = (Mask::ALL, 1.0);
        Self { heads, key_heads: heads, bias: None, key_lengths, mask, scale, soft_cap: None, dropout: None }
    }
}

/// The keys around a query's position `p` that the query sees: `p - before <= j <= p + after`. They are one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Keys before the query's position.
    pub before: usize,
    /// Keys behind it.
    pub after: usize,
}

impl Mask {
    /// Every key.
    pub const ALL: Self = Self { before: usize::MAX, after: usize::MAX };
    /// The query's position and all before it.
    pub const CAUSAL: Self = Self { before: usize::MAX, after: 0 };

    /// A decoder's window: the query's position and `size - 1` before it, as `sliding_window` of transformers.
    pub const fn causal_window(size: usize) -> Self {
        Self { before: size.saturating_sub(1), after: 0 }
    }

    /// An encoder's window of this size around the query, as T5Gemma 2 has it.
    pub const fn window_around(size: usize) -> Self {
        Self { before: size.div_ceil(2).saturating_sub(1), after: size / 2 }
    }

    /// All keys up to the query's position, or all keys.
    pub const fn causal_if(causal: bool) -> Self {
        if causal { Self::CAUSAL } else { Self::ALL }
    }

    /// The most keys that a query sees.
    fn width(self) -> usize {
        self.before.saturating_add(self.after).saturating_add(1)
    }
}

/// The largest head for which a card has kernels.
pub const MAX_HEAD_ON_DEVICE: usize = 128;
/// The fewest keys of a block of a card's backward: each block has sums of the bias's gradient.
const KEYS_OF_BLOCK_ON_DEVICE: usize = 32;

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Sequences (B).
    pub batch: usize,
    /// Queries of each (T).
    pub queries: usize,
    /// Keys of each (S).
    pub keys: usize,
    /// Heads of queries (H).
    pub heads: usize,
    /// Heads of keys and values (KH).
    pub key_heads: usize,
    /// Width of a head (K).
    pub head_size: usize,
    /// The most keys that a query sees.
    pub seen: usize,
    /// Whether scores have a soft cap.
    pub is_capped: bool,
    /// Whether this is T5's attention: a head of keys for each head of queries, no window, scale or cap. A card has kernels for it alone.
    pub is_plain: bool,
}

impl Sizes {
    /// Scores of all heads, (B, H, T, S).
    fn scores(&self) -> u64 {
        needs::elements([self.batch, self.heads, self.queries, self.keys])
    }

    /// Whether a card has kernels for this.
    fn has_kernels_on_device(&self) -> bool {
        self.is_plain && self.head_size <= MAX_HEAD_ON_DEVICE
    }

    /// Whether queries see fewer keys than there are.
    fn is_windowed(&self) -> bool {
        self.seen < self.keys
    }

    /// Heads of queries that share a head of keys (G).
    fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// Elements of q, or of k and v where these are more.
    fn elements(&self) -> u64 {
        needs::elements([self.batch, self.queries.max(self.keys), self.heads, self.head_size])
    }

    /// The sizes of one of attention's matrix products over all keys of a window, masked or not.
    fn product(&self) -> (usize, usize, usize) {
        (self.batch * self.queries, self.seen, self.heads * self.head_size)
    }
}

impl Attention<'_> {
    /// The keys that query `i` of sequence `b` sees.
    pub(crate) fn seen(&self, s: &Sizes, b: usize, i: usize) -> Range<usize> {
        let Mask { before, after } = self.mask;
        let end = (i + 1 + s.keys).saturating_add(after).saturating_sub(s.queries).min(self.key_lengths[b]).min(s.keys);
        (i + s.keys).saturating_sub(s.queries.saturating_add(before)).min(end)..end
    }

    /// The keys that some of these queries of sequence `b` see: one range, because those of a query begin and end no earlier than those of
    /// the query before it.
    pub(crate) fn seen_by(&self, s: &Sizes, b: usize, queries: Range<usize>) -> Range<usize> {
        match queries.is_empty() {
            true => 0..0,
            false => self.seen(s, b, queries.start).start..self.seen(s, b, queries.end - 1).end,
        }
    }

    /// Whether the kernels for T5 compute this.
    fn is_plain(&self) -> bool {
        let no_window = [Mask::ALL, Mask::CAUSAL].contains(&self.mask);
        self.key_heads == self.heads && self.scale == 1.0 && self.soft_cap.is_none() && no_window
    }

    /// The floating-point operations of one of attention's matrix products, over the keys that are seen.
    fn product_flops(&self, s: &Sizes) -> usize {
        let seen = |b| (0..s.queries).map(move |i| self.seen(s, b, i).len()).sum::<usize>();
        2 * s.heads * s.head_size * (0..s.batch).map(seen).sum::<usize>()
    }

    /// The sizes of a call with B sequences of T queries of this width and S keys. The widths are not checked.
    pub fn sizes_of(&self, (batch, queries, width): (usize, usize, usize), keys: usize) -> Sizes {
        Sizes {
            batch,
            queries,
            keys,
            heads: self.heads,
            key_heads: self.key_heads,
            head_size: width / self.heads.max(1),
            seen: keys.min(self.mask.width()),
            is_capped: self.soft_cap.is_some(),
            is_plain: self.is_plain(),
        }
    }

    /// The path of these operands and the bias.
    fn path(&self, operands: &[&Tensor]) -> Path {
        let takes = self.bias.is_none_or(|bias| Path::choose(&[bias]) == Path::Cpu);
        Path::choose(operands).provided(takes)
    }

    fn sizes(&self, op: &str, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Sizes> {
        let (batch, queries, width) = q.dims3()?;
        let (_, keys, _) = k.dims3()?;
        elements(q.shape()).and_then(|_| elements(k.shape()))?;
        if self.heads == 0 || width == 0 || width % self.heads != 0 {
            bail!("{op}: expected a number of heads that divides a width of at least 1, got {} and {width}", self.heads)
        }
        if self.key_heads == 0 || !self.heads.is_multiple_of(self.key_heads) {
            let (heads, key_heads) = (self.heads, self.key_heads);
            bail!("{op}: expected a number of heads of keys that divides {heads}, got {key_heads}")
        }
        let key_width = width / self.heads * self.key_heads;
        check_shape(op, "k", k, &[batch, keys, key_width])?;
        check_shape(op, "v", v, &[batch, keys, key_width])?;
        let is_positive = |x: f64| x.is_finite() && x > 0.0;
        if !is_positive(self.scale) || self.soft_cap.is_some_and(|cap| !is_positive(cap)) {
            bail!("{op}: expected a scale and a cap above 0, got {} and {:?}", self.scale, self.soft_cap)
        }
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            bail!("{op}: expected q, k, v of one dtype, got {:?}, {:?}, {:?}", q.dtype(), k.dtype(), v.dtype())
        }
        if queries == 0 || keys == 0 {
            bail!("{op}: expected at least one query and one key, got {queries} and {keys}")
        }
        if queries.checked_add(keys).is_none_or(|offsets| offsets > u32::MAX as usize) {
            bail!("{op}: expected fewer queries and keys, got {queries} and {keys}")
        }
        if self.key_lengths.len() != batch {
            bail!("{op}: key_lengths: expected one for each of {batch} sequences, got {}", self.key_lengths.len())
        }
        if let Some(bias) = self.bias {
            check_shape(op, "bias", bias, &[self.heads, queries + keys - 1])?;
        }
        active(op, self.dropout.as_ref(), batch)?;
        Ok(self.sizes_of((batch, queries, width), keys))
    }
}

/// Attention of all heads. Returns the result (B, T, H*K) in the dtype of `q`, and the log-sum-exp of each
/// row of scores (B, H, T), `F32` or `F64`, for the backward. A query that sees no key gives zeros.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention) -> Result<(Tensor, Tensor)> {
    let s = a.sizes("attention", q, k, v)?;
    let _span = tracing::debug_span!("attention", flops = a.product_flops(&s) * 2).entered();
    match a.path(&[q, k, v]) {
        Path::Cpu => cpu::attention(q, k, v, a, &s),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(&[q, k, v], a, &s) => cuda::attention(q, k, v, a, &s),
        Path::Reference | Path::Device => reference::attention(q, k, v, a),
    }
}

/// [`attention`] of the token at a position, as in generation. Each row has one query (R, 1, H*K), and sees the keys and values of a cache
/// (R, C, KH*K) up to its own position. `a.bias` is for all positions, (H, 2C-1); `a.key_lengths` and `a.mask` are not read. Returns the
/// result and its log-sum-exp, as [`attention`].
///
/// Keys may lie in any order where there is no bias. So a window needs no more than its own size of cache: the token at position `p` is
/// appended at `p % size`, and sees the cache up to position `p.min(size - 1)`.
///
/// # Errors
/// Other shapes; a position outside of the cache.
pub fn attention_at(q: &Tensor, [k, v]: [&Tensor; 2], a: &Attention, position: Position) -> Result<(Tensor, Tensor)> {
    let (rows, capacity, _) = k.dims3()?;
    check_shape("attention_at", "q", q, &[rows, 1, q.dim(2)?])?;
    if let Some(bias) = a.bias {
        check_shape("attention_at", "bias", bias, &[a.heads, 2 * capacity - 1])?;
    }
    if position.number >= capacity {
        bail!("attention_at: expected a position below {capacity}, got {}", position.number)
    }
    let of_position = |bias: &Tensor| bias.narrow(1, capacity - 1 - position.number, capacity);
    let bias = a.bias.map(of_position).transpose()?;
    let key_lengths = &vec![position.number + 1; rows][..];
    let a = Attention { bias: bias.as_ref(), key_lengths, mask: Mask::ALL, dropout: None, ..*a };
    #[cfg(feature = "cuda")]
    if position.on_card.is_some() {
        let s = a.sizes("attention_at", q, k, v)?;
        if cuda::takes(&[q, k, v], &a, &s) {
            let _span = tracing::debug_span!("attention", flops = a.product_flops(&s) * 2).entered();
            return cuda::attention_of_few(q, k, v, &a, &s, Some(position));
        }
    }
    cuda_device::refuse_recording("attention");
    attention(q, k, v, &a)
}

/// Merges attention of the same queries to two sets of keys: the result of one softmax over all of them. Each part is a result (B, T, H*K)
/// and its log-sum-exp (B, H, T); so is what is returned. The memory of the first part may be overwritten: the caller does not read it again.
///
/// The backward of each set is [`attention_backward`] with its own keys and values, and the merged result and log-sum-exp: with them it
/// computes the set's share of the probabilities. The gradient of the queries is the sum of both. With dropout, the two sets need different
/// sites. Split attention of this kind: Dao et al. 2023 ("Flash-Decoding").
///
/// # Errors
/// Other shapes or dtypes.
pub fn merge_attention(first: (Tensor, Tensor), second: (&Tensor, &Tensor), heads: usize) -> Result<(Tensor, Tensor)> {
    let (batch, queries, width) = first.0.dims3()?;
    if heads == 0 || !width.is_multiple_of(heads) {
        bail!("merge_attention: expected a number of heads that divides {width}, got {heads}")
    }
    check_shape("merge_attention", "result", second.0, first.0.dims())?;
    for lse in [&first.1, second.1] {
        check_shape("merge_attention", "lse", lse, &[batch, heads, queries])?;
    }
    if first.0.dtype() != second.0.dtype() {
        bail!("merge_attention: expected results of one dtype, got {:?} and {:?}", first.0.dtype(), second.0.dtype())
    }
    let _span = tracing::debug_span!("merge_attention").entered();
    let lse = [&first.1, second.1].iter().all(|lse| lse.dtype() == DType::F32 && lse.is_contiguous());
    let takes = lse && first.0.is_contiguous() && second.0.is_contiguous();
    match Path::choose(&[&first.0, second.0, &first.1, second.1]).provided(takes) {
        Path::Cpu => cpu::merge(first, second, heads),
        Path::Reference | Path::Device => reference::merge_attention([(&first.0, &first.1), second], heads),
    }
}

/// Returns the needs of [`merge_attention`] for this many elements of a result, besides both parts. Where the result has memory of its own,
/// this is part of them.
pub fn merge_attention_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference | Path::Device => reference::merge_needs(elements, dtype),
    }
}

/// Returns the needs of [`attention`] for activations in `dtype`, with dropout or without.
pub fn attention_needs(path: Path, s: &Sizes, dtype: DType, drops: bool) -> Needs {
    match path {
        Path::Cpu => cpu::forward_needs(s, dtype),
        Path::Reference => reference::forward_needs(s, dtype, drops),
        Path::Device if s.has_kernels_on_device() => Needs::launches(1).with_products(2, s.product()),
        Path::Device => reference::forward_needs_on_device(s, dtype, drops),
    }
}

/// Inputs and output of [`attention`]; its backward needs both.
#[derive(Clone, Copy)]
pub struct Attended<'a> {
    /// Queries, (B, T, H*K).
    pub q: &'a Tensor,
    /// Keys, (B, S, H*K).
    pub k: &'a Tensor,
    /// Values, (B, S, H*K).
    pub v: &'a Tensor,
    /// The result, (B, T, H*K).
    pub out: &'a Tensor,
    /// The log-sum-exp of each row of scores, (B, H, T).
    pub lse: &'a Tensor,
}

/// Returns the gradients with respect to `q`, `k` and `v`; adds the bias's gradient to `dbias` if given.
///
/// `dout` is the gradient of the result; `a` as in the forward.
pub fn attention_backward(
    of: &Attended,
    dout: &Tensor,
    a: &Attention,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Attended { q, k, v, out, lse } = *of;
    let s = a.sizes("attention_backward", q, k, v)?;
    // Scores again, and the gradients of probabilities, values, queries and keys.
    let _span = tracing::debug_span!("attention_backward", flops = a.product_flops(&s) * 5).entered();
    check_shape("attention_backward", "out", out, q.dims())?;
    check_shape("attention_backward", "dout", dout, q.dims())?;
    check_shape("attention_backward", "lse", lse, &[s.batch, s.heads, s.queries])?;
    if let Some(dbias) = dbias {
        check_accumulator("attention_backward", "dbias", dbias, &[s.heads, s.queries + s.keys - 1])?;
    }
    let same = out.dtype() == q.dtype() && dout.dtype() == q.dtype() && lse.dtype() == DType::F32;
    // The accumulator of the kernel is f32.
    let takes = same && dbias.is_none_or(|dbias| dbias.dtype() == DType::F32);
    match a.path(&[q, k, v, out, lse, dout]).provided(takes) {
        Path::Cpu => cpu::attention_backward(of, dout, a, &s, dbias),
        #[cfg(feature = "cuda")]
        Path::Device if cuda::takes(&[q, k, v, out, dout], a, &s) && cuda::adds_to(lse, dbias) => {
            cuda::attention_backward(of, dout, a, &s, dbias)
        }
        Path::Reference | Path::Device => reference::attention_backward(of, dout, a, dbias),
    }
}

/// Returns the needs of [`attention_backward`], as [`attention_needs`].
pub fn attention_backward_needs(path: Path, s: &Sizes, dtype: DType, drops: bool, trains_bias: bool) -> Needs {
    match path {
        Path::Cpu => cpu::backward_needs(s, dtype),
        Path::Reference => reference::backward_needs(s, dtype, drops),
        Path::Device if s.has_kernels_on_device() => {
            backward_needs_on_device(s).with_launches(3 + u64::from(trains_bias))
        }
        Path::Device => reference::backward_needs_on_device(s, dtype, drops),
    }
}

/// On a card: a sum for each query of each head, and the partial sums of a bias's gradient. Two products more than on the CPU: scores and
/// the gradients of probabilities are computed once by keys and once by queries.
fn backward_needs_on_device(s: &Sizes) -> Needs {
    let heads = needs::elements([s.batch, s.heads]);
    let blocks = s.keys.div_ceil(KEYS_OF_BLOCK_ON_DEVICE) as u64;
    let partial = blocks * (s.queries + KEYS_OF_BLOCK_ON_DEVICE - 1) as u64;
    Needs::bytes(heads * (s.queries as u64 + partial) * size_of::<f32>() as u64).with_products(7, s.product())
}
