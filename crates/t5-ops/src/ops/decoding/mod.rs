//! Beside the layers, generation needs the scores of the next token where they can be looked at, and a cache whose rows can be
//! copied over each other.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{Path, check_shape};
use crate::needs::{Needs, elements};

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
        #[cfg(feature = "cuda")]
        Path::Device if normalised && crate::cuda::takes([logits]) => cuda::log_probabilities(logits),
        Path::Reference | Path::Device => reference::scores(logits, normalised),
    }
}

/// What [`scores`] needs of (R, V) beside its result: on a card the scores, where they are not the logits.
pub fn scores_needs(path: Path, (rows, width): (usize, usize), dtype: DType, normalised: bool) -> Needs {
    let scores = elements([rows, width, size_of::<f32>()]);
    match path {
        Path::Device if normalised || dtype != DType::F32 => Needs::bytes(scores).with_bytes_on_host(scores),
        Path::Device => Needs::default().with_bytes_on_host(scores),
        Path::Cpu | Path::Reference => Needs::bytes(scores),
    }
}

/// The index of the largest of each row of logits (R, V); of equal ones the first. Values that are not numbers are passed over.
///
/// # Errors
/// Logits of another rank.
pub fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    logits.dims2()?;
    match Path::of(&[logits]) {
        #[cfg(feature = "cuda")]
        Path::Device if crate::cuda::takes([logits]) => cuda::largest(logits),
        Path::Cpu | Path::Reference | Path::Device => reference::largest(logits),
    }
}

/// What [`largest`] needs of (R, V): the logits as f32, and a copy by rows; on a card nothing.
pub fn largest_needs(path: Path, (rows, width): (usize, usize)) -> Needs {
    match path {
        Path::Device => Needs::default(),
        Path::Cpu | Path::Reference => Needs::bytes(elements([rows, width, 2 * size_of::<f32>()])),
    }
}

/// The most candidates of a row that a card looks for: it goes through the row for each.
const MOST_CANDIDATES: usize = 64;

/// Of each row of logits (R, V) the `count` likeliest tokens and their log-probabilities, those of [`scores`], row after row. They are
/// in the order of the f32 sums of log-probability and the row's offset; of equal ones the first token comes first, and what is not a
/// number counts as the least. `None` where [`scores`] are as near: on the CPU.
///
/// # Errors
/// Logits of another rank; another number of offsets than rows.
pub fn candidates(logits: &Tensor, offsets: &[f32], count: usize) -> Result<Option<(Vec<u32>, Vec<f32>)>> {
    let (rows, width) = logits.dims2()?;
    if offsets.len() != rows {
        bail!("candidates: expected an offset for each of {rows} rows, got {}", offsets.len());
    }
    let path = Path::of(&[logits]);
    if candidates_needs(path, (rows, width), count).is_none() {
        return Ok(None);
    }
    match path {
        #[cfg(feature = "cuda")]
        Path::Device if crate::cuda::takes([logits]) => cuda::candidates(logits, offsets, count).map(Some),
        _ => Ok(None),
    }
}

/// What [`candidates`] needs of (R, V): offsets, tokens and scores on a card, and the last two on the host. `None` where there are none.
pub fn candidates_needs(path: Path, (rows, width): (usize, usize), count: usize) -> Option<Needs> {
    let found = elements([rows, count, size_of::<u32>() + size_of::<f32>()]);
    let is_found = path == Path::Device && count <= width.min(MOST_CANDIDATES);
    is_found.then(|| Needs::bytes(found + elements([rows, size_of::<f32>()])).with_bytes_on_host(found))
}

/// The place of a token in a cache.
#[derive(Debug)]
pub struct Position<'a, T = Tensor> {
    /// As a number, which is checked.
    pub number: usize,
    /// The same as one `U32` on a card, where kernels look whenever they run: it may change between launches that are recorded
    /// ([`crate::Replay`]).
    pub on_card: Option<&'a T>,
}

impl<T> Clone for Position<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Position<'_, T> {}

/// Writes keys and values (R, 1, D) over a position of two caches (R, T, D) of their dtype.
///
/// # Errors
/// Other shapes or dtypes; a position that is not there.
pub fn append(caches: [&Tensor; 2], new: [&Tensor; 2], position: Position) -> Result<()> {
    let (rows, length, width) = caches[0].dims3()?;
    for (cache, new) in caches.into_iter().zip(new) {
        check_shape("append", "cache", cache, &[rows, length, width])?;
        check_shape("append", "keys or values", new, &[rows, 1, width])?;
        let number = position.number;
        if number >= length || cache.dtype() != new.dtype() {
            let (expected, got) = (cache.dtype(), new.dtype());
            bail!("append: expected {expected:?} at a position below {length}, got {got:?} at {number}");
        }
    }
    match Path::of(&caches) {
        #[cfg(feature = "cuda")]
        Path::Device if caches.iter().all(|cache| cache.is_contiguous()) && crate::cuda::takes_alike(caches) => {
            cuda::append(caches, new, position)
        }
        _ => {
            crate::replay::uses_number("append");
            caches.into_iter().zip(new).try_for_each(|(cache, new)| cache.slice_set(new, 1, position.number))
        }
    }
}

/// The rows of all tensors (.., D), which are of one dtype and alike but for the first dimension: those of one tensor after the other's.
///
/// # Errors
/// None of them; other shapes or dtypes.
pub fn join(parts: &[Tensor]) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if parts.len() > 1 && crate::cuda::takes_alike(parts) && parts.iter().all(Tensor::is_contiguous) {
        let rest = parts[0].dims().get(1..);
        if rest.is_some() && parts.iter().all(|part| part.dims().get(1..) == rest) {
            return cuda::join(parts);
        }
    }
    Tensor::cat(parts, 0)
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
        #[cfg(feature = "cuda")]
        Path::Device if cache.is_contiguous() && crate::cuda::takes([cache]) => {
            cuda::copy_rows(cache, pairs, positions)
        }
        Path::Reference | Path::Device => reference::copy_rows(cache, pairs),
    }
}
