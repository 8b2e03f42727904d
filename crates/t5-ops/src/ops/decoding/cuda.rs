//! The next tokens and the cache on a card: the host gets ids and scores of a few tokens, or one number for each token.

use candle_core::{DType, Device, Result, Tensor};
use cuda_device::launch::{Kernel, Module, address, byte_count, copy_to, suffix, unwritten, uploaded};

use super::Position;

/// Threads of a block for a row of logits, and its shared memory: two numbers for each warp.
const THREADS: u32 = 1024;
const SHARED: usize = THREADS as usize / 32 * 8;
/// Elements of a row that a block copies, about.
const COPIED: usize = 4096;
/// Blocks along y that a grid has at most. Each goes on with what the others leave.
const MAX_BLOCKS: usize = 65_535;

fn kernel<'a>(logits: &'a Tensor, name: &str) -> Result<Kernel<'a>> {
    Kernel::new(logits.device(), Module::Decoding, format!("{name}_{}", suffix(logits.dtype())))?.tensor(logits)
}

pub(super) fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    let (rows, width) = logits.dims2()?;
    let logits = logits.contiguous()?;
    let tokens = unwritten(rows, DType::U32, logits.device())?;
    // SAFETY: rows of this width, and a token for each.
    unsafe { kernel(&logits, "largest")?.tensor(&tokens)?.size(width)?.launch([rows, 1, 1], THREADS, SHARED)? };
    tokens.to_vec1()
}

pub(super) fn log_probabilities(logits: &Tensor) -> Result<Vec<f32>> {
    let (rows, width) = logits.dims2()?;
    let logits = logits.contiguous()?;
    let scores = unwritten(rows * width, DType::F32, logits.device())?;
    let kernel = kernel(&logits, "log_probabilities")?.tensor(&scores)?.size(width)?;
    // SAFETY: rows of this width, and a score for each element.
    unsafe { kernel.launch([rows, 1, 1], THREADS, SHARED)? };
    scores.to_vec1()
}

pub(super) fn candidates(logits: &Tensor, offsets: &[f32], count: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let (rows, width) = logits.dims2()?;
    let (logits, device) = (logits.contiguous()?, logits.device());
    let offsets = Tensor::new(offsets, device)?;
    let tokens = unwritten(rows * count, DType::U32, device)?;
    let scores = unwritten(rows * count, DType::F32, device)?;
    let kernel = kernel(&logits, "candidates")?.tensor(&offsets)?.tensor(&tokens)?.tensor(&scores)?;
    // SAFETY: rows of this width, each with an offset and with room for this many tokens and scores, which are no more than the row has.
    unsafe { kernel.size(width)?.size(count)?.launch([rows, 1, 1], THREADS, SHARED)? };
    Ok((tokens.to_vec1()?, scores.to_vec1()?))
}

pub(super) fn append(
    [of_keys, of_values]: [&Tensor; 2],
    [keys, values]: [&Tensor; 2],
    position: Position,
) -> Result<()> {
    let (rows, capacity, width) = of_keys.dims3()?;
    let (keys, values) = (keys.contiguous()?, values.contiguous()?);
    let kernel = kernel(&keys, "append")?.tensor(&values)?.tensor(of_keys)?.tensor(of_values)?;
    // Kernels add the position on the card to the number.
    let number = if position.on_card.is_some() { 0 } else { position.number };
    let kernel = kernel.size(capacity)?.size(width)?.size(number)?.tensor_or_null(position.on_card)?;
    // SAFETY: both caches have a place at this position for each row of keys and of values.
    unsafe { kernel.launch([rows, 2, 1], 256, 0) }
}

/// Whether no pair copies from a row that another pair copies to. Then the order does not matter.
fn are_apart(pairs: &[(usize, usize)]) -> bool {
    let is_target = |row: usize| pairs.iter().any(|&(_, to)| to == row);
    let mut targets: Vec<usize> = pairs.iter().map(|&(_, to)| to).collect();
    targets.sort_unstable();
    targets.windows(2).all(|pair| pair[0] != pair[1]) && pairs.iter().all(|&(from, _)| !is_target(from))
}

pub(super) fn copy_rows(cache: &Tensor, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
    if pairs.len() > 1 && !are_apart(pairs) {
        return pairs.chunks(1).try_for_each(|pair| copy_rows(cache, pair, positions));
    }
    let (_, capacity, width) = cache.dims3()?;
    let numbers: Vec<u32> = pairs.iter().flat_map(|&(from, to)| [from as u32, to as u32]).collect();
    let on_card = uploaded(&numbers, cache.device())?;
    let device: &Device = cache.device();
    let kernel = Kernel::new(device, Module::Decoding, format!("copy_rows_{}", suffix(cache.dtype())))?;
    let (row, count) = (capacity * width, positions * width);
    let kernel = kernel.tensor(&on_card)?.tensor(cache)?.value(row as i64).value(count as i64);
    // SAFETY: rows are among those of the cache, and no more positions are copied than the cache has.
    unsafe { kernel.launch([pairs.len(), count.div_ceil(COPIED).min(MAX_BLOCKS), 1], 256, 0) }
}

/// Joins contiguous tensors of one card and dtype.
pub(super) fn join(parts: &[Tensor]) -> Result<Tensor> {
    let mut dims = parts[0].dims().to_vec();
    dims[0] = parts.iter().map(|part| part.dims()[0]).sum();
    let all = unwritten(dims, parts[0].dtype(), parts[0].device())?;
    let mut to = address(&all)?;
    for part in parts {
        // SAFETY: there is room for all parts, one after the other.
        unsafe { copy_to(part, to)? };
        to += byte_count(part) as u64;
    }
    Ok(all)
}
