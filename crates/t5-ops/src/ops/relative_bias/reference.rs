//! The bias in plain candle operations.

use candle_core::{Result, Tensor};

use super::RelativePosition;
use crate::dispatch::{add_into, wide, wide_dtype};

/// See [`crate::relative_bias`].
pub fn relative_bias(
    table: &Tensor,
    r: &RelativePosition,
    queries: usize,
    keys: usize,
    first_query: usize,
) -> Result<Tensor> {
    let buckets = Tensor::new(r.buckets_by_offset(queries, keys, first_query), table.device())?;
    wide(table)?.index_select(&buckets, 0)?.t()?.contiguous()
}

/// See [`crate::relative_bias_backward`].
pub fn relative_bias_backward(
    dbias: &Tensor,
    r: &RelativePosition,
    queries: usize,
    keys: usize,
    first_query: usize,
    dtable: &Tensor,
) -> Result<()> {
    let buckets = Tensor::new(r.buckets_by_offset(queries, keys, first_query), dtable.device())?;
    let by_offset = dbias.to_dtype(wide_dtype(dtable))?.t()?.contiguous()?; // (T+S-1, H)
    let zeros = Tensor::zeros(dtable.shape(), wide_dtype(dtable), dtable.device())?;
    add_into(dtable, &zeros.index_add(&buckets, &by_offset, 0)?)
}
