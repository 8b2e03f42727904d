//! T5's relative-position bias (Raffel et al. 2020, section 2.1) by offset instead of by pair.
//!
//! The bias of query i and key j depends on `j - i` only, so T+S-1 values a head say everything that the
//! usual (H, T, S) tensor says.
//!
//! Shapes: table, dtable (buckets, H); bias, dbias (H, T+S-1).

use candle_core::{Result, Tensor, bail};

use crate::dispatch::check_shape;

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
    reference::relative_bias(table, r, queries, keys, first_query)
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
    reference::relative_bias_backward(dbias, r, queries, keys, first_query, dtable)
}

// A few thousand values a call: plain candle operations are all that this needs.
pub(crate) mod reference {
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
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::testing::{Numbers, check_gradient, values, weighted};

    const ENCODER: RelativePosition = RelativePosition { buckets: 32, max_distance: 128, bidirectional: true };
    const DECODER: RelativePosition = RelativePosition { bidirectional: false, ..ENCODER };

    #[test]
    fn buckets_are_those_of_transformers() {
        // transformers' _relative_position_bucket with 32 buckets and maximal distance 128.
        for (r, position, expected) in [
            (ENCODER, 0, 0),
            (ENCODER, -1, 1),
            (ENCODER, -7, 7),
            (ENCODER, -8, 8),
            (ENCODER, -11, 8),
            (ENCODER, -12, 9),
            (ENCODER, -16, 10),
            (ENCODER, -32, 12),
            (ENCODER, -64, 14),
            (ENCODER, -127, 15),
            (ENCODER, -100_000, 15),
            (ENCODER, 1, 17),
            (ENCODER, 8, 24),
            (ENCODER, 500, 31),
            (DECODER, 3, 0),
            (DECODER, -15, 15),
            (DECODER, -16, 16),
            (DECODER, -19, 17),
            (DECODER, -64, 26),
            (DECODER, -128, 31),
        ] {
            assert_eq!(r.bucket(position), expected, "{r:?} at {position}");
        }
    }

    #[test]
    fn an_entry_is_the_bucket_of_key_minus_query() {
        let table = Numbers::new(40).tensor(&[32, 3], DType::F64);
        let rows = table.to_vec2::<f64>().unwrap();
        for (r, queries, keys, first_query) in
            [(ENCODER, 5, 9, 0), (DECODER, 4, 4, 0), (DECODER, 1, 12, 11), (DECODER, 3, 40, 37)]
        {
            let bias = relative_bias(&table, &r, queries, keys, first_query).unwrap().to_vec2::<f64>().unwrap();
            for (head, bias) in bias.iter().enumerate() {
                for i in 0..queries {
                    for j in 0..keys {
                        let bucket = r.bucket(j as i64 - (first_query + i) as i64);
                        assert_eq!(bias[j + queries - 1 - i], rows[bucket][head]);
                    }
                }
            }
        }
    }

    #[test]
    fn the_gradient_agrees_with_finite_differences_and_accumulates() {
        let mut numbers = Numbers::new(41);
        let table = numbers.tensor(&[32, 2], DType::F64);
        let dbias = numbers.tensor(&[2, 20], DType::F64);
        let dtable = table.zeros_like().unwrap();
        relative_bias_backward(&dbias, &ENCODER, 9, 12, 0, &dtable).unwrap();
        check_gradient("dtable", &table, &dtable, |t| weighted(&relative_bias(t, &ENCODER, 9, 12, 0)?, &dbias));
        let once = values(&dtable);
        relative_bias_backward(&dbias, &ENCODER, 9, 12, 0, &dtable).unwrap();
        assert!(values(&dtable).iter().zip(once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-12));
    }

    #[test]
    fn tables_that_do_not_fit_are_errors() {
        let table = Numbers::new(42).tensor(&[16, 2], DType::F32);
        assert!(relative_bias(&table, &ENCODER, 2, 2, 0).is_err());
        assert!(
            relative_bias(&table, &RelativePosition { buckets: 16, max_distance: 4, bidirectional: true }, 2, 2, 0)
                .is_err()
        );
        assert!(relative_bias(&table, &RelativePosition { buckets: 16, ..ENCODER }, 0, 2, 0).is_err());
    }
}
