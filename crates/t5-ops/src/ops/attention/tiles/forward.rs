//! Forward: some queries of a head, in strips of 32.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::rows::{self, Unit};
use super::{CELL, CELLS, F32, Packed, Part, QUERIES, SCORES, STRIP, blocks, mask_of, scores, visible};
use crate::matmul::tiles::{BLOCK, Cells, Left};
use crate::ops::attention::ahead::Ahead;
use crate::ops::attention::rows::convert;
use crate::ops::attention::task::{self, Head, Queries};
use crate::ops::attention::{Attention, Sizes};
use crate::parallel::Shared;
use crate::storage::scratch;

/// The buffers of a task of the forward.
pub(crate) struct Forward<U> {
    packed: Packed,
    q: Cells,         // (32, K), packed
    scores: Vec<f32>, // (32, SCORES)
    p: Cells,         // (32, CELLS): exp(score - largest), zero where dropped or hidden
    out: Vec<f32>,    // (32, K): sums of p v
    unit: PhantomData<fn() -> U>,
}

/// Bytes of these buffers.
pub(crate) fn forward_bytes(s: &Sizes) -> usize {
    let cells = STRIP * s.head_size + STRIP * CELLS;
    Packed::bytes(s) + CELL * cells + F32 * (STRIP * SCORES + STRIP * s.head_size)
}

impl<U: Unit> task::Forward<bf16> for Forward<U> {
    fn queries(_: &Attention, s: &Sizes) -> usize {
        (QUERIES / s.group()).next_multiple_of(STRIP)
    }

    fn new(_: &Attention, s: &Sizes) -> Self {
        Self {
            packed: Packed::new(s),
            q: Cells::new(STRIP * s.head_size),
            scores: scratch(STRIP * SCORES),
            p: Cells::new(STRIP * CELLS),
            out: scratch(STRIP * s.head_size),
            unit: PhantomData,
        }
    }

    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<bf16>,
        queries: Range<usize>,
        to: Shared<bf16>,
        lse: Shared<f32>,
    ) {
        // SAFETY: `apply_to` checked for the instructions.
        let tiles = unsafe { U::enter() };
        let s = &head.sizes;
        let keys = Packed::range(a.seen_by(s, head.sequence, queries.clone()));
        let (k, v) = (head.read_keys(input.k, keys.clone()), head.read_keys(input.v, keys.clone()));
        self.packed.pack(&tiles, &keys, k, v, s.head_size);
        for head in head.group() {
            self.packed.set_bias(&head, input.bias);
            // SAFETY: by the caller's promise.
            unsafe { self.head(&tiles, &head, a, input, queries.clone(), to, lse) };
        }
    }
}

impl<U: Unit> Forward<U> {
    /// One of the heads.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of this head of `out` and `lse`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn head(
        &mut self,
        tiles: &U,
        head: &Head,
        a: &Attention,
        input: &Queries<bf16>,
        queries: Range<usize>,
        to: Shared<bf16>,
        lse: Shared<f32>,
    ) {
        let s = &head.sizes;
        let scale = input.dropout.map_or(1.0, |d| d.scale() as f32);
        let ahead = Ahead::forward(head, input, queries.clone(), to);
        for first in queries.clone().step_by(STRIP) {
            let strip = Part::new(&queries, first, STRIP, head, a);
            let state = self.strip(tiles, head, a, input, &strip, &ahead);
            for (i, (largest, total)) in state.into_iter().enumerate().take(strip.rows) {
                // A query that sees no key has sums of zero.
                let factor = if total == 0.0 { 0.0 } else { scale / total };
                // SAFETY: by the caller's promise.
                let (to, lse) =
                    unsafe { (to.slice(head.start(first + i), s.head_size), lse.slice(head.row(first + i), 1)) };
                convert(&self.out[i * s.head_size..][..s.head_size], factor, to);
                lse[0] = (largest + total.log2()) * std::f32::consts::LN_2;
            }
        }
    }

    /// Sums over all visible keys for a strip. Returns for each query the largest score, times log2(e), and the sum of exponentials.
    #[allow(clippy::too_many_arguments)]
    fn strip(
        &mut self,
        tiles: &U,
        head: &Head,
        a: &Attention,
        input: &Queries<bf16>,
        strip: &Part,
        ahead: &Ahead<bf16>,
    ) -> [(f32, f32); STRIP] {
        let Self { packed, q, scores: strip_scores, p, out, .. } = self;
        let s = &head.sizes;
        let size = s.head_size;
        let mut state = [(f32::NEG_INFINITY, 0.0); STRIP];
        if strip.seen.is_empty() {
            out.fill(0.0);
        }
        let queries = strip.first..strip.first + strip.rows;
        tiles.pack_left(head.read(input.q, queries), 0..strip.rows, 0..size, q.all());
        for (key, is_first) in strip.tiles(packed.base) {
            let whole = blocks(strip.count(key));
            // SAFETY: `pack` packed them.
            unsafe { scores(tiles, q.read(), packed.key(key, size), whole, size, strip_scores) };
            for (i, state) in state.iter_mut().enumerate().take(strip.rows) {
                let query = strip.first + i;
                let (start, visible) = visible(head, a, query, key);
                strip_scores[i * SCORES..][..start].fill(f32::NEG_INFINITY);
                let row = rows::Scores {
                    scores: &strip_scores[i * SCORES..][..whole],
                    factor: std::f32::consts::LOG2_E * a.scale as f32,
                    bias: &packed.bias_of(s, query, key)[..whole],
                    visible,
                    key,
                    mask: mask_of(head, input.dropout, query),
                };
                if is_first {
                    ahead.prefetch(query);
                }
                let smaller = U::softmax(row, state, &mut p.all()[i * CELLS..][..whole]);
                if !is_first && smaller != 1.0 {
                    out[i * size..][..size].iter_mut().for_each(|out| *out *= smaller);
                }
            }
            let p = Left::Rows(p.read().as_ptr(), CELLS);
            for panel in 0..size / BLOCK {
                let b = packed.other(key, panel, size);
                // SAFETY: rows and panels as deep as the visible keys, filled up; 32 columns of `out`.
                unsafe { tiles.multiply(p, b, whole, out[panel * BLOCK..].as_mut_ptr(), size, !is_first) };
            }
        }
        state
    }
}
