//! Backward: some queries of a head, group by group, and each group in strips of 32.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::rows::{self, Unit};
use super::{
    CELL, CELLS, F32, GROUP, KEYS, Packed, Part, SCORES, STRIP, bias_elements, blocks, mask_of, pack_across, scores,
    visible,
};
use crate::matmul::tiles::{BLOCK, Cells, Left};
use crate::ops::attention::ahead::Ahead;
use crate::ops::attention::rows::{convert, dot};
use crate::ops::attention::task::{self, Head, Input, Output};
use crate::ops::attention::{Attention, Sizes};
use crate::storage::scratch;
use crate::vector;

/// The buffers of a part of a head in the backward.
pub(crate) struct Backward<U> {
    packed: Packed,
    values: Cells,        // panels of vᵀ: 32 keys each, K deep
    q: Cells,             // (GROUP, K): strips as left operands
    dout: Cells,          // the same
    q_t: Cells,           // (K, GROUP): 32 rows of qᵀ at a time as left operands
    dout_t: Cells,        // the same
    scores: Vec<f32>,     // (32, SCORES)
    dp: Vec<f32>,         // (32, SCORES): gradient of the probabilities
    p: Cells,             // (GROUP, KEYS) in panels of pairs of queries: probabilities after dropout
    ds: Cells,            // the same: gradient of the scores
    ds_rows: Cells,       // (32, CELLS)
    delta: Vec<f32>,      // (GROUP): sum of out * dout
    dbias: [Vec<f32>; 2], // (T+S-1), then room: of even and odd queries
    dq: Vec<f32>,         // (GROUP, K)
    dk: Vec<f32>,         // (K, stride of sums)
    dv: Vec<f32>,         // the same
    unit: PhantomData<fn() -> U>,
}

/// Cells of probabilities, and of gradients of scores, of a group.
const PAIRS: usize = KEYS / BLOCK * rows::panel(GROUP);

/// From one row of the sums of dk and dv to the next.
fn stride_of_sums(s: &Sizes) -> usize {
    blocks(s.keys) + 16
}

/// Bytes of these buffers.
pub(crate) fn backward_bytes(s: &Sizes) -> usize {
    let (group, sums) = (GROUP * s.head_size, s.head_size * stride_of_sums(s));
    let cells = blocks(s.keys) * s.head_size + 4 * group + 2 * PAIRS + STRIP * CELLS;
    Packed::bytes(s) + CELL * cells + F32 * (2 * STRIP * SCORES + GROUP + 2 * bias_elements(s) + group + 2 * sums)
}

impl<U: Unit> task::Backward<bf16> for Backward<U> {
    fn queries(_: &Attention, _: &Sizes) -> usize {
        GROUP
    }

    fn new(_: &Attention, s: &Sizes) -> Self {
        let (group, sums) = (GROUP * s.head_size, s.head_size * stride_of_sums(s));
        Self {
            packed: Packed::new(s),
            values: Cells::new(blocks(s.keys) * s.head_size),
            q: Cells::new(group),
            dout: Cells::new(group),
            q_t: Cells::new(group),
            dout_t: Cells::new(group),
            scores: scratch(STRIP * SCORES),
            dp: scratch(STRIP * SCORES),
            p: Cells::new(PAIRS),
            ds: Cells::new(PAIRS),
            ds_rows: Cells::new(STRIP * CELLS),
            delta: scratch(GROUP),
            dbias: [(); 2].map(|()| scratch(bias_elements(s))),
            dq: scratch(group),
            dk: scratch(sums),
            dv: scratch(sums),
            unit: PhantomData,
        }
    }

    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Input<bf16>,
        queries: Range<usize>,
        to: Output<bf16>,
        mut dbias: Option<&mut [f32]>,
    ) {
        // SAFETY: `apply_to` checked for the instructions.
        let tiles = unsafe { U::enter() };
        self.dk.fill(0.0);
        self.dv.fill(0.0);
        let s = &head.sizes;
        if queries.is_empty() {
            return;
        }
        let keys = Packed::range(a.seen_by(s, head.sequence, queries.clone()));
        let (k, v) = (head.read_keys(input.k, keys.clone()), head.read_keys(input.v, keys.clone()));
        self.packed.pack(&tiles, &keys, k, k, s.head_size);
        pack_across(&tiles, v, (keys.len(), s.head_size), &mut self.values);
        for (i, head) in head.group().enumerate() {
            self.packed.set_bias(&head, input.bias);
            let offsets = s.queries + s.keys - 1;
            let dbias = dbias.as_mut().map(|dbias| &mut dbias[i * offsets..][..offsets]);
            // SAFETY: by the caller's promise.
            unsafe { self.head(&tiles, &head, a, input, queries.clone(), to, dbias) };
        }
    }

    unsafe fn add_up(parts: &mut [Self], head: &Head, scale: f32, to: Output<bf16>) {
        let Some((sums, others)) = parts.split_first_mut() else { return };
        for other in others {
            vector::add(&mut sums.dk, &other.dk);
            vector::add(&mut sums.dv, &other.dv);
        }
        let (s, stride) = (&head.sizes, stride_of_sums(&head.sizes));
        if scale != 1.0 {
            sums.dk.iter_mut().for_each(|dk| *dk *= scale);
        }
        for (sums, to) in [(&sums.dk, to.dk), (&sums.dv, to.dv)] {
            for key in (0..s.keys).step_by(16) {
                let rows = 16.min(s.keys - key);
                for channel in (0..s.head_size).step_by(16) {
                    U::turn(&sums[channel * stride + key..], stride, rows, |i| {
                        // SAFETY: by the caller's promise.
                        unsafe { to.slice(head.start_of_key(key + i) + channel, 16) }
                    });
                }
            }
        }
    }
}

