//! Multi-head attention with a relative-position bias, padding and causal masks, and dropout.
//!
//! `out = dropout(softmax(q kᵀ + bias)) v` for each head, without a scale of 1/sqrt(K): T5's initialisation
//! absorbs it. The probabilities are never stored: the forward keeps the log-sum-exp of each row of scores,
//! and the backward computes the probabilities again from it (Dao et al. 2022, section 3.1).
//!
//! Shapes: q, out (B, T, H*K); k, v (B, S, H*K); lse (B, H, T); bias, dbias (H, T+S-1).

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

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::elements;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::{self, Needs};
use crate::ops::decoding::Position;
use crate::ops::dropout::{Dropout, active};

/// The inputs of attention besides queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The number of heads H; it divides the width of `q`, `k` and `v`.
    pub heads: usize,
    /// (H, T+S-1): entry `[h, j - i + T - 1]` is added to the score of query `i` and key `j`.
    /// See [`relative_bias`](crate::relative_bias).
    pub bias: Option<&'a Tensor>,
    /// The number of keys that count in each of the B sequences: keys `j >= length` are masked.
    pub key_lengths: &'a [usize],
    /// Query `i` sees the keys `j <= i + S - T`: itself and all before it. The last query is the last key.
    pub causal: bool,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout<'a>>,
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
    /// Heads (H).
    pub heads: usize,
    /// Width of a head (K).
    pub head_size: usize,
}

impl Sizes {
    /// Scores of all heads, (B, H, T, S).
    fn scores(&self) -> u64 {
        needs::elements([self.batch, self.heads, self.queries, self.keys])
    }

    /// Elements of q, or of k and v where these are more.
    fn elements(&self) -> u64 {
        needs::elements([self.batch, self.queries.max(self.keys), self.heads, self.head_size])
    }

    /// The sizes of one of attention's matrix products over all keys, masked or not.
    fn product(&self) -> (usize, usize, usize) {
        (self.batch * self.queries, self.keys, self.heads * self.head_size)
    }
}

impl Attention<'_> {
    /// The number of keys that query `i` of sequence `b` sees; they are a prefix.
    pub(crate) fn visible(&self, s: &Sizes, b: usize, i: usize) -> usize {
        let length = self.key_lengths[b].min(s.keys);
        if self.causal { length.min((i + 1 + s.keys).saturating_sub(s.queries)) } else { length }
    }

    /// The floating-point operations of one of attention's matrix products, over the keys that are seen.
    fn product_flops(&self, s: &Sizes) -> usize {
        let seen = |b| (0..s.queries).map(move |i| self.visible(s, b, i)).sum::<usize>();
        2 * s.heads * s.head_size * (0..s.batch).map(seen).sum::<usize>()
    }

    /// The path of these operands and the bias.
    fn path(&self, operands: &[&Tensor]) -> Path {
        let takes = self.bias.is_none_or(|bias| Path::of(&[bias]) == Path::Cpu);
        Path::of(operands).provided(takes)
    }

    fn sizes(&self, op: &str, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Sizes> {
        let (batch, queries, width) = q.dims3()?;
        let (_, keys, _) = k.dims3()?;
        elements(q.shape()).and_then(|_| elements(k.shape()))?;
        check_shape(op, "k", k, &[batch, keys, width])?;
        check_shape(op, "v", v, &[batch, keys, width])?;
        if self.heads == 0 || width == 0 || width % self.heads != 0 {
            bail!("{op}: expected a number of heads that divides a width of at least 1, got {} and {width}", self.heads)
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
        Ok(Sizes { batch, queries, keys, heads: self.heads, head_size: width / self.heads })
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
/// (R, T, H*K) up to its own position. The bias is for all positions, (H, 2T-1). Returns the result alone.
///
/// # Errors
/// Other shapes; a position outside of the cache.
pub fn attention_at(
    q: &Tensor,
    [k, v]: [&Tensor; 2],
    bias: &Tensor,
    heads: usize,
    position: Position,
) -> Result<Tensor> {
    let (rows, capacity, _) = k.dims3()?;
    check_shape("attention_at", "q", q, &[rows, 1, k.dim(2)?])?;
    check_shape("attention_at", "bias", bias, &[heads, 2 * capacity - 1])?;
    if position.number >= capacity {
        bail!("attention_at: expected a position below {capacity}, got {}", position.number)
    }
    let bias = bias.narrow(1, capacity - 1 - position.number, capacity)?;
    let key_lengths = &vec![position.number + 1; rows][..];
    let a = Attention { heads, bias: Some(&bias), key_lengths, causal: false, dropout: None };
    #[cfg(feature = "cuda")]
    if position.on_card.is_some() {
        let s = a.sizes("attention_at", q, k, v)?;
        if cuda::takes(&[q, k, v], &a, &s) {
            let _span = tracing::debug_span!("attention", flops = a.product_flops(&s) * 2).entered();
            return Ok(cuda::attention_of_few(q, k, v, &a, &s, Some(position))?.0);
        }
    }
    cuda_device::refuse_recording("attention");
    Ok(attention(q, k, v, &a)?.0)
}

/// Returns the needs of [`attention`] for activations in `dtype`, with dropout or without.
pub fn attention_needs(path: Path, s: &Sizes, dtype: DType, drops: bool) -> Needs {
    match path {
        Path::Cpu => cpu::forward_needs(s, dtype),
        Path::Reference => reference::forward_needs(s, dtype, drops),
        Path::Device if s.head_size <= MAX_HEAD_ON_DEVICE => Needs::launches(1).with_products(2, s.product()),
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
        Path::Device if s.head_size <= MAX_HEAD_ON_DEVICE => {
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
