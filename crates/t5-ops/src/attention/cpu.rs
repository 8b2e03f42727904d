//! Attention on the CPU, a tile of scores at a time: some queries by at most [`TILE_KEYS`] keys.
//!
//! Forward: a task is a tile of queries of one head of one sequence, which goes through the tiles of visible
//! keys (a prefix, so a mask is a shorter row and not a value) with the largest score and the sum of
//! exponentials of each row so far, and corrects what it has summed when a larger score comes (Dao et al.
//! 2022). Backward: a task is one head of one sequence; its queries are divided among the threads where there
//! are fewer heads than it takes to keep them busy, and each part sums its own dk and dv in f32; parts are
//! added in order. Probabilities and the gradients of scores are written in the dtype of the activations, so
//! that in bf16 the products with them are bf16 products. Heads are columns of the (B, T, H*K) tensors, read
//! and written with a stride.

use candle_core::{Result, Tensor};

use super::rows::{Row, convert, dot, softmax, softmax_backward};
use super::{Attention, Sizes};
use crate::dropout::active;
use crate::matmul::{Matrix, MatrixMut, Threads, multiply};
use crate::parallel::{Shared, for_each_part, for_each_part_with};
use crate::simd::{Lanes, WIDTH};
use crate::storage::{Element, View, filled, scratch, update, with_element};
use crate::vector;

/// Keys of a tile.
const TILE_KEYS: usize = 512;
/// Scores of a tile: a quarter of a megabyte, so that the four tiles of the backward stay in the second-level
/// cache.
const TILE_SCORES: usize = 64 * 1024;
/// The same where queries see a prefix of the keys: a tile computes what its last query sees for all of them.
const CAUSAL_TILE_SCORES: usize = TILE_SCORES / 2;
/// Parts of a call that a thread gets at least, so that threads end together.
const PARTS_PER_THREAD: usize = 2;

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

    /// Where query `position` of this head is in (B, H, T).
    fn row(&self, position: usize) -> usize {
        (self.sequence * self.sizes.heads + self.head) * self.sizes.queries + position
    }

    /// The entries of the bias for query `i`: one for each key.
    fn bias_of<'a>(&self, bias: &'a [f32], i: usize) -> &'a [f32] {
        let s = &self.sizes;
        &bias[self.head * (s.queries + s.keys - 1) + s.queries - 1 - i..][..s.keys]
    }
}

/// Queries of a tile.
fn tile_queries(a: &Attention, s: &Sizes) -> usize {
    let scores = if a.causal { CAUSAL_TILE_SCORES } else { TILE_SCORES };
    (scores / tile_keys(s)).clamp(16, 256).min(s.queries)
}

fn tile_keys(s: &Sizes) -> usize {
    TILE_KEYS.min(s.keys)
}

/// Visible keys filled up with hidden ones to whole vectors, as far as the tile goes: the hidden get a score of
/// minus infinity, and what is left over at the end of a row is dear.
fn whole_lanes(visible: usize, keys: usize) -> usize {
    visible.next_multiple_of(WIDTH).min(keys)
}

pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention, s: &Sizes) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (q_view, k_view, v_view) = (View::new(&q)?, View::new(&k)?, View::new(&v)?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let bias_view = bias.as_ref().map(View::new).transpose()?;
    let bias_data = bias_view.as_ref().map(View::to_f32).transpose()?;
    let dropout = active("attention", a.dropout.as_ref(), s.batch)?;

    let tile = tile_queries(a, s);
    let tiles = s.queries.div_ceil(tile);
    let mut lse = vec![f32::NEG_INFINITY; s.batch * s.heads * s.queries];
    let lse_out = Shared::new(&mut lse);
    let out = with_element!(q.dtype(), T, {
        let (q_data, k_data, v_data) = (q_view.slice::<T>()?, k_view.slice::<T>()?, v_view.slice::<T>()?);
        let input = Queries { q: q_data, k: k_data, v: v_data, bias: bias_data.as_deref() };
        filled::<T>(q.shape(), |out| {
            let out = Shared::new(out);
            let init = || Forward::<T>::new(s, tile);
            for_each_part_with(s.batch * s.heads * tiles, init, |forward, task| {
                let head = Head { sequence: task / tiles / s.heads, head: task / tiles % s.heads, sizes: *s };
                let first = task % tiles * tile;
                let rows = tile.min(s.queries - first);
                forward.run(&head, a, &input, dropout, first, rows);
                for i in 0..rows {
                    // SAFETY: each task has its own queries of its own head.
                    let to = unsafe { out.slice(head.start(s.queries, first + i), s.head_size) };
                    // SAFETY: as above.
                    let lse = unsafe { lse_out.slice(head.row(first + i), 1) };
                    lse[0] = forward.finish(i, dropout.map_or(1.0, |d| d.scale() as f32), to);
                }
            });
            Ok(())
        })?
    });
    Ok((out, Tensor::from_vec(lse, (s.batch, s.heads, s.queries), q.device())?))
}

