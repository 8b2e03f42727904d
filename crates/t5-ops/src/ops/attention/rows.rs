//! Operations of attention on a row of scores, sixteen at a time.

use crate::random_mask::RowMask;
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};
use std::ops::Range;

use super::Attention;
use crate::ops::soft_cap;
use crate::vector;

/// Inputs of the backward of a row, besides the scores.
pub(super) struct Row<'a> {
    /// The key of the first score.
    pub key: usize,
    pub mask: Option<RowMask>,
    pub bias: Option<&'a [f32]>,
    pub lse: f32,
    pub delta: f32,
}

/// The key at or before this one at which vectors of keys, and their dropout, begin.
pub(super) fn first_of_lanes(key: usize) -> usize {
    key / WIDTH * WIDTH
}

/// The part of a tile that a query sees, where the tile has `count` keys from `base` on: the first key in whole vectors, and the end. Empty
/// if it sees none of them.
pub(super) fn lanes_of(seen: &Range<usize>, base: usize, count: usize) -> (usize, usize) {
    let (start, end) = (seen.start.saturating_sub(base), seen.end.saturating_sub(base).min(count));
    if start < end { (first_of_lanes(start), end) } else { (end, end) }
}

/// Products of a query and keys become scores: their scale and cap. T5 has neither.
pub(super) fn to_scores(a: &Attention, products: &mut [f32]) {
    match a.soft_cap {
        Some(cap) => soft_cap::apply(products, a.scale as f32, cap as f32),
        None if a.scale != 1.0 => multiply(products, a.scale as f32),
        None => {}
    }
}

/// Gradients of scores become gradients of what was capped.
pub(super) fn through_cap<T: Lanes>(a: &Attention, scores: &[f32], gradients: &mut [T]) {
    if let Some(cap) = a.soft_cap {
        soft_cap::apply_slope(scores, cap as f32, gradients);
    }
}

// No closure below does arithmetic: the compiler would make functions of them that lack the instruction set.

#[inline(always)]
#[allow(clippy::manual_map, reason = "`map` takes a closure")]
fn keep_of<S: Simd>(s: S, mask: Option<RowMask>) -> Option<S::Keep> {
    match mask {
        None => None,
        Some(mask) => Some(s.mask(mask)),
    }
}

/// `x` with zeros where the elements from channel `first` on are dropped.
#[inline(always)]
fn kept<S: Simd>(s: S, keep: Option<S::Keep>, first: usize, x: S::F) -> S::F {
    match keep {
        None => x,
        Some(keep) => s.where_set(s.keeps(keep, first), x),
    }
}

/// The constants of the backward of a row, in every lane.
struct Numbers<S: Simd> {
    keep: Option<S::Keep>,
    scale: S::F,
    lse: S::F,
    delta: S::F,
}

impl<S: Simd> Numbers<S> {
    /// Returns p m and the gradient of the scores, which it also adds to `dbias`; see [`softmax_backward`].
    #[inline(always)]
    fn gradients(&self, s: S, first: usize, score: S::F, dp: S::F, dbias: &mut [f32; WIDTH]) -> (S::F, S::F) {
        let e = s.exp(s.sub(score, self.lse));
        let (pm, m_dp) = match self.keep {
            None => (e, dp),
            Some(keep) => {
                let kept = s.keeps(keep, first);
                (s.where_set(kept, s.mul(e, self.scale)), s.where_set(kept, s.mul(dp, self.scale)))
            }
        };
        let ds = s.mul(e, s.sub(m_dp, self.delta));
        s.store(s.add(s.load(dbias), ds), dbias);
        (pm, ds)
    }
}

