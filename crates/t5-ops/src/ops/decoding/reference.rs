//! The same in plain candle operations.

use candle_core::{D, DType, Result, Tensor};

/// The logits as f32; with `normalised`, their log-softmax.
pub fn scores(logits: &Tensor, normalised: bool) -> Result<Vec<f32>> {
    let mut scores = logits.to_dtype(DType::F32)?;
    if normalised {
        let shifted = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?;
        scores = shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)?;
    }
    scores.flatten_all()?.to_vec1()
}

/// Copies whole rows over others.
pub fn copy_rows(cache: &Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    for &(from, to) in pairs {
        let row = cache.narrow(0, from, 1)?.force_contiguous()?;
        cache.slice_set(&row, 0, to)?;
    }
    Ok(())
}

/// The index of the largest of each row, on the host.
pub fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let argmax = |row: &Vec<f32>| {
        let first = (0, f32::NEG_INFINITY);
        row.iter().enumerate().fold(first, |best, (i, &v)| if v > best.1 { (i, v) } else { best }).0 as u32
    };
    Ok(rows.iter().map(argmax).collect())
}
