//! Attention in bf16 on tile registers or with AVX512-BF16: a strip of 32 queries by at most [`KEYS`] keys at a time, so that a strip's
//! scores stay in the first-level cache from the products to the softmax and back.
//!
//! Keys and values are packed once for all queries of a task. The softmax writes operands of the next product. In the forward these are
//! probabilities as rows of a left operand (`p v`). In the backward they are gradients of scores as such rows (`ds k`), and probabilities
//! and gradients in pairs of queries, as a right-hand operand (`doutᵀ p`, `qᵀ ds`). So the sums of dk and dv are transposed until the end.
//! They take a [`GROUP`] of queries at a time, because a sum in tile registers that is 32 deep takes longer to load and store than to
//! compute.
//!
//! Otherwise the algorithm is that of [`super::vectors`].

use std::ops::Range;

use super::task::Head;
use super::{Attention, Sizes};
use crate::isa::multiplies_pairs;
use crate::matmul::Matrix;
use crate::matmul::tiles::{BLOCK, Cells, Left, TILE, Tiles};
use crate::random_mask::RowMask;

mod backward;
mod forward;
mod rows;

pub(super) use backward::{Backward, backward_bytes};
pub(super) use forward::{Forward, forward_bytes};

/// Queries of a strip.
const STRIP: usize = BLOCK;
/// Queries that a sum of dk and dv takes at a time.
pub(super) const GROUP: usize = 4 * STRIP;
/// Queries of a task of the forward: keys and values are packed once for each task.
const QUERIES: usize = 256;
/// Keys of a tile: 32 KiB of scores of a strip.
const KEYS: usize = 256;
/// Elements from one query's scores to the next's: an odd number of cache lines, because rows must not be a power of two apart.
const SCORES: usize = KEYS + 16;
/// The same for cells.
const CELLS: usize = KEYS + BLOCK;
/// For fewer queries packing the keys is not worth it.
const FEWEST_QUERIES: usize = 8;

/// Whether attention of these sizes runs here, where activations are bf16.
pub(super) fn apply_to(s: &Sizes) -> bool {
    multiplies_pairs() && fit(s)
}

/// Whether strips of tiles have these sizes. Capped scores are left to vectors.
pub(super) fn fit(s: &Sizes) -> bool {
    s.head_size.is_multiple_of(BLOCK) && s.queries >= FEWEST_QUERIES && !s.is_capped
}

/// `n` rounded up to whole blocks, which are read as a whole.
fn blocks(n: usize) -> usize {
    n.next_multiple_of(BLOCK)
}

/// The queries of a strip or a group, and the keys that they see.
struct Part {
    first: usize,
    rows: usize,
    seen: Range<usize>,
}

impl Part {
    fn new(queries: &Range<usize>, first: usize, most: usize, head: &Head, a: &Attention) -> Self {
        let rows = most.min(queries.end - first);
        Self { first, rows, seen: a.seen_by(&head.sizes, head.sequence, first..first + rows) }
    }

    /// The tiles of packed keys, which begin with key `base`, that some of the queries see: the first key of each, and whether the tile is
    /// the first.
    fn tiles(&self, base: usize) -> impl Iterator<Item = (usize, bool)> + use<> {
        let Range { start, end } = self.seen;
        let first = if start < end { base + (start - base) / KEYS * KEYS } else { end };
        (first..end).step_by(KEYS).map(move |key| (key, key == first))
    }

    /// The keys of the tile at `key` up to the last one that a query sees.
    fn count(&self, key: usize) -> usize {
        if self.seen.start < key + KEYS { self.seen.end.saturating_sub(key).min(KEYS) } else { 0 }
    }
}

/// The first and the end of the keys of the tile at `key` that query `i` sees; both are zero if it sees none.
fn visible(head: &Head, a: &Attention, i: usize, key: usize) -> (usize, usize) {
    let seen = a.seen(&head.sizes, head.sequence, i);
    let (start, end) = (seen.start.saturating_sub(key), seen.end.saturating_sub(key).min(KEYS));
    if start < end { (start, end) } else { (0, 0) }
}

/// Bytes of a cell, and of a sum.
const CELL: usize = size_of::<u16>();
const F32: usize = size_of::<f32>();

/// Elements of a bias or of its gradient, with room for whole blocks.
fn bias_elements(s: &Sizes) -> usize {
    s.queries + blocks(s.keys) + BLOCK
}

