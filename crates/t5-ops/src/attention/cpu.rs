//! Attention on the CPU, a tile of scores at a time.
//!
//! Forward: a task is a tile of queries of one head of one sequence; its scores against all visible keys
//! (a prefix, so a mask is a shorter row and not a value) are one small matrix, turned into probabilities in
//! place. Backward: a task is one head of one sequence, which goes through its tiles of queries in order and
//! sums dk and dv in f32. Heads are columns of the (B, T, H*K) tensors, read and written with a stride.

use candle_core::{Result, Tensor};

use super::{Attention, Sizes};
use crate::dropout::{RowMask, active};
use crate::matmul::{Matrix, MatrixMut, Threads, multiply};
use crate::parallel::{Shared, for_each_part_with};
use crate::storage::{Element, View, filled, scratch, update, with_element};
use crate::vector::{self, exp, replace_and_sum, sum_of_two, vectorized};

/// How many scores a tile aims at: a quarter of a megabyte, so that tiles stay in the second-level cache.
const TILE_SCORES: usize = 64 * 1024;

/// The head of a sequence that a task works on, and how to find it in memory.
#[derive(Clone, Copy)]
struct Head {
    sequence: usize,
    head: usize,
    sizes: Sizes,
}

impl Head {
    fn width(&self) -> usize {
        self.sizes.heads * self.sizes.head_size
    }

    /// Where row `position` of a (B, length, H*K) tensor has this head.
    fn start(&self, length: usize, position: usize) -> usize {
        (self.sequence * length + position) * self.width() + self.head * self.sizes.head_size
    }

    /// `rows` rows from `first` on of this head of a (B, length, H*K) tensor: (rows, K).
    fn read<'a, T: Element>(&self, data: &'a [T], length: usize, first: usize, rows: usize) -> Matrix<'a> {
        Matrix::strided(T::operand(&data[self.start(length, first)..]), rows, self.sizes.head_size, self.width())
    }

    /// The same rows, to be written.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these rows of this head until the result is gone.
    unsafe fn write<T: Element>(&self, data: Shared<T>, length: usize, first: usize, rows: usize) -> MatrixMut {
        // SAFETY: by the caller's promise.
        unsafe { MatrixMut::part(data, self.start(length, first), rows, self.sizes.head_size, self.width()) }
    }

    /// The entries of the bias for query `i`: one for each key.
    fn bias_of<'a>(&self, bias: &'a [f32], i: usize) -> &'a [f32] {
        let s = &self.sizes;
        &bias[self.head * (s.queries + s.keys - 1) + s.queries - 1 - i..][..s.keys]
    }
}

fn tile_queries(s: &Sizes) -> usize {
    (TILE_SCORES / s.keys).clamp(16, 128).min(s.queries)
}

pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention, s: &Sizes) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (q_view, k_view, v_view) = (View::new(&q)?, View::new(&k)?, View::new(&v)?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let bias_view = bias.as_ref().map(View::new).transpose()?;
    let bias_data = bias_view.as_ref().map(View::to_f32).transpose()?;
    let dropout = active("attention", a.dropout.as_ref(), s.batch)?;

    let tile = tile_queries(s);
    let tiles = s.queries.div_ceil(tile);
    let mut lse = vec![f32::NEG_INFINITY; s.batch * s.heads * s.queries];
    let lse_out = Shared::new(&mut lse);
    let out = with_element!(q.dtype(), T, {
        let (q_data, k_data, v_data) = (q_view.slice::<T>()?, k_view.slice::<T>()?, v_view.slice::<T>()?);
        filled::<T>(q.shape(), |out| {
            let out = Shared::new(out);
            let init = || scratch::<f32>(tile * s.keys);
            for_each_part_with(s.batch * s.heads * tiles, init, |scores, task| {
                let (sequence, head) = (task / tiles / s.heads, task / tiles % s.heads);
                let head = Head { sequence, head, sizes: *s };
                let first = task % tiles * tile;
                let rows = tile.min(s.queries - first);
                let keys = a.visible(s, sequence, first + rows - 1);
                // SAFETY: each task has its own queries of its own head.
                let target = unsafe { head.write(out, s.queries, first, rows) };
                let scores = &mut scores[..rows * keys];
                let k = head.read(k_data, s.keys, 0, keys);
                let q = head.read(q_data, s.queries, first, rows);
                multiply(MatrixMut::new(scores, rows, keys), q, k.t(), false, Threads::One);
                for (i, row) in scores.chunks_mut(keys.max(1)).enumerate() {
                    let query = first + i;
                    let visible = a.visible(s, sequence, query);
                    let (row, hidden) = row.split_at_mut(visible);
                    hidden.fill(0.0);
                    let bias = bias_data.as_ref().map(|bias| &head.bias_of(bias, query)[..visible]);
                    let mask = dropout.map(|d| d.query_mask(sequence, head.head, query));
                    // SAFETY: each query of each head has its own element.
                    let lse = unsafe { lse_out.slice((sequence * s.heads + head.head) * s.queries + query, 1) };
                    lse[0] = softmax(row, bias, mask);
                }
                let v = head.read(v_data, s.keys, 0, keys);
                multiply(target, Matrix::new((&*scores).into(), rows, keys), v, false, Threads::One);
            });
            Ok(())
        })?
    });
    Ok((out, Tensor::from_vec(lse, (s.batch, s.heads, s.queries), q.device())?))
}

