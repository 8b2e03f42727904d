//! Attention of a few queries, as in a step of generation: keys and values are read in place, and nothing is packed.
//!
//! A key that meets four queries is multiplied four times. Packing the key for a kernel takes longer than that.

use std::ops::Range;

use super::ahead::Ahead;
use super::rows::{convert, first_of_lanes, lanes_of, softmax, to_scores};
use super::task::{self, Head, Queries};
use super::{Attention, Sizes};
use crate::matmul::{MatrixMut, Threads, multiply_as_a};
use crate::parallel::Shared;
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};
use crate::storage::scratch;

/// The most queries.
const MAX_QUERIES: usize = 8;
/// The most keys: all scores of a task exist at once.
const MAX_KEYS: usize = 4096;

/// Whether attention of these sizes runs in this module.
pub(super) fn applies_to(s: &Sizes) -> bool {
    s.queries <= MAX_QUERIES && s.keys <= MAX_KEYS
}

/// The buffers of a task.
pub(super) struct Forward<T> {
    scores: Vec<f32>, // (T, S)
    p: Vec<T>,        // (T, S): exp(score - largest), zero where dropped or hidden
    sums: Vec<f32>,   // (T, K): sums of p v
}

impl<T: Lanes> task::Forward<T> for Forward<T> {
    fn queries(_: &Attention, _: &Sizes) -> usize {
        MAX_QUERIES
    }

    fn new(_: &Attention, s: &Sizes) -> Self {
        let scores = s.queries * s.keys;
        Self { scores: scratch(scores), p: scratch(scores), sums: scratch(s.queries * s.head_size) }
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
        for head in head.group() {
            // SAFETY: by the caller's promise.
            unsafe { self.head(&head, a, input, queries.clone(), to, lse) };
        }
    }
}

impl<T: Lanes> Forward<T> {
    /// One of the heads.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of this head of `out` and `lse`.
    unsafe fn head(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        queries: Range<usize>,
        to: Shared<T>,
        lse: Shared<f32>,
    ) {
        let s = &head.sizes;
        let all = a.seen_by(s, head.sequence, queries.clone());
        let (rows, base) = (queries.len(), first_of_lanes(all.start));
        let seen = all.end - base;
        let ahead = Ahead::forward(head, input, queries.clone(), to);
        let Self { scores, p, sums } = self;
        let (scores, p) = (&mut scores[..rows * seen], &mut p[..rows * seen]);
        let q = head.read(input.q, queries.clone());
        if seen > 0 {
            let k = head.read_keys(input.k, base..all.end);
            multiply_as_a(MatrixMut::new(scores, rows, seen), q, k.t(), false, Threads::One);
        }
        let mut totals = [0.0; MAX_QUERIES];
        for (i, query) in queries.clone().enumerate() {
            ahead.prefetch(query);
            let of_query = a.seen(s, head.sequence, query);
            let (first, visible) = lanes_of(&of_query, base, seen);
            let p = &mut p[i * seen..][..seen];
            p[..first].fill(T::from_f32(0.0));
            p[visible..].fill(T::from_f32(0.0));
            let mut largest = f32::NEG_INFINITY;
            if !of_query.is_empty() {
                let scores = &mut scores[i * seen..][first..visible];
                to_scores(a, scores);
                scores[..of_query.start - base - first].fill(f32::NEG_INFINITY);
                let bias = input.bias.map(|bias| &head.bias_of(bias, query)[base + first..of_query.end]);
                let mask = input.dropout.map(|d| d.query_mask(head.sequence, head.head, query));
                softmax(scores, bias, mask, base + first, &mut largest, &mut totals[i], &mut p[first..visible]);
            }
            // SAFETY: by the caller's promise.
            unsafe { lse.slice(head.row(query), 1)[0] = largest + totals[i].ln() };
        }
        let sums = &mut sums[..rows * s.head_size];
        if seen > 0 {
            let values = &input.v[head.start_of_key(base)..];
            add_up(p, values, (seen, s.key_heads * s.head_size), sums, s.head_size);
        } else {
            sums.fill(0.0);
        }
        let scale = input.dropout.map_or(1.0, |d| d.scale() as f32);
        for ((query, sums), total) in queries.zip(sums.chunks_exact(s.head_size)).zip(totals) {
            // SAFETY: by the caller's promise.
            let to = unsafe { to.slice(head.start(query), s.head_size) };
            // A query that sees no key has sums of zero.
            convert(sums, if total == 0.0 { 0.0 } else { scale / total }, to);
        }
    }
}

simd! {
    /// Sums `keys` values (K), which begin `stride` elements apart, times the probabilities of each query: p (T, S), sums (T, K).
    fn add_up<S, T: Lanes>(s, p: &[T], values: &[T], keys_and_stride: (usize, usize), sums: &mut [f32], size: usize) {
        let keys = keys_and_stride.0;
        let mut left = (p, sums);
        while !left.0.is_empty() {
            let rows = match left.0.len() / keys {
                1 => 1,
                2 | 3 => 2,
                _ => 4,
            };
            let ((p, next_p), (sums, next_sums)) = (left.0.split_at(rows * keys), left.1.split_at_mut(rows * size));
            match rows {
                1 => add_up_rows::<S, T, 1, 4>(s, p, values, keys_and_stride, sums, size),
                2 => add_up_rows::<S, T, 2, 2>(s, p, values, keys_and_stride, sums, size),
                _ => add_up_rows::<S, T, 4, 1>(s, p, values, keys_and_stride, sums, size),
            }
            left = (next_p, next_sums);
        }
    }
}

/// [`add_up`] for `R` queries, `C` vectors of the values' columns at a time: four sums, enough to hide the latency of an addition.
#[inline(always)]
fn add_up_rows<S: Simd, T: Lanes, const R: usize, const C: usize>(
    s: S,
    p: &[T],
    values: &[T],
    (keys, stride): (usize, usize),
    sums: &mut [f32],
    size: usize,
) {
    let p: [&[T]; R] = std::array::from_fn(|i| &p[i * keys..][..keys]);
    let whole = size / WIDTH / C * C;
    for first in (0..whole).step_by(C) {
        let mut lanes = [[s.splat(0.0); C]; R];
        for key in 0..keys {
            let (values, _) = values[key * stride + first * WIDTH..][..C * WIDTH].as_chunks::<WIDTH>();
            for j in 0..C {
                let value = T::load(s, &values[j]);
                for i in 0..R {
                    lanes[i][j] = s.mul_add(s.splat(p[i][key].to_f32()), value, lanes[i][j]);
                }
            }
        }
        for i in 0..R {
            let (to, _) = sums[i * size + first * WIDTH..][..C * WIDTH].as_chunks_mut::<WIDTH>();
            for j in 0..C {
                s.store(lanes[i][j], &mut to[j]);
            }
        }
    }
    for first in (whole * WIDTH..size).step_by(WIDTH) {
        let width = WIDTH.min(size - first);
        let mut lanes = [s.splat(0.0); R];
        for key in 0..keys {
            let value = T::load(s, &padded(&values[key * stride + first..][..width], T::from_f32(0.0)));
            for i in 0..R {
                lanes[i] = s.mul_add(s.splat(p[i][key].to_f32()), value, lanes[i]);
            }
        }
        for i in 0..R {
            let mut last = [0.0; WIDTH];
            s.store(lanes[i], &mut last);
            sums[i * size + first..][..width].copy_from_slice(&last[..width]);
        }
    }
}
