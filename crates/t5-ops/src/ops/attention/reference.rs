//! Attention in plain candle operations: the oracle and the path for other devices and dtypes.
//!
//! Scores and probabilities exist whole here, (B, H, T, S).

use candle_core::{D, DType, Device, Result, Tensor};

use super::{Attended, Attention, Sizes};
use crate::dispatch::{add_into, matmul_dtype, wide_dtype};
use crate::needs::{Needs, copies, mask_on_host};
use crate::ops::dropout::{active, kept};

/// See [`crate::attention`].
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention) -> Result<(Tensor, Tensor)> {
    let s = a.sizes("attention", q, k, v)?;
    let scores = scores(q, k, a, &s)?.0; // (B, H, T, S)
    let seen = seen(q, a, &s)?; // (B, 1, T, 1): 1 where the query sees a key at all
    let max = scores.detach().max_keepdim(D::Minus1)?.clamp(-1e30, f64::INFINITY)?;
    let exp = scores.broadcast_sub(&max)?.exp()?;
    let sum = exp.sum_keepdim(D::Minus1)?;
    // A row without a key has sum 0: its divisor is 1 instead, and its log-sum-exp is -inf.
    let divisor = sum.broadcast_add(&seen.affine(-1.0, 1.0)?)?;
    let lse = (max + sum.log()?)?.squeeze(D::Minus1)?;
    let probabilities = exp.broadcast_div(&divisor)?;
    let probabilities = match mask(q, a, &s)? {
        Some(mask) => (probabilities * mask)?,
        None => probabilities,
    };
    let out = multiply(&probabilities, &split_keys(v, &s)?, q)?; // (B, H, T, K)
    Ok((join(&out, &s)?.to_dtype(q.dtype())?, lse))
}

/// Scores, their exponentials and the probabilities; with dropout also its mask and the masked probabilities. Besides these, q, k and v by
/// heads.
pub(super) fn forward_needs(s: &Sizes, dtype: DType, drops: bool) -> Needs {
    let scores = copies(if drops { 5 } else { 3 }, s.scores(), dtype);
    Needs::bytes(scores + copies(3, s.elements(), dtype)).with_products(2, s.product())
}

/// Probabilities and their gradient, and in two steps the gradient of the scores; with dropout also its mask. Besides these, q, k, v, the
/// result and its gradient by heads.
pub(super) fn backward_needs(s: &Sizes, dtype: DType, drops: bool) -> Needs {
    let scores = copies(if drops { 5 } else { 4 } + of_scores(s), s.scores(), dtype);
    Needs::bytes(scores + copies(5, s.elements(), dtype)).with_products(5, s.product())
}

/// The forward on a device: with dropout, the exponentials, probabilities, mask and masked probabilities exist beside the scores. Without
/// dropout, or when values are weighted, one of them exists in the dtype of the products.
pub(super) fn forward_needs_on_device(s: &Sizes, dtype: DType, drops: bool) -> Needs {
    let narrow = if dtype.size_in_bytes() < 4 { s.scores() * dtype.size_in_bytes() as u64 } else { 0 };
    let weighted = copies(3, s.scores(), dtype) + narrow + copies(3, s.elements(), dtype);
    let masked = if drops { copies(5, s.scores(), dtype) } else { 0 };
    Needs::bytes(weighted.max(masked)).with_products(2, s.product()).with_bytes_on_host(on_host(s, drops))
}

/// The backward on a device, with q, k, v, the result and its gradient by heads, and the gradient of the values.
pub(super) fn backward_needs_on_device(s: &Sizes, dtype: DType, drops: bool) -> Needs {
    let scores = copies(if drops { 5 } else { 4 } + of_scores(s), s.scores(), dtype);
    let by_heads = 5 * s.elements() * dtype.size_in_bytes() as u64 + copies(1, s.elements(), dtype);
    Needs::bytes(scores + by_heads).with_products(5, s.product()).with_bytes_on_host(on_host(s, drops))
}

/// Copies of the scores in the backward of attention that is not T5's: gradients of products beside those of scores, and slopes.
fn of_scores(s: &Sizes) -> u64 {
    if s.is_plain { 0 } else { 2 }
}

/// Bytes of the host: the mask of the probabilities, or the keys that are hidden from each query of a sample.
fn on_host(s: &Sizes, drops: bool) -> u64 {
    mask_on_host(s.scores(), drops).max(s.scores() / s.heads.max(1) as u64 * size_of::<f32>() as u64)
}

