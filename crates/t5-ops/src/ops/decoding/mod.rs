//! Beside the layers, generation needs the scores of the next token where they can be looked at, and a cache whose rows can be
//! copied over each other.

pub(crate) mod cpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, bail};

use crate::dispatch::Path;

/// The logits (R, V) as f32, row after row; normalised: their log-softmax.
///
/// # Errors
/// Logits of another rank.
pub fn scores(logits: &Tensor, normalised: bool) -> Result<Vec<f32>> {
    if logits.rank() != 2 {
        bail!("scores: expected logits (R, V), got {:?}", logits.dims());
    }
    match Path::of(&[logits]) {
        Path::Cpu => cpu::scores(logits, normalised),
        Path::Reference | Path::Device => reference::scores(logits, normalised),
    }
}

/// Copies the first `positions` of rows of `cache` (R, T, D) over those of other rows, in place: of each pair the first to the
/// second, one pair after the other.
///
/// # Errors
/// A row or a position that is not there.
pub fn copy_rows(cache: &Tensor, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
    let (rows, length, _) = cache.dims3()?;
    if positions > length || pairs.iter().any(|&(from, to)| from.max(to) >= rows) {
        bail!("copy_rows: expected rows below {rows} and at most {length} positions, got {pairs:?} and {positions}");
    }
    match Path::of(&[cache]).provided(cache.is_contiguous()) {
        Path::Cpu => cpu::copy_rows(cache, pairs, positions),
        Path::Reference | Path::Device => reference::copy_rows(cache, pairs),
    }
}
