//! Operations of attention on rows of scores between products of tiles. Exponentials are powers of two: the bias comes multiplied by
//! log2(e), and so does the factor of scores.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod software;

use half::bf16;

use super::{BLOCK, TILE};
use crate::matmul::tiles::Tiles;
use crate::random_mask::RowMask;

/// A row of scores of one query with the keys of a tile, filled up to whole blocks.
#[derive(Clone, Copy)]
pub(crate) struct Scores<'a> {
    pub scores: &'a [f32],
    /// The factor of the scores: their scale, times log2(e).
    pub factor: f32,
    /// Times log2(e).
    pub bias: &'a [f32],
    /// The end of the visible keys. Before them, scores of hidden keys are minus infinity.
    pub visible: usize,
    /// The key of the first score.
    pub key: usize,
    pub mask: Option<RowMask>,
}

/// Further inputs of the backward of a row.
pub(crate) struct Gradients<'a> {
    pub scores: Scores<'a>,
    /// Gradient of the masked probabilities.
    pub dp: &'a [f32],
    /// Log-sum-exp times log2(e).
    pub lse: f32,
    pub delta: f32,
}

/// The destinations of two rows of the backward.
pub(crate) struct Pairs<'a> {
    /// The line of the first panel of probabilities: see [`place`].
    pub p: &'a mut [u16],
    pub ds: &'a mut [u16],
    /// Cells from one panel to the next.
    pub panel: usize,
    /// The number of keys to write; the rest is zero.
    pub count: usize,
    /// Gradients of scores as two rows, `apart` cells apart.
    pub rows: &'a mut [u16],
    pub apart: usize,
}

/// Cells from one panel of 32 keys to the next, for a right-hand operand of `deep` queries: a line more than the panel has.
pub(super) const fn panel(deep: usize) -> usize {
    BLOCK * deep + BLOCK
}

/// The place of the line of queries `row` and `row + 1` in a panel.
pub(super) fn place(row: usize, deep: usize) -> usize {
    debug_assert!(row < deep && row.is_multiple_of(2));
    row / BLOCK * 2 * TILE + row % BLOCK / 2 * BLOCK
}

/// Tiles, and the operations of attention on rows of scores between two products of tiles.
pub(crate) trait Unit: Tiles {
    /// Updates `state`, the largest score times log2(e) and the sum of exponentials so far, from a row of scores. Writes exp(score -
    /// largest), zero where dropped or hidden. Returns the factor for earlier sums.
    fn softmax(row: Scores, state: &mut (f32, f32), p: &mut [u16]) -> f32;

    /// For two queries, with p = exp(score + bias - lse), m the dropout mask and dp the gradient of the masked probabilities: writes p m
    /// and the gradient of the scores, p (m dp - delta), and adds that gradient to `dbias`.
    fn gradients(rows: [Gradients; 2], dbias: Option<(&mut [f32], &mut [f32])>, to: Pairs);

    /// Writes the first `count` rows of the transpose of sixteen rows of sixteen numbers, `stride` apart, each to the place that `to`
    /// returns.
    fn turn<'a>(x: &[f32], stride: usize, count: usize, to: impl Fn(usize) -> &'a mut [bf16]);
}