/// See [`crate::attention_backward`].
pub fn attention_backward(
    of: &Attended,
    dout: &Tensor,
    a: &Attention,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Attended { q, k, v, out, lse } = *of;
    let s = a.sizes("attention_backward", q, k, v)?;
    let dtype = wide_dtype(q);
    // exp(score - lse). Rows without a key have lse = -inf, which is raised so that they give exp(-inf) = 0.
    let lse = lse.to_dtype(dtype)?.unsqueeze(D::Minus1)?.clamp(-1e30, f64::INFINITY)?;
    let (scores, slope) = scores(q, k, a, &s)?; // (B, H, T, S)
    let probabilities = scores.broadcast_sub(&lse)?.exp()?;
    drop(scores);
    let (q, k, v, dout) = (split(q, &s)?, split_keys(k, &s)?, split_keys(v, &s)?, split(dout, &s)?);
    let out = split(out, &s)?;
    let mask = mask(&q, a, &s)?;
    let masked = |p: &Tensor| match &mask {
        Some(mask) => p * mask,
        None => Ok(p.clone()),
    };
    let dv = multiply(&masked(&probabilities)?.transpose(2, 3)?, &dout, &q)?;
    let dp = masked(&multiply(&dout, &v.transpose(2, 3)?, &q)?)?;
    // Row sums of p * dp, computed without a pass over the scores: dout · out.
    let delta = (dout.to_dtype(dtype)? * out.to_dtype(dtype)?)?.sum_keepdim(D::Minus1)?;
    let ds = (probabilities * dp.broadcast_sub(&delta)?)?;
    let dproducts = match slope {
        Some(slope) => (&ds * slope)?,
        None if a.scale != 1.0 => (&ds * a.scale)?,
        None => ds.clone(),
    };
    let dq = multiply(&dproducts, &k, &q)?;
    let dk = multiply(&dproducts.transpose(2, 3)?, &q, &q)?;
    if let Some(dbias) = dbias {
        let flat = ds.sum(0)?.reshape((s.heads, s.queries * s.keys))?;
        let zeros = Tensor::zeros((s.heads, s.queries + s.keys - 1), dtype, q.device())?;
        add_into(dbias, &zeros.index_add(&diagonals(&s, q.device())?, &flat, 1)?)?;
    }
    let finish = |t: Tensor| join(&t, &s)?.to_dtype(q.dtype());
    Ok((finish(dq)?, finish(add_groups(dk, &s)?)?, finish(add_groups(dv, &s)?)?))
}

/// See [`crate::merge_attention`].
pub fn merge_attention(parts: [(&Tensor, &Tensor); 2], heads: usize) -> Result<(Tensor, Tensor)> {
    let [(out, lse), (other_out, other_lse)] = parts;
    let (batch, queries, width) = out.dims3()?;
    let dtype = wide_dtype(out);
    let [lse, other_lse] = [lse, other_lse].map(|lse| lse.to_dtype(dtype));
    let (lse, other_lse) = (lse?, other_lse?);
    // Where neither has a key both are -inf, and the weights are zero.
    let largest = lse.maximum(&other_lse)?.clamp(-1e30, f64::INFINITY)?;
    let shares = [(lse - &largest)?.exp()?, (other_lse - &largest)?.exp()?]; // (B, H, T)
    let sum = (&shares[0] + &shares[1])?;
    let divisor = (&sum + sum.eq(0.0)?.to_dtype(dtype)?)?;
    let weighted = |x: &Tensor, share: &Tensor| {
        let share = (share / &divisor)?.transpose(1, 2)?.reshape((batch, queries, heads, 1))?;
        x.to_dtype(dtype)?.reshape((batch, queries, heads, width / heads.max(1)))?.broadcast_mul(&share)
    };
    let merged = (weighted(out, &shares[0])? + weighted(other_out, &shares[1])?)?;
    Ok((merged.reshape(out.dims())?.to_dtype(out.dtype())?, (largest + sum.log()?)?))
}

/// Both results in the wide dtype, weighted, and their sum.
pub(super) fn merge_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(5, elements, dtype))
}

/// As [`split`], for keys or values: a copy for each head of queries.
fn split_keys(x: &Tensor, s: &Sizes) -> Result<Tensor> {
    let (group, keys) = (s.group(), x.dim(1)?);
    let x = x.reshape((s.batch, keys, s.key_heads, s.head_size))?.transpose(1, 2)?;
    if group == 1 {
        return x.contiguous();
    }
    let of_each = (s.batch, s.key_heads, group, keys, s.head_size);
    x.unsqueeze(2)?.broadcast_as(of_each)?.contiguous()?.reshape((s.batch, s.heads, keys, s.head_size))
}

/// The sums of the gradients of keys over the heads of queries that share them: (B, H, S, K) to (B, KH, S, K).
fn add_groups(x: Tensor, s: &Sizes) -> Result<Tensor> {
    match s.group() {
        1 => Ok(x),
        group => x.reshape((s.batch, s.key_heads, group, s.keys, s.head_size))?.sum(2),
    }
}

