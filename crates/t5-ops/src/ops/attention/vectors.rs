//! Attention with vectors and the general products, in f32 and bf16 on every machine: a tile of scores at a time, some queries by at most
//! [`TILE_KEYS`] keys.
//!
//! Forward goes through the tiles of visible keys (one range, so a mask is a shorter row and hardly ever a value). It keeps the largest score and
//! the sum of exponentials of each row so far, and rescales its sums when a larger score comes (Dao et al. 2022). Probabilities and the
//! gradients of scores are written in the dtype of the activations, so that in bf16 the products with them are bf16 products.

use std::ops::Range;

use candle_core::DType;

use super::ahead::Ahead;
use super::rows::{Row, convert, dot, first_of_lanes, lanes_of, softmax, softmax_backward, through_cap, to_scores};
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
/// The same in a window: fewer keys at the edges of a tile are computed and hidden.
const WINDOW_TILE_KEYS: usize = 128;
/// Queries of a tile are a multiple of this: the kernels' blocks have 12 or 6 rows.
const ROWS: usize = 12;
/// The fewest queries of a part of the backward.
pub(super) const FEWEST_OF_PART: usize = 2 * ROWS;
/// Scores of a tile: 96 KiB, so that the four tiles of the backward stay in the second-level cache beside the packed keys.
const TILE_SCORES: usize = 24 * 1024;
/// The same if queries see a prefix of the keys: a tile computes all its queries over the keys that its last query sees.
const CAUSAL_TILE_SCORES: usize = TILE_SCORES / 2;
/// The same in a window.
const WINDOW_TILE_SCORES: usize = 4 * ROWS * WINDOW_TILE_KEYS;

/// Queries of a task of the forward, for each head: heads that share keys are one task.
pub(super) fn task_queries(s: &Sizes) -> usize {
    (TASK_QUERIES / s.group()).max(2 * ROWS)
}

/// Queries of a tile.
fn tile_queries(a: &Attention, s: &Sizes) -> usize {
    let scores = match a.mask {
        _ if s.is_windowed() => WINDOW_TILE_SCORES,
        Mask::CAUSAL => CAUSAL_TILE_SCORES,
        _ => TILE_SCORES,
    };
    (scores / tile_keys(s) / ROWS * ROWS).clamp(2 * ROWS, 16 * ROWS).min(s.queries)
}

fn tile_keys(s: &Sizes) -> usize {
    s.keys.min(if s.is_windowed() { WINDOW_TILE_KEYS } else { TILE_KEYS })
}

/// The tiles of these keys, and the keys before them that belong to the first vector.
fn tiles_of_keys(s: &Sizes, seen: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let (first, each) = (first_of_lanes(seen.start), tile_keys(s));
    (first..seen.end).step_by(each).map(move |key| key..seen.end.min(key + each))
}

/// Bytes of the keys that a task or a part with `queries` queries packs, in this number of copies. Those of T5 are small, and are left out.
pub(super) fn packed_bytes(s: &Sizes, dtype: DType, queries: usize, copies: usize) -> usize {
    if s.is_plain {
        return 0;
    }
    let span = s.keys.min(s.seen.saturating_add(queries + WIDTH));
    let of_tile = |keys: Range<usize>| Packed::bytes(keys.len(), s.head_size, dtype == DType::BF16) as usize;
    copies * tiles_of_keys(s, 0..span).map(of_tile).sum::<usize>()
}

/// Bytes of the tiles of a part of the backward: scores, their gradients, both as operands, and dq. Those of T5 are left out.
pub(super) fn bytes_of_tiles(s: &Sizes, dtype: DType) -> usize {
    let cells = if s.is_windowed() { WINDOW_TILE_SCORES } else { TILE_SCORES };
    let of_cell = 2 * (size_of::<f32>() + dtype.size_in_bytes());
    if s.is_plain { 0 } else { cells * of_cell + cells / tile_keys(s) * s.head_size * size_of::<f32>() }
}

/// Bytes of the sums of dk and dv of a part of the backward. Those of T5 are left out.
pub(super) fn bytes_of_sums(s: &Sizes) -> usize {
    if s.is_plain { 0 } else { 2 * s.keys * s.head_size * size_of::<f32>() }
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
    fn queries(_: &Attention, s: &Sizes) -> usize {
        task_queries(s)
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
        let seen = a.seen_by(s, head.sequence, queries.clone());
        let packed: Vec<(Range<usize>, [Packed; 2])> = tiles_of_keys(s, seen)
            .map(|keys| {
                let (k, v) = (head.read_keys(input.k, keys.clone()), head.read_keys(input.v, keys.clone()));
                (keys, [k.t(), v].map(|b| Packed::new(b, T::DTYPE == DType::BF16, Threads::One)))
            })
            .collect();
        let scale = input.dropout.map_or(1.0, |d| d.scale() as f32);
        for head in head.group() {
            let ahead = Ahead::forward(&head, input, queries.clone(), to);
            for first in queries.clone().step_by(tile_queries(a, s)) {
                let rows = tile_queries(a, s).min(queries.end - first);
                self.tile(&head, a, input, first..first + rows, &packed, &ahead);
                for i in 0..rows {
                    // SAFETY: by the caller's promise.
                    let (to, lse) =
                        unsafe { (to.slice(head.start(first + i), s.head_size), lse.slice(head.row(first + i), 1)) };
                    lse[0] = self.finish(i, scale, to);
                }
            }
        }
    }
}