/// State of a head that both directions keep.
struct Packed {
    base: usize,    // the first packed key, a multiple of 32
    end: usize,     // the end of the packed keys
    keys: Cells,    // panels of kᵀ: 32 keys each, K deep
    others: Cells,  // forward: panels of v, backward: of k: for each tile of keys, K / 32 panels as deep as it
    bias: Vec<f32>, // (T+S-1), times log2(e), then zeros
}

impl Packed {
    fn new(s: &Sizes) -> Self {
        let cells = blocks(s.keys) * s.head_size;
        let bias = vec![0.0; bias_elements(s)];
        Self { base: 0, end: 0, keys: Cells::new(cells), others: Cells::new(cells), bias }
    }

    /// Bytes of such a state.
    fn bytes(s: &Sizes) -> usize {
        2 * CELL * blocks(s.keys) * s.head_size + F32 * bias_elements(s)
    }

    /// The keys to pack, where queries see these.
    fn range(seen: Range<usize>) -> Range<usize> {
        seen.start / BLOCK * BLOCK..seen.end
    }

    /// Packs `k`, these keys, and the same number of rows of `others`.
    fn pack(&mut self, tiles: &impl Tiles, keys: &Range<usize>, k: Matrix, others: Matrix, size: usize) {
        (self.base, self.end) = (keys.start, keys.end);
        let seen = keys.len();
        pack_across(tiles, k, (seen, size), &mut self.keys);
        for key in (0..seen).step_by(KEYS) {
            let count = KEYS.min(seen - key);
            let cells = &mut self.others.all()[key * size..][..blocks(count) * size];
            for (panel, cells) in cells.chunks_exact_mut(blocks(count) * BLOCK).enumerate() {
                let columns = panel * BLOCK..(panel + 1) * BLOCK;
                tiles.pack_right(others, columns, key..key + count, cells);
            }
        }
    }

    fn set_bias(&mut self, head: &Head, bias: Option<&[f32]>) {
        if let Some(bias) = bias {
            let s = &head.sizes;
            let offsets = s.queries + s.keys - 1;
            let bias = &bias[head.head * offsets..][..offsets];
            self.bias.iter_mut().zip(bias).for_each(|(to, bias)| *to = bias * std::f32::consts::LOG2_E);
        }
    }

    /// The panel that begins with key `key`.
    fn key(&self, key: usize, size: usize) -> *const u16 {
        self.keys.read()[(key - self.base) * size..].as_ptr()
    }

    /// Panel `panel` of the tile of keys that begins with `key`.
    fn other(&self, key: usize, panel: usize, size: usize) -> *const u16 {
        self.others.read()[(key - self.base) * size + panel * BLOCK * blocks(KEYS.min(self.end - key))..].as_ptr()
    }

    /// The bias of the keys from `key` on for query `i`.
    fn bias_of(&self, s: &Sizes, i: usize, key: usize) -> &[f32] {
        &self.bias[s.queries - 1 - i + key..]
    }
}

/// Packs the `seen` rows of `x`, `size` long, as columns of a right-hand operand that is `size` deep: panels of 32.
fn pack_across(tiles: &impl Tiles, x: Matrix, (seen, size): (usize, usize), cells: &mut Cells) {
    for (panel, cells) in cells.all().chunks_exact_mut(BLOCK * size).take(seen.div_ceil(BLOCK)).enumerate() {
        tiles.pack_right(x.t(), panel * BLOCK..seen.min((panel + 1) * BLOCK), 0..size, cells);
    }
}

/// The scores of a strip with the keys of the panels: `c` (32, [`SCORES`]).
///
/// # Safety
///
/// `a` is a packed left operand that is `size` deep, and there are panels for `keys` keys at `panels`.
unsafe fn scores(tiles: &impl Tiles, a: &[u16], panels: *const u16, keys: usize, size: usize, c: &mut [f32]) {
    assert!(a.len() >= STRIP * size && c.len() >= STRIP * SCORES && keys <= KEYS);
    for key in (0..keys).step_by(BLOCK) {
        let b = panels.wrapping_add(key * size);
        // SAFETY: by the caller's promise, and the assertion.
        unsafe { tiles.multiply(Left::Packed(a.as_ptr()), b, size, c[key..].as_mut_ptr(), SCORES, false) };
    }
}

fn mask_of(head: &Head, dropout: Option<&crate::Dropout>, query: usize) -> Option<RowMask> {
    dropout.map(|d| d.query_mask(head.sequence, head.head, query))
}
