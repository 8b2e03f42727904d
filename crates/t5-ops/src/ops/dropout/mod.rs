//! Dropout whose mask is a pure function of an element's identity.
//!
//! Each element of the mask is a hash of (seed, step, site, sample, position, channel). Attention probabilities use (seed, step, site,
//! sample, head, query, key). Nothing else matters: not how the optimizer batch is cut into micro-batches, not the padding, the number of
//! threads or the dtype. So the mask is never stored: backward is the same call on the gradient.
//!
//! The hash has two stages. A strong 64-bit mix makes the key of a row from everything but the last coordinate. A cheap 32-bit mix of that
//! key and the channel, sixteen lanes wide in the kernels, gives the element. The element is kept if the result is at least `probability *
//! 2^32`.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::elements;

use crate::dispatch::{Path, check_shape};
use crate::keys::mix;
use crate::needs::Needs;
use crate::random_mask::{RowKey, RowMask};

/// The key of all masks of an optimizer step.
pub fn dropout_key(seed: u64, step: u64) -> u64 {
    mix(seed ^ mix(step.wrapping_add(1)))
}

/// One place of the model at which dropout is applied, at one optimizer step.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// The probability that an element is dropped, in `[0, 1)`. Kept elements are scaled by `1 / (1 - p)`.
    pub probability: f32,
    /// The seed of the run.
    pub seed: u64,
    /// The optimizer step.
    pub step: u64,
    /// The number of the place in the model where dropout is applied.
    pub site: u32,
    /// For each sequence of the micro-batch, its index in the whole optimizer batch. Length B.
    pub samples: &'a [u32],
}

impl Dropout<'_> {
    /// An element is kept if its hash is at least this: a multiple of 65,536, so that a card needs only the upper half of the hash.
    ///
    /// The probability is rounded to a multiple of 2^-16, but not to 0 or 1.
    pub(crate) fn threshold(&self) -> u32 {
        let least = f64::from(u8::from(self.probability > 0.0));
        ((f64::from(self.probability) * 65_536.0).round().clamp(least, 65_535.0) as u32) << 16
    }

    /// Factor of kept elements.
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

    /// The mask of row `position` of sequence `index` of the micro-batch.
    pub(crate) fn row_mask(&self, index: usize, position: usize) -> RowMask {
        self.mask(self.row_key(index, position))
    }

    /// The mask of the probabilities of one query.
    pub(crate) fn query_mask(&self, index: usize, head: usize, query: usize) -> RowMask {
        self.mask(self.query_key(index, head, query))
    }

    fn mask(&self, key: RowKey) -> RowMask {
        RowMask::new(key, self.threshold(), self.scale() as f32)
    }

    fn key(&self, index: usize, coordinate: u64) -> RowKey {
        let key = dropout_key(self.seed, self.step);
        let key = mix(key ^ ((u64::from(self.site) << 32) | u64::from(self.samples[index])));
        RowKey::from_bits(mix(key ^ coordinate))
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

/// Returns the dropout if it drops anything. Checks it against the batch that it is applied to.
pub(crate) fn active<'a>(op: &str, d: Option<&'a Dropout<'a>>, batch: usize) -> Result<Option<&'a Dropout<'a>>> {
    match d {
        None => Ok(None),
        Some(d) => {
            d.check(op, batch)?;
            Ok((d.probability > 0.0).then_some(d))
        }
    }
}

/// 1 where the element is kept, 0 where it is dropped.
pub(crate) fn kept(d: &Dropout, key: RowKey, channel: u32) -> f32 {
    RowMask::new(key, d.threshold(), 1.0).factor(channel as usize)
}

/// Returns `(B, T, D)`, or an error if dropout cannot be applied to this shape.
pub(crate) fn batch_rows_width(op: &str, x: &Tensor) -> Result<(usize, usize, usize)> {
    elements(x.shape())?;
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
    match Path::choose(&[x]) {
        Path::Cpu => cpu::dropout(x, d),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([x]) => cuda::dropout(None, x, Some(d)),
        Path::Reference | Path::Device => reference::dropout(x, Some(d)),
    }
}

/// Returns the needs of [`dropout`] for this many elements, if it drops any.
pub fn dropout_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Device => Needs::launches(1),
        Path::Reference => reference::mask_needs(elements, dtype),
    }
}

/// `residual + dropout(x)`, both (B, T, D).
pub fn dropout_add(residual: &Tensor, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    let _span = tracing::debug_span!("dropout_add").entered();
    check_shape("dropout_add", "x", x, residual.dims())?;
    let active = match d {
        None => None,
        Some(d) => active("dropout_add", Some(d), batch_rows_width("dropout_add", x)?.0)?,
    };
    match (Path::choose(&[residual, x]).provided(residual.dtype() == x.dtype()), active) {
        (Path::Cpu, None) => cpu::add(residual, x),
        (Path::Cpu, Some(d)) => cpu::dropout_add(residual, x, d),
        #[cfg(feature = "cuda")]
        (Path::Device, d) if cuda_device::launch::takes_alike([residual, x]) => cuda::dropout(Some(residual), x, d),
        (Path::Reference | Path::Device, _) => reference::dropout_add(residual, x, d),
    }
}

/// Returns the needs of [`dropout_add`] for this many elements, if it drops any.
pub fn dropout_add_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    dropout_needs(path, elements, dtype)
}
