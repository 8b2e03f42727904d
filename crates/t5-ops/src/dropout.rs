//! Dropout whose mask is a pure function of what an element is.
//!
//! Each element of the mask is a hash of (seed, step, site, sample, position, channel); attention
//! probabilities use (seed, step, site, sample, head, query, key). Nothing else enters: not the way the
//! optimizer batch is cut into micro-batches, not the padding, not the number of threads, not the dtype. So
//! the mask is never stored: backward is the same call on the gradient.
//!
//! The hash has two stages. A strong 64-bit mix makes the key of a row (everything but the last
//! coordinate); a cheap 32-bit mix of that key and the channel, sixteen lanes wide in the kernels, gives
//! the element, which is kept when the result is at least `probability * 2^32`.

use candle_core::{Result, Tensor, bail};

use crate::dispatch;

/// One place of the model at which dropout is applied, at one optimizer step.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// The probability that an element is dropped, in `[0, 1)`. Kept elements are scaled by `1 / (1 - p)`.
    pub probability: f32,
    /// The seed of the run.
    pub seed: u64,
    /// The optimizer step.
    pub step: u64,
    /// Numbers the places of the model where dropout is applied.
    pub site: u32,
    /// For each sequence of the micro-batch, its index in the whole optimizer batch. Length B.
    pub samples: &'a [u32],
}

/// The key of one row of a mask.
#[derive(Clone, Copy)]
pub(crate) struct RowKey {
    low: u32,
    high: u32,
}

impl Dropout<'_> {
    /// An element is kept when its hash is at least this.
    pub(crate) fn threshold(&self) -> u32 {
        (f64::from(self.probability) * 4_294_967_296.0) as u32
    }

    /// What kept elements are multiplied by.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / (1.0 - f64::from(self.probability))
    }

    /// The key of row `position` of sequence `index` of the micro-batch.
    pub(crate) fn row_key(&self, index: usize, position: usize) -> RowKey {
        self.key(index, position as u64)
    }

    /// The key of the probabilities of one query: one head of sequence `index` of the micro-batch.
    pub(crate) fn query_key(&self, index: usize, head: usize, query: usize) -> RowKey {
        self.key(index, ((head as u64 + 1) << 32) | query as u64)
    }

    fn key(&self, index: usize, coordinate: u64) -> RowKey {
        let key = mix(self.seed ^ mix(self.step.wrapping_add(1)));
        let key = mix(key ^ ((u64::from(self.site) << 32) | u64::from(self.samples[index])));
        let key = mix(key ^ coordinate);
        RowKey { low: key as u32, high: (key >> 32) as u32 }
    }

    fn check(&self, op: &str, batch: usize) -> Result<()> {
        if !(0.0..1.0).contains(&self.probability) {
            bail!("{op}: dropout probability: expected a value in [0, 1), got {}", self.probability)
        }
        if self.samples.len() != batch {
            bail!("{op}: dropout samples: expected one for each of {batch} sequences, got {}", self.samples.len())
        }
        Ok(())
    }
}

/// The dropout if it drops anything, checked against the batch it is applied to.
pub(crate) fn active<'a>(op: &str, d: Option<&'a Dropout<'a>>, batch: usize) -> Result<Option<&'a Dropout<'a>>> {
    match d {
        None => Ok(None),
        Some(d) => {
            d.check(op, batch)?;
            Ok((d.probability > 0.0).then_some(d))
        }
    }
}

/// Finalizer of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The hash of one element of a row: 32-bit operations only, so that it vectorises.
#[inline(always)]
pub(crate) fn hash(key: RowKey, channel: u32) -> u32 {
    // The finalizer "lowbias32" (Wellons 2018), with the second half of the key added between its rounds.
    let x = channel.wrapping_mul(0x9E37_79B9).wrapping_add(key.low);
    let x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    let x = (x ^ (x >> 15)).wrapping_add(key.high).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// What the element of a row is multiplied by: `scale` or zero.
#[inline(always)]
pub(crate) fn factor(key: RowKey, channel: u32, threshold: u32, scale: f32) -> f32 {
    if hash(key, channel) >= threshold { scale } else { 0.0 }
}

/// `(B, T, D)`, or an error if dropout cannot be applied to this shape.
pub(crate) fn batch_rows_width(op: &str, x: &Tensor) -> Result<(usize, usize, usize)> {
    match x.dims() {
        &[b, t, d] => Ok((b, t, d)),
        dims => bail!("{op}: expected shape (batch, positions, channels), got {dims:?}"),
    }
}

/// Sets elements of `x` (B, T, D) to zero with probability `p`, and scales the others by `1 / (1 - p)`.
///
/// With `None` it is the identity. The backward is the same call on the gradient.
pub fn dropout(x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    let _span = tracing::debug_span!("dropout").entered();
    let Some(d) = d else { return Ok(x.clone()) };
    let (b, _, _) = batch_rows_width("dropout", x)?;
    let Some(d) = active("dropout", Some(d), b)? else { return Ok(x.clone()) };
    reference::dropout(x, Some(d))
}

/// `residual + dropout(x)`, both (B, T, D).
pub fn dropout_add(residual: &Tensor, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    let _span = tracing::debug_span!("dropout_add").entered();
    dispatch::check_shape("dropout_add", "x", x, residual.dims())?;
    reference::dropout_add(residual, x, d)
}

pub(crate) mod reference {
    use candle_core::{Device, Result, Tensor};

    use super::{Dropout, active, batch_rows_width, factor};
    use crate::dispatch::wide_dtype;

    /// See [`crate::dropout`].
    pub fn dropout(x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
        match d {
            None => Ok(x.clone()),
            Some(d) => x * mask(x, d)?,
        }
    }

    /// See [`crate::dropout_add`].
    pub fn dropout_add(residual: &Tensor, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
        residual + dropout(x, d)?
    }

    /// The mask of an activation (B, T, D) times the scale, in the dtype and on the device of `x`.
    pub(crate) fn mask(x: &Tensor, d: &Dropout) -> Result<Tensor> {
        let (b, t, width) = batch_rows_width("dropout", x)?;
        if active("dropout", Some(d), b)?.is_none() {
            return x.ones_like();
        }
        let mut kept = Vec::with_capacity(b * t * width);
        for index in 0..b {
            for position in 0..t {
                let key = d.row_key(index, position);
                kept.extend((0..width as u32).map(|channel| factor(key, channel, d.threshold(), 1.0)));
            }
        }
        // The scale is applied in the wide dtype, so that an f64 reference is exact.
        let mask = Tensor::from_vec(kept, (b, t, width), &Device::Cpu)?.to_dtype(wide_dtype(x))?;
        (mask * d.scale())?.to_dtype(x.dtype())?.to_device(x.device())
    }
}
