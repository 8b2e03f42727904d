//! T5's relative-position bias (Raffel et al. 2020, section 2.1) by offset instead of by pair.
//!
//! The bias of query i and key j depends on `j - i` only, so T+S-1 values for each head hold all the information of the
//! usual (H, T, S) tensor.
//!
//! Shapes: table, dtable (buckets, H); bias, dbias (H, T+S-1).

#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, bail};

use crate::dispatch::{Path, check_shape};
use crate::needs::Needs;

/// How relative positions are cut into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativePosition {
    /// The number of buckets, `relative_attention_num_buckets`.
    pub buckets: usize,
    /// Distances from here on share the last bucket, `relative_attention_max_distance`.
    pub max_distance: usize,
    /// True in the encoder; in the decoder keys after the query all share bucket 0.
    pub bidirectional: bool,
}

impl RelativePosition {
    /// The bucket of `key position - query position`, as transformers' `_relative_position_bucket`: half of
    /// the buckets for exact distances, half for logarithmically growing ranges, computed in f32.
    pub fn bucket(&self, relative_position: i64) -> usize {
        let (buckets, first, distance) = if self.bidirectional {
            let half = self.buckets / 2;
            (half, if relative_position > 0 { half } else { 0 }, relative_position.unsigned_abs() as usize)
        } else {
            (self.buckets, 0, (-relative_position.min(0)) as usize)
        };
        let exact = buckets / 2;
        if distance < exact {
            return first + distance;
        }
        let ratio = (distance as f32 / exact as f32).ln() / ((self.max_distance as f64 / exact as f64).ln() as f32);
        let large = exact + (ratio * (buckets - exact) as f32) as usize;
        first + large.min(buckets - 1)
    }

    /// The bucket of each of the T+S-1 offsets.
    fn buckets_by_offset(&self, queries: usize, keys: usize, first_query: usize) -> Vec<u32> {
        let last = queries as i64 - 1;
        (0..queries as i64 + keys as i64 - 1)
            .map(|offset| self.bucket(offset - last - first_query as i64) as u32)
            .collect()
    }

    fn check(&self, op: &str, table: &Tensor, queries: usize, keys: usize, first_query: usize) -> Result<()> {
        let least = if self.bidirectional { 4 } else { 2 };
        if self.buckets < least || self.max_distance <= self.buckets / least {
            bail!("{op}: expected at least {least} buckets and a larger max_distance, got {self:?}")
        }
        if queries == 0 || keys == 0 {
            bail!("{op}: expected at least one query and one key, got {queries} and {keys}")
        }
        if [keys, first_query]
            .iter()
            .try_fold(queries, |sum, &n| sum.checked_add(n))
            .is_none_or(|n| n > u32::MAX as usize)
        {
            bail!("{op}: expected positions below 2^32, got {queries} queries from {first_query} on and {keys} keys")
        }
        let (_, heads) = table.dims2()?;
        check_shape(op, "table", table, &[self.buckets, heads])
    }
}

/// The bias of `queries` queries, the first at position `first_query`, and `keys` keys, the first at 0:
/// (H, T+S-1) with entry `[h, j - i + T - 1]` for the i-th query and the j-th key.
pub fn relative_bias(
    table: &Tensor,
    r: &RelativePosition,
    queries: usize,
    keys: usize,
    first_query: usize,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("relative_bias").entered();
    r.check("relative_bias", table, queries, keys, first_query)?;
    #[cfg(feature = "cuda")]
    if cuda_device::launch::takes([table]) {
        return cuda::relative_bias(table, &r.buckets_by_offset(queries, keys, first_query));
    }
    reference::relative_bias(table, r, queries, keys, first_query)
}

/// Returns the needs of [`relative_bias`] and of [`relative_bias_backward`]: on the CPU a few thousand values.
pub fn relative_bias_needs(path: Path) -> Needs {
    if path == Path::Device { Needs::launches(1) } else { Needs::default() }
}

/// Adds the gradient of the bias to that of the table: `dtable[bucket] += dbias` over all offsets.
pub fn relative_bias_backward(
    dbias: &Tensor,
    r: &RelativePosition,
    queries: usize,
    keys: usize,
    first_query: usize,
    dtable: &Tensor,
) -> Result<()> {
    let _span = tracing::debug_span!("relative_bias_backward").entered();
    r.check("relative_bias_backward", dtable, queries, keys, first_query)?;
    check_shape("relative_bias_backward", "dbias", dbias, &[dtable.dim(1)?, queries + keys - 1])?;
    #[cfg(feature = "cuda")]
    if cuda_device::launch::takes_alike([dbias, dtable])
        && dtable.dtype() == candle_core::DType::F32
        && dtable.is_contiguous()
    {
        return cuda::relative_bias_backward(dbias, &r.buckets_by_offset(queries, keys, first_query), dtable);
    }
    reference::relative_bias_backward(dbias, r, queries, keys, first_query, dtable)
}

// A few thousand values a call: on the CPU plain candle operations are fast enough.