simd! {
    /// Updates the statistics of a row from a tile of its scores, to which the bias is added. Writes `exp(score - largest)`, zero where
    /// dropped. Returns the factor for earlier sums.
    pub(super) fn softmax<S, T: Lanes>(
        s,
        scores: &mut [f32],
        bias: Option<&[f32]>,
        mask: Option<RowMask>,
        key: usize,
        largest: &mut f32,
        total: &mut f32,
        p: &mut [T],
    ) -> f32 {
        let n = scores.len();
        let (chunks, rest) = scores.as_chunks_mut::<WIDTH>();
        let mut top = s.splat(f32::NEG_INFINITY);
        if let Some(bias) = bias {
            let (bias, bias_rest) = bias[..n].as_chunks::<WIDTH>();
            for (score, bias) in chunks.iter_mut().zip(bias) {
                let sum = s.add(s.load(score), s.load(bias));
                s.store(sum, score);
                top = s.max(sum, top);
            }
            for (score, bias) in rest.iter_mut().zip(bias_rest) {
                *score += bias;
            }
        } else {
            for score in &*chunks {
                top = s.max(s.load(score), top);
            }
        }
        top = s.max(s.load(&padded(rest, f32::NEG_INFINITY)), top);
        let of_tile = s.largest(top);
        let both = if of_tile > *largest { of_tile } else { *largest };
        let (shift, keep) = (s.splat(both), keep_of(s, mask));
        let mut sum = s.splat(0.0);
        let (p, p_rest) = p[..n].as_chunks_mut::<WIDTH>();
        for (i, (score, p)) in chunks.iter().zip(p).enumerate() {
            let e = s.exp(s.sub(s.load(score), shift));
            sum = s.add(sum, e);
            T::store(s, kept(s, keep, key + i * WIDTH, e), p);
        }
        if !rest.is_empty() {
            let mut last = [T::from_f32(0.0); WIDTH];
            let e = s.exp(s.sub(s.load(&padded(rest, f32::NEG_INFINITY)), shift));
            sum = s.add(sum, e);
            T::store(s, kept(s, keep, key + n - rest.len(), e), &mut last);
            p_rest.copy_from_slice(&last[..rest.len()]);
        }
        let smaller = vector::exp(*largest - both);
        *total = *total * smaller + s.sum(sum);
        *largest = both;
        smaller
    }

    /// With p = exp(score + bias - lse), m the dropout mask, dp the gradient of the masked probabilities: writes
    /// p m, and the gradient of the scores p (m dp - delta), which it also adds to `dbias`.
    pub(super) fn softmax_backward<S, T: Lanes>(
        s,
        scores: &[f32],
        dp: &[f32],
        row: Row<'_>,
        p: &mut [T],
        ds: &mut [T],
        dbias: &mut [f32],
    ) {
        let n = scores.len();
        let numbers = Numbers {
            keep: keep_of(s, row.mask),
            scale: s.splat(row.mask.map_or(1.0, |mask| mask.scale())),
            lse: s.splat(row.lse),
            delta: s.splat(row.delta),
        };
        let ((scores, scores_rest), (dp, dp_rest)) = (scores.as_chunks::<WIDTH>(), dp[..n].as_chunks::<WIDTH>());
        let (p, p_rest) = p[..n].as_chunks_mut::<WIDTH>();
        let (ds, ds_rest) = ds[..n].as_chunks_mut::<WIDTH>();
        let (dbias, dbias_rest) = dbias[..n].as_chunks_mut::<WIDTH>();
        let bias = row.bias.map(|bias| bias[..n].as_chunks::<WIDTH>());
        let chunks = scores.iter().zip(dp).zip(p).zip(ds).zip(dbias).enumerate();
        for (i, ((((score, dp), p), ds), dbias)) in chunks {
            let score = match bias {
                None => s.load(score),
                Some((bias, _)) => s.add(s.load(score), s.load(&bias[i])),
            };
            let (of_p, of_ds) = numbers.gradients(s, row.key + i * WIDTH, score, s.load(dp), dbias);
            T::store(s, of_p, p);
            T::store(s, of_ds, ds);
        }
        let rest = scores_rest.len();
        if rest > 0 {
            // A missing element has a probability of zero.
            let mut score = s.load(&padded(scores_rest, f32::NEG_INFINITY));
            if let Some((_, bias)) = bias {
                score = s.add(score, s.load(&padded(bias, 0.0)));
            }
            let (key, dp, mut last_dbias) = (row.key + n - rest, s.load(&padded(dp_rest, 0.0)), padded(dbias_rest, 0.0));
            let (of_p, of_ds) = numbers.gradients(s, key, score, dp, &mut last_dbias);
            let mut last = [[T::from_f32(0.0); WIDTH]; 2];
            T::store(s, of_p, &mut last[0]);
            T::store(s, of_ds, &mut last[1]);
            p_rest.copy_from_slice(&last[0][..rest]);
            ds_rest.copy_from_slice(&last[1][..rest]);
            dbias_rest.copy_from_slice(&last_dbias[..rest]);
        }
    }

    fn multiply<S>(s, x: &mut [f32], factor: f32) {
        let (factors, (chunks, rest)) = (s.splat(factor), x.as_chunks_mut::<WIDTH>());
        for x in chunks {
            s.store(s.mul(s.load(x), factors), x);
        }
        for x in rest {
            *x *= factor;
        }
    }

    /// Writes `scale x`.
    pub(super) fn convert<S, T: Lanes>(s, x: &[f32], scale: f32, y: &mut [T]) {
        let scales = s.splat(scale);
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks_mut::<WIDTH>());
        for (x, y) in x.iter().zip(y) {
            T::store(s, s.mul(s.load(x), scales), y);
        }
        for (x, y) in x_rest.iter().zip(y_rest) {
            *y = T::from_f32(x * scale);
        }
    }

    pub(super) fn dot<S, T: Lanes>(s, x: &[T], y: &[T]) -> f32 {
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks::<WIDTH>());
        let mut sum = s.splat(0.0);
        for (x, y) in x.iter().zip(y) {
            sum = s.mul_add(T::load(s, x), T::load(s, y), sum);
        }
        let (x, y) = (padded(x_rest, T::from_f32(0.0)), padded(y_rest, T::from_f32(0.0)));
        s.sum(s.mul_add(T::load(s, &x), T::load(s, &y), sum))
    }
}
