//! Attention with vectors and the general products, in f32 and bf16 on every machine: a tile of scores at a time, some queries by at most
//! [`TILE_KEYS`] keys.
//!
//! Forward goes through the tiles of visible keys (a prefix, so a mask is a shorter row and not a value). It keeps the largest score and
//! the sum of exponentials of each row so far, and rescales its sums when a larger score comes (Dao et al. 2022). Probabilities and the
//! gradients of scores are written in the dtype of the activations, so that in bf16 the products with them are bf16 products.

use std::ops::Range;

use candle_core::DType;

use super::ahead::Ahead;
use super::rows::{Row, convert, dot, softmax, softmax_backward};
use super::task::{self, Head, Input, Output, Queries};
use super::{Attention, Mask, Sizes};
use crate::matmul::{Matrix, MatrixMut, Packed, Threads, multiply, multiply_packed_part};
use crate::parallel::Shared;
use crate::simd::{Lanes, WIDTH};
use crate::storage::scratch;
use crate::vector;

/// Queries of a task of the forward: for each task keys and values are packed once.
const TASK_QUERIES: usize = 256;
/// Keys of a tile.
const TILE_KEYS: usize = 512;
/// Queries of a tile are a multiple of this: the kernels' blocks have 12 or 6 rows.
const ROWS: usize = 12;
/// Scores of a tile: 96 KiB, so that the four tiles of the backward stay in the second-level cache beside the packed keys.
const TILE_SCORES: usize = 24 * 1024;
/// The same if queries see a prefix of the keys: a tile computes all its queries over the keys that its last query sees.
const CAUSAL_TILE_SCORES: usize = TILE_SCORES / 2;

/// Queries of a tile.
fn tile_queries(a: &Attention, s: &Sizes) -> usize {
    let scores = if a.mask == Mask::CAUSAL { CAUSAL_TILE_SCORES } else { TILE_SCORES };
    (scores / tile_keys(s) / ROWS * ROWS).clamp(2 * ROWS, 16 * ROWS).min(s.queries)
}

fn tile_keys(s: &Sizes) -> usize {
    TILE_KEYS.min(s.keys)
}

/// The tiles of the first `seen` keys.
fn tiles_of_keys(seen: usize) -> impl Iterator<Item = Range<usize>> {
    (0..seen).step_by(TILE_KEYS).map(move |key| key..seen.min(key + TILE_KEYS))
}

/// Visible keys, filled up to whole vectors with hidden keys as far as the tile goes. Hidden keys get a score of minus infinity; a partial
/// vector at the end of a row is expensive.
fn whole_lanes(visible: usize, keys: usize) -> usize {
    visible.next_multiple_of(WIDTH).min(keys)
}

/// The buffers of a task of the forward.
pub(super) struct Forward<T> {
    scores: Vec<f32>,  // (tile, keys)
    p: Vec<T>,         // (tile, keys): exp(score - largest), zero where dropped or hidden
    out: Vec<f32>,     // (tile, K): sums of p v
    largest: Vec<f32>, // (tile): largest score so far
    total: Vec<f32>,   // (tile): sum of exp(score - largest) so far
}

impl<T: Lanes> task::Forward<T> for Forward<T> {
    fn queries(_: &Attention, _: &Sizes) -> usize {
        TASK_QUERIES
    }

    fn new(a: &Attention, s: &Sizes) -> Self {
        let tile = tile_queries(a, s);
        let scores = tile * tile_keys(s);
        Self {
            scores: scratch(scores),
            p: scratch(scores),
            out: scratch(tile * s.head_size),
            largest: scratch(tile),
            total: scratch(tile),
        }
    }

    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        queries: Range<usize>,
        to: Shared<T>,
        lse: Shared<f32>,
    ) {
        let s = &head.sizes;
        let seen = a.visible(s, head.sequence, queries.end - 1);
        let packed: Vec<[Packed; 2]> = tiles_of_keys(seen)
            .map(|keys| {
                let k = head.read(input.k, s.keys, keys.start, keys.len());
                let v = head.read(input.v, s.keys, keys.start, keys.len());
                [k.t(), v].map(|b| Packed::new(b, T::DTYPE == DType::BF16, Threads::One))
            })
            .collect();
        let ahead = Ahead::forward(head, input, queries.clone(), to);
        let scale = input.dropout.map_or(1.0, |d| d.scale() as f32);
        for first in queries.clone().step_by(tile_queries(a, s)) {
            let rows = tile_queries(a, s).min(queries.end - first);
            self.tile(head, a, input, first..first + rows, &packed, &ahead);
            for i in 0..rows {
                // SAFETY: by the caller's promise.
                let (to, lse) = unsafe {
                    (to.slice(head.start(s.queries, first + i), s.head_size), lse.slice(head.row(first + i), 1))
                };
                lse[0] = self.finish(i, scale, to);
            }
        }
    }
}