/// (B, T, H*K) to (B, H, T, K).
fn split(x: &Tensor, s: &Sizes) -> Result<Tensor> {
    x.reshape((s.batch, (), s.heads, s.head_size))?.transpose(1, 2)?.contiguous()
}

/// (B, H, T, K) to (B, T, H*K).
fn join(x: &Tensor, s: &Sizes) -> Result<Tensor> {
    let (_, heads, length, size) = x.dims4()?;
    x.transpose(1, 2)?.contiguous()?.reshape((s.batch, length, heads * size))
}

/// Multiplies matrices in a dtype that the device can multiply, and returns the result in the wide dtype.
fn multiply(a: &Tensor, b: &Tensor, like: &Tensor) -> Result<Tensor> {
    let dtype = matmul_dtype(like);
    let product = a.to_dtype(dtype)?.contiguous()?.matmul(&b.to_dtype(dtype)?.contiguous()?)?;
    product.to_dtype(wide_dtype(like))
}

/// Scores with bias, `-inf` where masked: (B, H, T, S). With a soft cap also their derivatives by the products of queries and keys.
fn scores(q: &Tensor, k: &Tensor, a: &Attention, s: &Sizes) -> Result<(Tensor, Option<Tensor>)> {
    let dtype = wide_dtype(q);
    let mut scores = multiply(&split(q, s)?, &split_keys(k, s)?.transpose(2, 3)?, q)?;
    if a.scale != 1.0 {
        scores = (scores * a.scale)?;
    }
    let mut slope = None;
    if let Some(cap) = a.soft_cap {
        let tanh = (scores / cap)?.tanh()?;
        slope = Some(tanh.sqr()?.affine(-a.scale, a.scale)?);
        scores = (tanh * cap)?;
    }
    if let Some(bias) = a.bias {
        let full = bias.to_dtype(dtype)?.contiguous()?.index_select(&diagonals(s, q.device())?, 1)?;
        scores = scores.broadcast_add(&full.reshape((1, s.heads, s.queries, s.keys))?)?;
    }
    let mut hidden = vec![0f32; s.batch * s.queries * s.keys];
    for (row, keys) in hidden.chunks_mut(s.keys).enumerate() {
        let seen = a.seen(s, row / s.queries, row % s.queries);
        keys[..seen.start].fill(f32::NEG_INFINITY);
        keys[seen.end..].fill(f32::NEG_INFINITY);
    }
    let hidden = Tensor::from_vec(hidden, (s.batch, 1, s.queries, s.keys), &Device::Cpu)?;
    Ok((scores.broadcast_add(&hidden.to_dtype(dtype)?.to_device(q.device())?)?, slope))
}

/// 1 for queries that see at least one key, 0 for the others: (B, 1, T, 1).
fn seen(q: &Tensor, a: &Attention, s: &Sizes) -> Result<Tensor> {
    let seen: Vec<f32> = (0..s.batch * s.queries)
        .map(|row| if a.seen(s, row / s.queries, row % s.queries).is_empty() { 0.0 } else { 1.0 })
        .collect();
    let seen = Tensor::from_vec(seen, (s.batch, 1, s.queries, 1), &Device::Cpu)?;
    seen.to_dtype(wide_dtype(q))?.to_device(q.device())
}

/// For query i and key j, flat (T*S): the entry `j - i + T - 1` of the bias.
fn diagonals(s: &Sizes, device: &Device) -> Result<Tensor> {
    let entries: Vec<u32> =
        (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (j + s.queries - 1 - i) as u32)).collect();
    Tensor::from_vec(entries, s.queries * s.keys, device)
}

/// The dropout mask of the probabilities times its scale: (B, H, T, S).
fn mask(like: &Tensor, a: &Attention, s: &Sizes) -> Result<Option<Tensor>> {
    let Some(d) = active("attention", a.dropout.as_ref(), s.batch)? else { return Ok(None) };
    let mut factors = Vec::with_capacity(s.batch * s.heads * s.queries * s.keys);
    for b in 0..s.batch {
        for h in 0..s.heads {
            for i in 0..s.queries {
                let key = d.query_key(b, h, i);
                factors.extend((0..s.keys as u32).map(|j| kept(d, key, j)));
            }
        }
    }
    let factors = Tensor::from_vec(factors, (s.batch, s.heads, s.queries, s.keys), &Device::Cpu)?;
    let dtype: DType = wide_dtype(like);
    Ok(Some((factors.to_dtype(dtype)? * d.scale())?.to_device(like.device())?))
}
