//! The same in plain candle operations.

use candle_core::{D, DType, Result, Tensor};

/// The logits as f32; normalised: their log-softmax.
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