impl<U: Unit> Backward<U> {
    /// One of the heads: writes dq, and adds to dk and dv.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of this head of dq.
    #[allow(clippy::too_many_arguments)]
    unsafe fn head(
        &mut self,
        tiles: &U,
        head: &Head,
        a: &Attention,
        input: &Input<bf16>,
        queries: Range<usize>,
        to: Output<bf16>,
        dbias: Option<&mut [f32]>,
    ) {
        let s = &head.sizes;
        self.dbias.iter_mut().for_each(|dbias| dbias.fill(0.0));
        let ahead = Ahead::backward(head, input, queries.clone(), to);
        for first in queries.clone().step_by(GROUP) {
            let group = Part::new(&queries, first, GROUP, head, a);
            self.prepare(tiles, head, input, &group);
            for (key, is_first) in group.tiles(self.packed.base) {
                for strip in (0..group.rows).step_by(STRIP) {
                    self.strip(tiles, head, a, input, (&group, strip), (key, is_first), dbias.is_some(), &ahead);
                }
                self.sums(tiles, s, &group, key);
            }
            for (i, sums) in self.dq.chunks_exact(s.head_size).enumerate().take(group.rows) {
                // SAFETY: by the caller's promise.
                convert(sums, a.scale as f32, unsafe { to.dq.slice(head.start(first + i), s.head_size) });
            }
        }
        if let Some(dbias) = dbias {
            for half in &self.dbias {
                vector::add(dbias, &half[..dbias.len()]);
            }
        }
    }

    /// Packs the operands that belong to the queries of a group, and clears their dq if they see no key.
    fn prepare(&mut self, tiles: &U, head: &Head, input: &Input<bf16>, group: &Part) {
        let (s, rows) = (&head.sizes, group.rows);
        let size = s.head_size;
        let deep = blocks(rows);
        let queries = group.first..group.first + rows;
        let (q, dout) = (head.read(input.q, queries.clone()), head.read(input.dout, queries));
        for (x, straight, turned) in [(q, &mut self.q, &mut self.q_t), (dout, &mut self.dout, &mut self.dout_t)] {
            for (strip, cells) in straight.all()[..deep * size].chunks_exact_mut(STRIP * size).enumerate() {
                tiles.pack_left(x, strip * STRIP..rows.min((strip + 1) * STRIP), 0..size, cells);
            }
            for (block, cells) in turned.all()[..size * deep].chunks_exact_mut(BLOCK * deep).enumerate() {
                tiles.pack_left(x.t(), block * BLOCK..(block + 1) * BLOCK, 0..rows, cells);
            }
        }
        for (i, delta) in self.delta[..rows].iter_mut().enumerate() {
            let at = head.start(group.first + i);
            *delta = dot(&input.out[at..at + size], &input.dout[at..at + size]);
        }
        if group.seen.is_empty() {
            self.dq.fill(0.0);
        }
    }

