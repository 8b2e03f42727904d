//! Operations of generation besides the layers: the scores of the next token, and a cache whose rows can be copied over each other.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{Path, check_shape};
use crate::needs::{Needs, elements};

/// Returns the logits (R, V) as f32, row after row; with `normalised`, their log-softmax.
///
/// # Errors
/// Logits of another rank.
pub fn scores(logits: &Tensor, normalised: bool) -> Result<Vec<f32>> {
    if logits.rank() != 2 {
        bail!("scores: expected logits (R, V), got {:?}", logits.dims());
    }
    match Path::choose(&[logits]) {
        Path::Cpu => cpu::scores(logits, normalised),
        #[cfg(feature = "cuda")]
        Path::Device if normalised && cuda_device::launch::takes([logits]) => cuda::log_probabilities(logits),
        Path::Reference | Path::Device => reference::scores(logits, normalised),
    }
}

/// Returns the needs of [`scores`] for (R, V) besides its result: on a card the scores, unless they are the logits.
pub fn scores_needs(path: Path, (rows, width): (usize, usize), dtype: DType, normalised: bool) -> Needs {
    let scores = elements([rows, width, size_of::<f32>()]);
    match path {
        Path::Device if normalised || dtype != DType::F32 => Needs::bytes(scores).with_bytes_on_host(scores),
        Path::Device => Needs::default().with_bytes_on_host(scores),
        Path::Cpu | Path::Reference => Needs::bytes(scores),
    }
}

/// Returns the index of the largest of each row of logits (R, V), the first of equal ones. NaN is skipped.
///
/// # Errors
/// Logits of another rank.
pub fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    logits.dims2()?;
    match Path::choose(&[logits]) {
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([logits]) => cuda::largest(logits),
        Path::Cpu | Path::Reference | Path::Device => reference::largest(logits),
    }
}

/// Returns the needs of [`largest`] for (R, V): the logits as f32, and a copy by rows; on a card nothing.
pub fn largest_needs(path: Path, (rows, width): (usize, usize)) -> Needs {
    match path {
        Path::Device => Needs::default(),
        Path::Cpu | Path::Reference => Needs::bytes(elements([rows, width, 2 * size_of::<f32>()])),
    }
}

/// The most candidates of a row that a card looks for: it goes through the row once for each.
const MAX_CANDIDATES: usize = 64;

/// For each row of logits (R, V), returns the `count` likeliest tokens and their log-probabilities, those of [`scores`], row after row.
/// They are in the order of the f32 sums of log-probability and the row's offset. Of equal sums the first token comes first, and NaN counts
/// as the least. `None` on the CPU, where [`scores`] costs no more.
///
/// # Errors
/// Logits of another rank; another number of offsets than rows.
pub fn candidates(logits: &Tensor, offsets: &[f32], count: usize) -> Result<Option<(Vec<u32>, Vec<f32>)>> {
    let (rows, width) = logits.dims2()?;
    if offsets.len() != rows {
        bail!("candidates: expected an offset for each of {rows} rows, got {}", offsets.len());
    }
    let path = Path::choose(&[logits]);
    if candidates_needs(path, (rows, width), count).is_none() {
        return Ok(None);
    }
    match path {
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([logits]) => cuda::candidates(logits, offsets, count).map(Some),
        _ => Ok(None),
    }
}

/// Returns the needs of [`candidates`] for (R, V): offsets, tokens and scores on a card, and tokens and scores on the host. `None` where
/// [`candidates`] returns `None`.
pub fn candidates_needs(path: Path, (rows, width): (usize, usize), count: usize) -> Option<Needs> {
    let found = elements([rows, count, size_of::<u32>() + size_of::<f32>()]);
    let is_found = path == Path::Device && count <= width.min(MAX_CANDIDATES);
    is_found.then(|| Needs::bytes(found + elements([rows, size_of::<f32>()])).with_bytes_on_host(found))
}

/// The place of a token in a cache.
#[derive(Debug)]
pub struct Position<'a, T = Tensor> {
    /// The position as a number, which is checked.
    pub number: usize,
    /// The position as one `U32` on a card, which kernels read whenever they run: it may change between launches of a recording
    /// ([`cuda_device::Replay`]).
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
/// Other shapes or dtypes; a position outside of the caches.
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
    match Path::choose(&caches) {
        #[cfg(feature = "cuda")]
        Path::Device
            if caches.iter().all(|cache| cache.is_contiguous()) && cuda_device::launch::takes_alike(caches) =>
        {
            cuda::append(caches, new, position)
        }
        _ => {
            cuda_device::refuse_recording("append");
            caches.into_iter().zip(new).try_for_each(|(cache, new)| cache.slice_set(new, 1, position.number))
        }
    }
}

/// Joins the rows of tensors (.., D) of one dtype, which have the same dimensions but the first: the rows of one tensor after those of
/// another.
///
/// # Errors
/// No tensors; other shapes or dtypes.
pub fn join(parts: &[Tensor]) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if parts.len() > 1 && cuda_device::launch::takes_alike(parts) && parts.iter().all(Tensor::is_contiguous) {
        let rest = parts[0].dims().get(1..);
        if rest.is_some() && parts.iter().all(|part| part.dims().get(1..) == rest) {
            return cuda::join(parts);
        }
    }
    Tensor::cat(parts, 0)
}

/// Copies the first `positions` positions of rows of `cache` (R, T, D) over those of other rows, in place: for each pair, in order, from
/// the first row to the second.
///
/// # Errors
/// A row or a position outside of the cache.
pub fn copy_rows(cache: &Tensor, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
    let (rows, length, _) = cache.dims3()?;
    if positions > length || pairs.iter().any(|&(from, to)| from.max(to) >= rows) {
        bail!("copy_rows: expected rows below {rows} and at most {length} positions, got {pairs:?} and {positions}");
    }
    match Path::choose(&[cache]).provided(cache.is_contiguous()) {
        Path::Cpu => cpu::copy_rows(cache, pairs, positions),
        #[cfg(feature = "cuda")]
        Path::Device if cache.is_contiguous() && cuda_device::launch::takes([cache]) => {
            cuda::copy_rows(cache, pairs, positions)
        }
        Path::Reference | Path::Device => reference::copy_rows(cache, pairs),
    }
}