/// What the forward reads.
struct Queries<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    bias: Option<&'a [f32]>,
}

/// The buffers of a task of the forward.
struct Forward<T> {
    scores: Vec<f32>,  // (tile, keys)
    p: Vec<T>,         // (tile, keys): exp(score - largest), zero where dropped or hidden
    out: Vec<f32>,     // (tile, K): sums of p v
    largest: Vec<f32>, // (tile): largest score so far
    total: Vec<f32>,   // (tile): sum of exp(score - largest) so far
}

impl<T: Lanes> Forward<T> {
    fn new(s: &Sizes, tile: usize) -> Self {
        let scores = tile * tile_keys(s);
        Self {
            scores: scratch(scores),
            p: scratch(scores),
            out: scratch(tile * s.head_size),
            largest: scratch(tile),
            total: scratch(tile),
        }
    }

    /// Sums over all visible keys for `rows` queries from `first` on.
    fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        dropout: Option<&crate::Dropout>,
        first: usize,
        rows: usize,
    ) {
        let s = &head.sizes;
        let Self { scores, p, out, largest, total } = self;
        let out = &mut out[..rows * s.head_size];
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        let keys = a.visible(s, head.sequence, first + rows - 1);
        if keys == 0 {
            out.fill(0.0);
        }
        let q = head.read(input.q, s.queries, first, rows);
        for key in (0..keys).step_by(TILE_KEYS) {
            let count = TILE_KEYS.min(keys - key);
            let (scores, p) = (&mut scores[..rows * count], &mut p[..rows * count]);
            let k = head.read(input.k, s.keys, key, count);
            multiply(MatrixMut::new(scores, rows, count), q, k.t(), false, Threads::One);
            for (i, (scores, p)) in scores.chunks_exact_mut(count).zip(p.chunks_exact_mut(count)).enumerate() {
                let query = first + i;
                let visible = a.visible(s, head.sequence, query).saturating_sub(key).min(count);
                let n = whole_lanes(visible, count);
                let (p, hidden) = p.split_at_mut(n);
                hidden.fill(T::from_f32(0.0));
                if visible == 0 {
                    continue;
                }
                scores[visible..n].fill(f32::NEG_INFINITY);
                let bias = input.bias.map(|bias| &head.bias_of(bias, query)[key..key + n]);
                let mask = dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                let smaller = softmax(&mut scores[..n], bias, mask, key, &mut largest[i], &mut total[i], p);
                if key > 0 && smaller != 1.0 {
                    out[i * s.head_size..][..s.head_size].iter_mut().for_each(|out| *out *= smaller);
                }
            }
            let v = head.read(input.v, s.keys, key, count);
            let p = Matrix::new(T::operand(p), rows, count);
            multiply(MatrixMut::new(out, rows, s.head_size), p, v, key > 0, Threads::One);
        }
    }

    /// Writes the result of query `i` of the tile, its sums times `scale`; returns its log-sum-exp.
    fn finish(&self, i: usize, scale: f32, to: &mut [T]) -> f32 {
        let (largest, total) = (self.largest[i], self.total[i]);
        // A query that sees no key has sums of zero.
        let factor = if total == 0.0 { 0.0 } else { scale / total };
        let sums = &self.out[i * to.len()..][..to.len()];
        convert(sums, factor, to);
        largest + total.ln()
    }
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

    let tiles = s.queries.div_ceil(tile_queries(a, s));
    let heads = s.batch * s.heads;
    let parts = (PARTS_PER_THREAD * rayon::current_num_threads()).div_ceil(heads).min(tiles);
    // Each part of each head of each sequence sums its own gradient of the bias; they are added in order at the end.
    let offsets = s.queries + s.keys - 1;
    let mut partial = vec![0f32; if dbias.is_some() { heads * parts * offsets } else { 0 }];
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
            dropout,
        };
        filled::<T>(q.shape(), |dq| {
            let dq = Shared::new(dq);
            dk = Some(filled::<T>(k.shape(), |dk| {
                let dk = Shared::new(dk);
                dv = Some(filled::<T>(v.shape(), |dv| {
                    let dv = Shared::new(dv);
                    let init = || (0..parts).map(|_| Backward::<T>::new(a, s)).collect::<Vec<_>>();
                    for_each_part_with(heads, init, |scratch, task| {
                        let head = Head { sequence: task / s.heads, head: task % s.heads, sizes: *s };
                        let each = Shared::new(scratch);
                        for_each_part(parts, |part| {
                            // SAFETY: each part has its own buffers and its own row of partial sums.
                            let backward = unsafe { &mut each.slice(part, 1)[0] };
                            let dbias = dbias.is_some().then(|| {
                                // SAFETY: as above.
                                unsafe { partials.slice((task * parts + part) * offsets, offsets) }
                            });
                            let tiles = tiles * part / parts..tiles * (part + 1) / parts;
                            // SAFETY: each part has its own queries of its own head.
                            unsafe { backward.run(&head, a, &input, tiles, dq, dbias) };
                        });
                        // SAFETY: each task has its own head.
                        unsafe { add_up(&head, scratch, dk, dv) };
                    });
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
            for (i, partial) in partial.chunks_exact(offsets).enumerate() {
                vector::add(&mut dbias[i / parts % s.heads * offsets..][..offsets], partial);
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
    dropout: Option<&'a crate::Dropout<'a>>,
}

/// The buffers of a part of a head in the backward: four tiles, and sums.
struct Backward<T> {
    scores: Vec<f32>, // (tile, keys)
    dp: Vec<f32>,     // (tile, keys): gradient of the probabilities
    p: Vec<T>,        // (tile, keys): probabilities after dropout
    ds: Vec<T>,       // (tile, keys): gradient of the scores
    delta: Vec<f32>,  // (tile): sum of out * dout
    dbias: Vec<f32>,  // (keys): where nobody wants the gradient of the bias
    dq: Vec<f32>,     // (tile, K)
    dk: Vec<f32>,     // (S, K)
    dv: Vec<f32>,     // (S, K)
}

impl<T: Lanes> Backward<T> {
    fn new(a: &Attention, s: &Sizes) -> Self {
        let (tile, keys, sums) = (tile_queries(a, s), tile_keys(s), s.keys * s.head_size);
        Self {
            scores: scratch(tile * keys),
            dp: scratch(tile * keys),
            p: scratch(tile * keys),
            ds: scratch(tile * keys),
            delta: scratch(tile),
            dbias: vec![0.0; keys],
            dq: scratch(tile * s.head_size),
            dk: scratch(sums),
            dv: scratch(sums),
        }
    }

    /// Writes dq of some tiles of queries, sums what they add to dk and dv, and adds to `dbias`.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of this head of `dq`.
    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Input<T>,
        tiles: std::ops::Range<usize>,
        dq_out: Shared<T>,
        mut dbias: Option<&mut [f32]>,
    ) {
        let s = &head.sizes;
        let (tile, size) = (tile_queries(a, s), s.head_size);
        let Self { scores, dp, p, ds, delta, dbias: nobody, dq, dk, dv } = self;
        dk.fill(0.0);
        dv.fill(0.0);
        for first in tiles.map(|t| t * tile) {
            let rows = tile.min(s.queries - first);
            let q = head.read(input.q, s.queries, first, rows);
            let dout = head.read(input.dout, s.queries, first, rows);
            for (i, delta) in delta[..rows].iter_mut().enumerate() {
                let at = head.start(s.queries, first + i);
                *delta = dot(&input.out[at..at + size], &input.dout[at..at + size]);
            }
            let dq = &mut dq[..rows * size];
            dq.fill(0.0);
            let keys = a.visible(s, head.sequence, first + rows - 1);
            for key in (0..keys).step_by(TILE_KEYS) {
                let count = TILE_KEYS.min(keys - key);
                let cells = rows * count;
                let (scores, dp) = (&mut scores[..cells], &mut dp[..cells]);
                let (p, ds) = (&mut p[..cells], &mut ds[..cells]);
                let k = head.read(input.k, s.keys, key, count);
                let v = head.read(input.v, s.keys, key, count);
                multiply(MatrixMut::new(scores, rows, count), q, k.t(), false, Threads::One);
                multiply(MatrixMut::new(dp, rows, count), dout, v.t(), false, Threads::One);
                for (i, &delta) in delta[..rows].iter().enumerate() {
                    let query = first + i;
                    let visible = a.visible(s, head.sequence, query).saturating_sub(key).min(count);
                    let n = whole_lanes(visible, count);
                    let range = i * count..i * count + n;
                    let hidden = range.end..(i + 1) * count;
                    scores[i * count + visible..range.end].fill(f32::NEG_INFINITY);
                    dp[i * count + visible..range.end].fill(0.0);
                    p[hidden.clone()].fill(T::from_f32(0.0));
                    ds[hidden].fill(T::from_f32(0.0));
                    let bias = input.bias.map(|bias| &head.bias_of(bias, query)[key..key + n]);
                    let mask = input.dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                    let row = Row { key, mask, bias, lse: input.lse[head.row(query)], delta };
                    let dbias = match &mut dbias {
                        Some(dbias) => &mut dbias[s.queries - 1 - query + key..][..n],
                        None => &mut nobody[..n],
                    };
                    let (p, ds) = (&mut p[range.clone()], &mut ds[range.clone()]);
                    softmax_backward(&scores[range.clone()], &dp[range], row, p, ds, dbias);
                }
                let (p, ds) = (Matrix::new(T::operand(p), rows, count), Matrix::new(T::operand(ds), rows, count));
                let sums = key * size..(key + count) * size;
                multiply(MatrixMut::new(&mut dv[sums.clone()], count, size), p.t(), dout, true, Threads::One);
                multiply(MatrixMut::new(&mut dk[sums], count, size), ds.t(), q, true, Threads::One);
                multiply(MatrixMut::new(dq, rows, size), ds, k, key > 0, Threads::One);
            }
            for (i, dq) in dq.chunks_exact(size).enumerate() {
                // SAFETY: by the caller's promise.
                convert(dq, 1.0, unsafe { dq_out.slice(head.start(s.queries, first + i), size) });
            }
        }
    }
}

/// Adds the parts' sums of dk and dv to the first part's, in order, and writes them.
///
/// # Safety
///
/// Nothing else reaches this head of `dk` and `dv`.
unsafe fn add_up<T: Lanes>(head: &Head, parts: &mut [Backward<T>], dk: Shared<T>, dv: Shared<T>) {
    let Some((sums, others)) = parts.split_first_mut() else { return };
    for other in others {
        vector::add(&mut sums.dk, &other.dk);
        vector::add(&mut sums.dv, &other.dv);
    }
    let (keys, size) = (head.sizes.keys, head.sizes.head_size);
    for key in 0..keys {
        let at = head.start(keys, key);
        // SAFETY: by the caller's promise.
        let (dk, dv) = unsafe { (dk.slice(at, size), dv.slice(at, size)) };
        convert(&sums.dk[key * size..][..size], 1.0, dk);
        convert(&sums.dv[key * size..][..size], 1.0, dv);
    }
}