#[allow(clippy::too_many_arguments)]
pub(super) fn attention_backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    dout: &Tensor,
    a: &Attention,
    s: &Sizes,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (out, lse, dout) = (out.contiguous()?, lse.contiguous()?, dout.contiguous()?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let bias_view = bias.as_ref().map(View::new).transpose()?;
    let bias_data = bias_view.as_ref().map(View::to_f32).transpose()?;
    let lse_view = View::new(&lse)?;
    let views = [&q, &k, &v, &out, &dout].map(View::new);
    let [q_view, k_view, v_view, out_view, dout_view] = &views;
    let dropout = active("attention_backward", a.dropout.as_ref(), s.batch)?;

    // Each head of each sequence sums its own gradient of the bias; sequences are added in order at the end.
    let offsets = s.queries + s.keys - 1;
    let mut partial = vec![0f32; if dbias.is_some() { s.batch * s.heads * offsets } else { 0 }];
    let partials = Shared::new(&mut partial);
    let (mut dk, mut dv) = (None, None);
    let dq = with_element!(q.dtype(), T, {
        let input = Input {
            q: slice::<T>(q_view)?,
            k: slice::<T>(k_view)?,
            v: slice::<T>(v_view)?,
            out: slice::<T>(out_view)?,
            dout: slice::<T>(dout_view)?,
            lse: lse_view.slice::<f32>()?,
            bias: bias_data.as_deref(),
        };
        filled::<T>(q.shape(), |dq| {
            let dq = Shared::new(dq);
            dk = Some(filled::<T>(k.shape(), |dk| {
                let dk = Shared::new(dk);
                dv = Some(filled::<T>(v.shape(), |dv| {
                    let dv = Shared::new(dv);
                    for_each_part_with(
                        s.batch * s.heads,
                        || Scratch::new(s),
                        |scratch, task| {
                            let head = Head { sequence: task / s.heads, head: task % s.heads, sizes: *s };
                            let dbias = dbias.is_some().then(|| {
                                // SAFETY: each task has its own row of partial sums.
                                unsafe { partials.slice(task * offsets, offsets) }
                            });
                            head_backward(&head, a, &input, dropout, scratch, Output { dq, dk, dv }, dbias);
                        },
                    );
                    Ok(())
                })?);
                Ok(())
            })?);
            Ok(())
        })?
    });
    if let Some(dbias) = dbias {
        let operands = [&q, &k, &v, &out, &lse, &dout];
        update::<f32, _>("attention_backward", dbias, &operands, |dbias| {
            for partial in partial.chunks_exact(s.heads * offsets) {
                vector::add(dbias, partial);
            }
            Ok(())
        })?;
    }
    match (dk, dv) {
        (Some(dk), Some(dv)) => Ok((dq, dk, dv)),
        _ => candle_core::bail!("attention_backward: gradients were not computed"),
    }
}

fn slice<'a, T: Element>(view: &'a Result<View<'_>>) -> Result<&'a [T]> {
    match view {
        Ok(view) => view.slice::<T>(),
        Err(error) => candle_core::bail!("attention_backward: {error}"),
    }
}

/// What the backward reads.
struct Input<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    out: &'a [T],
    dout: &'a [T],
    lse: &'a [f32],
    bias: Option<&'a [f32]>,
}

/// Where the backward writes.
struct Output<T> {
    dq: Shared<T>,
    dk: Shared<T>,
    dv: Shared<T>,
}

/// The buffers of one thread in the backward: two tiles, and the sums of one head.
struct Scratch {
    scores: Vec<f32>, // (tile, S): scores, then probabilities after dropout
    dp: Vec<f32>,     // (tile, S): gradient of the probabilities, then of the scores
    dk: Vec<f32>,     // (S, K)
    dv: Vec<f32>,     // (S, K)
}

impl Scratch {
    fn new(s: &Sizes) -> Self {
        let (tile, sums) = (tile_queries(s) * s.keys, s.keys * s.head_size);
        Self { scores: scratch(tile), dp: scratch(tile), dk: scratch(sums), dv: scratch(sums) }
    }
}