/// The tiles with keys among `seen`, and whether a tile is the first of them.
fn overlapping<P>(packed: &[(Range<usize>, P)], seen: Range<usize>) -> impl Iterator<Item = (Range<usize>, &P, bool)> {
    let tiles = packed.iter().filter(move |(keys, _)| keys.start < seen.end && seen.start < keys.end);
    let within = move |keys: &Range<usize>| keys.start..keys.end.min(seen.end);
    tiles.enumerate().map(move |(i, (keys, packed))| (within(keys), packed, i == 0))
}

impl<T: Lanes> Forward<T> {
    /// Sums over all visible keys for some queries.
    fn tile(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        queries: Range<usize>,
        packed: &[(Range<usize>, [Packed; 2])],
        ahead: &Ahead<T>,
    ) {
        let (first, rows) = (queries.start, queries.len());
        let s = &head.sizes;
        let Self { scores, p, out, largest, total } = self;
        let out = &mut out[..rows * s.head_size];
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        let seen = a.seen_by(s, head.sequence, queries.clone());
        if seen.is_empty() {
            out.fill(0.0);
        }
        let q = head.read(input.q, queries);
        for (keys, [k, v], is_first) in overlapping(packed, seen) {
            let (key, count) = (keys.start, keys.len());
            let (scores, p) = (&mut scores[..rows * count], &mut p[..rows * count]);
            multiply_packed_part(MatrixMut::new(scores, rows, count), q, k, false, Threads::One);
            for (i, (scores, p)) in scores.chunks_exact_mut(count).zip(p.chunks_exact_mut(count)).enumerate() {
                let query = first + i;
                let of_query = a.seen(s, head.sequence, query);
                let (start, visible) = lanes_of(&of_query, key, count);
                let n = whole_lanes(visible, count);
                let (p, hidden) = p.split_at_mut(n);
                hidden.fill(T::from_f32(0.0));
                if is_first {
                    ahead.prefetch(query);
                }
                if start == visible {
                    p.fill(T::from_f32(0.0));
                    continue;
                }
                let (before, p) = p.split_at_mut(start);
                before.fill(T::from_f32(0.0));
                to_scores(a, &mut scores[start..visible]);
                scores[start..of_query.start.saturating_sub(key).max(start)].fill(f32::NEG_INFINITY);
                scores[visible..n].fill(f32::NEG_INFINITY);
                let bias = input.bias.map(|bias| &head.bias_of(bias, query)[key + start..key + n]);
                let mask = input.dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                let scores = &mut scores[start..n];
                let smaller = softmax(scores, bias, mask, key + start, &mut largest[i], &mut total[i], p);
                if !is_first && smaller != 1.0 {
                    out[i * s.head_size..][..s.head_size].iter_mut().for_each(|out| *out *= smaller);
                }
            }
            let p = Matrix::new(T::operand(p), rows, count);
            multiply_packed_part(MatrixMut::new(out, rows, s.head_size), p, v, !is_first, Threads::One);
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
        self.dk.fill(0.0);
        self.dv.fill(0.0);
        let packed: Vec<(Range<usize>, [Packed; 3])> = tiles_of_keys(s, a.seen_by(s, head.sequence, queries.clone()))
            .map(|keys| {
                let (k, v) = (head.read_keys(input.k, keys.clone()), head.read_keys(input.v, keys.clone()));
                (keys, [k.t(), v.t(), k].map(|b| Packed::new(b, T::DTYPE == DType::BF16, Threads::One)))
            })
            .collect();
        for (i, head) in head.group().enumerate() {
            let offsets = s.queries + s.keys - 1;
            let dbias = dbias.as_mut().map(|dbias| &mut dbias[i * offsets..][..offsets]);
            // SAFETY: by the caller's promise.
            unsafe { self.head(&head, a, input, queries.clone(), &packed, to, dbias) };
        }
    }

    unsafe fn add_up(parts: &mut [Self], head: &Head, scale: f32, to: Output<T>) {
        let Some((sums, others)) = parts.split_first_mut() else { return };
        for other in others {
            vector::add(&mut sums.dk, &other.dk);
            vector::add(&mut sums.dv, &other.dv);
        }
        let (keys, size) = (head.sizes.keys, head.sizes.head_size);
        for key in 0..keys {
            let at = head.start_of_key(key);
            // SAFETY: by the caller's promise.
            let (dk, dv) = unsafe { (to.dk.slice(at, size), to.dv.slice(at, size)) };
            convert(&sums.dk[key * size..][..size], scale, dk);
            convert(&sums.dv[key * size..][..size], 1.0, dv);
        }
    }
}

impl<T: Lanes> Backward<T> {
    /// One of the heads: writes dq, and adds to dk and dv.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of this head of dq.
    #[allow(clippy::too_many_arguments)]
    unsafe fn head(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Input<T>,
        queries: Range<usize>,
        packed: &[(Range<usize>, [Packed; 3])],
        to: Output<T>,
        mut dbias: Option<&mut [f32]>,
    ) {
        let s = &head.sizes;
        let (tile, size) = (tile_queries(a, s), s.head_size);
        let Self { scores, dp, p, ds, delta, dbias: nobody, dq, dk, dv } = self;
        let ahead = Ahead::backward(head, input, queries.clone(), to);
        for first in queries.clone().step_by(tile) {
            let rows = tile.min(queries.end - first);
            let (q, dout) = (head.read(input.q, first..first + rows), head.read(input.dout, first..first + rows));
            for (i, delta) in delta[..rows].iter_mut().enumerate() {
                let at = head.start(first + i);
                *delta = dot(&input.out[at..at + size], &input.dout[at..at + size]);
            }
            let dq = &mut dq[..rows * size];
            dq.fill(0.0);
            let seen = a.seen_by(s, head.sequence, first..first + rows);
            for (keys, [k_t, v_t, k], is_first) in overlapping(packed, seen) {
                let (key, count) = (keys.start, keys.len());
                let cells = rows * count;
                let (scores, dp) = (&mut scores[..cells], &mut dp[..cells]);
                let (p, ds) = (&mut p[..cells], &mut ds[..cells]);
                multiply_packed_part(MatrixMut::new(scores, rows, count), q, k_t, false, Threads::One);
                multiply_packed_part(MatrixMut::new(dp, rows, count), dout, v_t, false, Threads::One);
                for (i, &delta) in delta[..rows].iter().enumerate() {
                    let query = first + i;
                    let of_query = a.seen(s, head.sequence, query);
                    let (start, visible) = lanes_of(&of_query, key, count);
                    let n = if start < visible { whole_lanes(visible, count) } else { start };
                    if is_first {
                        ahead.prefetch(query);
                    }
                    let row = i * count;
                    for hidden in [row..row + start, row + n..row + count] {
                        p[hidden.clone()].fill(T::from_f32(0.0));
                        ds[hidden].fill(T::from_f32(0.0));
                    }
                    let (range, hidden) = (row + start..row + n, of_query.start.saturating_sub(key).min(visible));
                    to_scores(a, &mut scores[row + start..row + visible]);
                    for hidden in [row + start..row + hidden.max(start), row + visible..row + n] {
                        scores[hidden.clone()].fill(f32::NEG_INFINITY);
                        dp[hidden].fill(0.0);
                    }
                    let bias = input.bias.map(|bias| &head.bias_of(bias, query)[key + start..key + n]);
                    let mask = input.dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                    let numbers = Row { key: key + start, mask, bias, lse: input.lse[head.row(query)], delta };
                    let dbias = match &mut dbias {
                        Some(dbias) => &mut dbias[s.queries - 1 - query + key + start..][..n - start],
                        None => &mut nobody[..n - start],
                    };
                    let (p, of_ds) = (&mut p[range.clone()], &mut ds[range.clone()]);
                    softmax_backward(&scores[range.clone()], &dp[range], numbers, p, of_ds, dbias);
                    let seen = row + hidden.max(start)..row + visible;
                    through_cap(a, &scores[seen.clone()], &mut ds[seen]);
                }
                let (p, ds) = (Matrix::new(T::operand(p), rows, count), Matrix::new(T::operand(ds), rows, count));
                let sums = key * size..(key + count) * size;
                multiply(MatrixMut::new(&mut dv[sums.clone()], count, size), p.t(), dout, true, Threads::One);
                multiply(MatrixMut::new(&mut dk[sums], count, size), ds.t(), q, true, Threads::One);
                multiply_packed_part(MatrixMut::new(dq, rows, size), ds, k, !is_first, Threads::One);
            }
            for (i, dq) in dq.chunks_exact(size).enumerate() {
                // SAFETY: by the caller's promise.
                convert(dq, a.scale as f32, unsafe { to.dq.slice(head.start(first + i), size) });
            }
        }
    }
}