impl<T: Lanes> Forward<T> {
    /// Sums over all visible keys for some queries.
    fn tile(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        queries: Range<usize>,
        packed: &[[Packed; 2]],
        ahead: &Ahead<T>,
    ) {
        let (first, rows) = (queries.start, queries.len());
        let s = &head.sizes;
        let Self { scores, p, out, largest, total } = self;
        let out = &mut out[..rows * s.head_size];
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        let seen = a.visible(s, head.sequence, queries.end - 1);
        if seen == 0 {
            out.fill(0.0);
        }
        let q = head.read(input.q, s.queries, first, rows);
        for (keys, [k, v]) in tiles_of_keys(seen).zip(packed) {
            let (key, count) = (keys.start, keys.len());
            let (scores, p) = (&mut scores[..rows * count], &mut p[..rows * count]);
            multiply_packed_part(MatrixMut::new(scores, rows, count), q, k, false, Threads::One);
            for (i, (scores, p)) in scores.chunks_exact_mut(count).zip(p.chunks_exact_mut(count)).enumerate() {
                let query = first + i;
                let visible = a.visible(s, head.sequence, query).saturating_sub(key).min(count);
                let n = whole_lanes(visible, count);
                let (p, hidden) = p.split_at_mut(n);
                hidden.fill(T::from_f32(0.0));
                if key == 0 {
                    ahead.prefetch(query);
                }
                if visible == 0 {
                    continue;
                }
                scores[visible..n].fill(f32::NEG_INFINITY);
                let bias = input.bias.map(|bias| &head.bias_of(bias, query)[key..key + n]);
                let mask = input.dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                let smaller = softmax(&mut scores[..n], bias, mask, key, &mut largest[i], &mut total[i], p);
                if key > 0 && smaller != 1.0 {
                    out[i * s.head_size..][..s.head_size].iter_mut().for_each(|out| *out *= smaller);
                }
            }
            let p = Matrix::new(T::operand(p), rows, count);
            multiply_packed_part(MatrixMut::new(out, rows, s.head_size), p, v, key > 0, Threads::One);
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

/// The buffers of a part of a head in the backward: four tiles, and sums.
pub(super) struct Backward<T> {
    scores: Vec<f32>, // (tile, keys)
    dp: Vec<f32>,     // (tile, keys): gradient of the probabilities
    p: Vec<T>,        // (tile, keys): probabilities after dropout
    ds: Vec<T>,       // (tile, keys): gradient of the scores
    delta: Vec<f32>,  // (tile): sum of out * dout
    dbias: Vec<f32>,  // (keys): where no gradient of the bias is wanted
    dq: Vec<f32>,     // (tile, K)
    dk: Vec<f32>,     // (S, K)
    dv: Vec<f32>,     // (S, K)
}

impl<T: Lanes> task::Backward<T> for Backward<T> {
    fn queries(a: &Attention, s: &Sizes) -> usize {
        tile_queries(a, s)
    }

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

    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Input<T>,
        queries: Range<usize>,
        to: Output<T>,
        mut dbias: Option<&mut [f32]>,
    ) {
        let s = &head.sizes;
        let (tile, size) = (tile_queries(a, s), s.head_size);
        let Self { scores, dp, p, ds, delta, dbias: nobody, dq, dk, dv } = self;
        dk.fill(0.0);
        dv.fill(0.0);
        let Some(last) = queries.clone().last() else { return };
        let packed: Vec<[Packed; 3]> = tiles_of_keys(a.visible(s, head.sequence, last))
            .map(|keys| {
                let k = head.read(input.k, s.keys, keys.start, keys.len());
                let v = head.read(input.v, s.keys, keys.start, keys.len());
                [k.t(), v.t(), k].map(|b| Packed::new(b, T::DTYPE == DType::BF16, Threads::One))
            })
            .collect();
        let ahead = Ahead::backward(head, input, queries.clone(), to);
        for first in queries.clone().step_by(tile) {
            let rows = tile.min(queries.end - first);
            let q = head.read(input.q, s.queries, first, rows);
            let dout = head.read(input.dout, s.queries, first, rows);
            for (i, delta) in delta[..rows].iter_mut().enumerate() {
                let at = head.start(s.queries, first + i);
                *delta = dot(&input.out[at..at + size], &input.dout[at..at + size]);
            }
            let dq = &mut dq[..rows * size];
            dq.fill(0.0);
            let seen = a.visible(s, head.sequence, first + rows - 1);
            for (keys, [k_t, v_t, k]) in tiles_of_keys(seen).zip(&packed) {
                let (key, count) = (keys.start, keys.len());
                let cells = rows * count;
                let (scores, dp) = (&mut scores[..cells], &mut dp[..cells]);
                let (p, ds) = (&mut p[..cells], &mut ds[..cells]);
                multiply_packed_part(MatrixMut::new(scores, rows, count), q, k_t, false, Threads::One);
                multiply_packed_part(MatrixMut::new(dp, rows, count), dout, v_t, false, Threads::One);
                for (i, &delta) in delta[..rows].iter().enumerate() {
                    let query = first + i;
                    let visible = a.visible(s, head.sequence, query).saturating_sub(key).min(count);
                    let n = whole_lanes(visible, count);
                    let range = i * count..i * count + n;
                    if key == 0 {
                        ahead.prefetch(query);
                    }
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
                multiply_packed_part(MatrixMut::new(dq, rows, size), ds, k, key > 0, Threads::One);
            }
            for (i, dq) in dq.chunks_exact(size).enumerate() {
                // SAFETY: by the caller's promise.
                convert(dq, 1.0, unsafe { to.dq.slice(head.start(s.queries, first + i), size) });
            }
        }
    }

    unsafe fn add_up(parts: &mut [Self], head: &Head, to: Output<T>) {
        let Some((sums, others)) = parts.split_first_mut() else { return };
        for other in others {
            vector::add(&mut sums.dk, &other.dk);
            vector::add(&mut sums.dv, &other.dv);
        }
        let (keys, size) = (head.sizes.keys, head.sizes.head_size);
        for key in 0..keys {
            let at = head.start(keys, key);
            // SAFETY: by the caller's promise.
            let (dk, dv) = unsafe { (to.dk.slice(at, size), to.dv.slice(at, size)) };
            convert(&sums.dk[key * size..][..size], 1.0, dk);
            convert(&sums.dv[key * size..][..size], 1.0, dv);
        }
    }
}