fn head_backward<T: Element>(
    head: &Head,
    a: &Attention,
    input: &Input<T>,
    dropout: Option<&crate::Dropout>,
    scratch: &mut Scratch,
    output: Output<T>,
    mut dbias: Option<&mut [f32]>,
) {
    let s = &head.sizes;
    let size = s.head_size;
    let Scratch { scores, dp, dk, dv } = scratch;
    dk.fill(0.0);
    dv.fill(0.0);
    let tile = tile_queries(s);
    for first in (0..s.queries).step_by(tile) {
        let rows = tile.min(s.queries - first);
        let keys = a.visible(s, head.sequence, first + rows - 1);
        let (scores, dp) = (&mut scores[..rows * keys], &mut dp[..rows * keys]);
        let q = head.read(input.q, s.queries, first, rows);
        let dout = head.read(input.dout, s.queries, first, rows);
        let k = head.read(input.k, s.keys, 0, keys);
        let v = head.read(input.v, s.keys, 0, keys);
        multiply(MatrixMut::new(scores, rows, keys), q, k.t(), false, Threads::One);
        multiply(MatrixMut::new(dp, rows, keys), dout, v.t(), false, Threads::One);
        let both = scores.chunks_mut(keys.max(1)).zip(dp.chunks_mut(keys.max(1)));
        for (i, (p, ds)) in both.enumerate() {
            let query = first + i;
            let visible = a.visible(s, head.sequence, query);
            let ((p, p_hidden), (ds, ds_hidden)) = (p.split_at_mut(visible), ds.split_at_mut(visible));
            p_hidden.fill(0.0);
            ds_hidden.fill(0.0);
            let at = head.start(s.queries, query);
            let delta = dot(&input.out[at..at + size], &input.dout[at..at + size]);
            let lse = input.lse[(head.sequence * s.heads + head.head) * s.queries + query];
            let bias = input.bias.map(|bias| &head.bias_of(bias, query)[..visible]);
            let mask = dropout.map(|d| d.query_mask(head.sequence, head.head, query));
            softmax_backward(p, ds, bias, mask, lse, delta);
            if let Some(dbias) = &mut dbias {
                vector::add(&mut dbias[s.queries - 1 - query..][..visible], ds);
            }
        }
        let p = Matrix::new((&*scores).into(), rows, keys);
        let ds = Matrix::new((&*dp).into(), rows, keys);
        multiply(MatrixMut::new(&mut dv[..keys * size], keys, size), p.t(), dout, true, Threads::One);
        multiply(MatrixMut::new(&mut dk[..keys * size], keys, size), ds.t(), q, true, Threads::One);
        // SAFETY: each task has its own head, each tile its own queries.
        let dq = unsafe { head.write(output.dq, s.queries, first, rows) };
        multiply(dq, ds, k, false, Threads::One);
    }
    for key in 0..s.keys {
        let at = head.start(s.keys, key);
        // SAFETY: each task has its own head.
        let (dk_out, dv_out) = unsafe { (output.dk.slice(at, size), output.dv.slice(at, size)) };
        for i in 0..size {
            dk_out[i] = T::from_f32(dk[key * size + i]);
            dv_out[i] = T::from_f32(dv[key * size + i]);
        }
    }
}

vectorized! {
    /// Turns scores into probabilities after dropout, in place; returns the log-sum-exp, `-inf` of an empty row.
    fn softmax(scores: &mut [f32], bias: Option<&[f32]>, mask: Option<RowMask>) -> f32 {
        if scores.is_empty() {
            return f32::NEG_INFINITY;
        }
        if let Some(bias) = bias {
            for (score, bias) in scores.iter_mut().zip(bias) {
                *score += bias;
            }
        }
        let max = vector::max(scores, |score| score);
        let total = replace_and_sum(scores, |score| exp(score - max));
        let scale = 1.0 / total;
        match mask {
            None => for p in scores.iter_mut() {
                *p *= scale;
            },
            Some(mask) => for (j, p) in scores.iter_mut().enumerate() {
                *p *= scale * mask.factor(j);
            },
        }
        max + total.ln()
    }

    /// With p = exp(score - lse), m the dropout mask, dp the gradient of the masked probabilities:
    /// `scores` becomes p m, `dp` becomes the gradient of the scores, p (m dp - delta).
    fn softmax_backward(
        scores: &mut [f32],
        dp: &mut [f32],
        bias: Option<&[f32]>,
        mask: Option<RowMask>,
        lse: f32,
        delta: f32,
    ) {
        let n = scores.len();
        let dp = &mut dp[..n];
        if let Some(bias) = bias {
            for (score, bias) in scores.iter_mut().zip(bias) {
                *score += bias;
            }
        }
        match mask {
            None => for i in 0..n {
                let p = exp(scores[i] - lse);
                scores[i] = p;
                dp[i] = p * (dp[i] - delta);
            },
            Some(mask) => for i in 0..n {
                let p = exp(scores[i] - lse);
                let m = mask.factor(i);
                scores[i] = p * m;
                dp[i] = p * (m * dp[i] - delta);
            },
        }
    }

    fn dot<T: Element>(x: &[T], y: &[T]) -> f32 {
        sum_of_two(x, y, |x, y| x.to_f32() * y.to_f32())
    }
}