    /// Computes scores and their gradients of a strip of a group with the keys of the tile at `key`, and adds to dq.
    #[allow(clippy::too_many_arguments)]
    fn strip(
        &mut self,
        tiles: &U,
        head: &Head,
        a: &Attention,
        input: &Input<bf16>,
        (group, strip): (&Part, usize),
        (key, is_first): (usize, bool),
        wants_dbias: bool,
        ahead: &Ahead<bf16>,
    ) {
        let s = &head.sizes;
        let size = s.head_size;
        let (first, rows) = (group.first + strip, STRIP.min(group.rows - strip));
        let of_strip = Part::new(&(first..first + rows), first, rows, head, a);
        let (count, deep) = (blocks(of_strip.count(key)), blocks(group.rows));
        let of_group = blocks(group.count(key));
        let strip_cells = strip * size..(strip + STRIP) * size;
        // SAFETY: `run` and `prepare` packed them.
        unsafe {
            let values = self.values.read()[(key - self.packed.base) * size..].as_ptr();
            scores(
                tiles,
                &self.q.read()[strip_cells.clone()],
                self.packed.key(key, size),
                count,
                size,
                &mut self.scores,
            );
            scores(tiles, &self.dout.read()[strip_cells], values, count, size, &mut self.dp);
        }
        for i in 0..rows {
            let (start, _) = visible(head, a, first + i, key);
            self.scores[i * SCORES..][..start].fill(f32::NEG_INFINITY);
        }
        let [even, odd] = &mut self.dbias;
        for i in (0..STRIP).step_by(2) {
            let row = |i: usize| {
                let query = (first + i).min(first + rows - 1);
                let at = i * SCORES..i * SCORES + count;
                rows::Gradients {
                    scores: rows::Scores {
                        scores: &self.scores[at.clone()],
                        factor: std::f32::consts::LOG2_E * a.scale as f32,
                        bias: &self.packed.bias_of(s, query, key)[..count],
                        visible: if i < rows { visible(head, a, query, key).1 } else { 0 },
                        key,
                        mask: mask_of(head, input.dropout, query),
                    },
                    dp: &self.dp[at],
                    lse: input.lse[head.row(query)] * std::f32::consts::LOG2_E,
                    delta: self.delta[query - group.first],
                }
            };
            let offset = |i: usize| s.queries - 1 - (first + i).min(first + rows - 1) + key;
            let dbias = wants_dbias.then(|| (&mut even[offset(i)..], &mut odd[offset(i + 1)..]));
            if is_first {
                ahead.prefetch(first + i);
                ahead.prefetch(first + i + 1);
            }
            let at = rows::place(strip + i, deep);
            let to = rows::Pairs {
                p: &mut self.p.all()[at..],
                ds: &mut self.ds.all()[at..],
                panel: rows::panel(deep),
                count: of_group,
                rows: &mut self.ds_rows.all()[i * CELLS..][..2 * CELLS],
                apart: CELLS,
            };
            U::gradients([row(i), row(i + 1)], dbias, to);
        }
        let dq = &mut self.dq[strip * size..][..STRIP * size];
        if count == 0 {
            if is_first {
                dq.fill(0.0);
            }
            return;
        }
        for panel in 0..size / BLOCK {
            let (ds, k) = (Left::Rows(self.ds_rows.read().as_ptr(), CELLS), self.packed.other(key, panel, size));
            // SAFETY: rows and panels as deep as the visible keys, filled up; 32 columns of the strip's dq.
            unsafe { tiles.multiply(ds, k, count, dq[panel * BLOCK..].as_mut_ptr(), size, !is_first) };
        }
    }

    /// Adds a group's part to dk and dv, for the tile of keys at `key`.
    fn sums(&mut self, tiles: &U, s: &Sizes, group: &Part, key: usize) {
        let (deep, stride) = (blocks(group.rows), stride_of_sums(s));
        for (left, right, sums) in [(&self.dout_t, &self.p, &mut self.dv), (&self.q_t, &self.ds, &mut self.dk)] {
            for panel in 0..group.count(key).div_ceil(BLOCK) {
                let b = right.read()[panel * rows::panel(deep)..].as_ptr();
                for block in 0..s.head_size / BLOCK {
                    let a = Left::Packed(left.read()[block * BLOCK * deep..].as_ptr());
                    let c = sums[block * BLOCK * stride + key + panel * BLOCK..].as_mut_ptr();
                    // SAFETY: packed by `prepare` and written by `strip` as deep; a block inside of the sums.
                    unsafe { tiles.multiply(a, b, deep, c, stride, true) };
                }
            }
        }
    }
}
