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
use crate::keys::mix;
use crate::storage::elements;

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

impl RowKey {
    /// The key of row `row` of whatever `key` stands for.
    pub(crate) fn new(key: u64, row: u64) -> Self {
        let key = mix(key ^ mix(row));
        RowKey { low: key as u32, high: (key >> 32) as u32 }
    }
}

/// The mask of one row, ready to be applied.
#[derive(Clone, Copy)]
pub(crate) struct RowMask {
    key: RowKey,
    threshold: u32,
    scale: f32,
}

impl RowMask {
    /// The two halves of the key, and what a hash is compared with.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn parts(&self) -> (u32, u32, u32) {
        (self.key.low, self.key.high, self.threshold)
    }

    /// What kept elements are multiplied by.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether element `channel` is kept.
    #[inline(always)]
    pub(crate) fn keeps(&self, channel: usize) -> bool {
        hash(self.key, channel as u32) >= self.threshold
    }

    /// What element `channel` is multiplied by: the scale, or zero.
    #[inline(always)]
    pub(crate) fn factor(&self, channel: usize) -> f32 {
        if self.keeps(channel) { self.scale } else { 0.0 }
    }
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

    /// The mask of row `position` of sequence `index` of the micro-batch.
    pub(crate) fn row_mask(&self, index: usize, position: usize) -> RowMask {
        self.mask(self.row_key(index, position))
    }

    /// The mask of the probabilities of one query.
    pub(crate) fn query_mask(&self, index: usize, head: usize, query: usize) -> RowMask {
        self.mask(self.query_key(index, head, query))
    }

    fn mask(&self, key: RowKey) -> RowMask {
        RowMask { key, threshold: self.threshold(), scale: self.scale() as f32 }
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

/// The constants of [`hash`].
pub(crate) const CHANNEL_FACTOR: u32 = 0x9E37_79B9;
pub(crate) const FIRST_FACTOR: u32 = 0x7FEB_352D;
pub(crate) const SECOND_FACTOR: u32 = 0x846C_A68B;

/// The hash of one element of a row: 32-bit operations only, so that it vectorises.
#[inline(always)]
pub(crate) fn hash(key: RowKey, channel: u32) -> u32 {
    // The finalizer "lowbias32" (Wellons 2018), with the second half of the key added between its rounds.
    let x = channel.wrapping_mul(CHANNEL_FACTOR).wrapping_add(key.low);
    let x = (x ^ (x >> 16)).wrapping_mul(FIRST_FACTOR);
    let x = (x ^ (x >> 15)).wrapping_add(key.high).wrapping_mul(SECOND_FACTOR);
    x ^ (x >> 16)
}

/// 1 where the element is kept, 0 where it is dropped.
pub(crate) fn kept(d: &Dropout, key: RowKey, channel: u32) -> f32 {
    if hash(key, channel) >= d.threshold() { 1.0 } else { 0.0 }
}

/// `(B, T, D)`, or an error if dropout cannot be applied to this shape.
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
    if dispatch::has_kernel(&[x]) { kernel::dropout(x, d) } else { reference::dropout(x, Some(d)) }
}

/// `residual + dropout(x)`, both (B, T, D).
pub fn dropout_add(residual: &Tensor, x: &Tensor, d: Option<&Dropout>) -> Result<Tensor> {
    let _span = tracing::debug_span!("dropout_add").entered();
    dispatch::check_shape("dropout_add", "x", x, residual.dims())?;
    if !dispatch::has_kernel(&[residual, x]) || residual.dtype() != x.dtype() {
        return reference::dropout_add(residual, x, d);
    }
    let d = match d {
        None => None,
        Some(d) => active("dropout_add", Some(d), batch_rows_width("dropout_add", x)?.0)?,
    };
    match d {
        None => kernel::add(residual, x),
        Some(d) => kernel::dropout_add(residual, x, d),
    }
}

mod kernel {
    use candle_core::{Result, Tensor};

    use super::{Dropout, RowMask, batch_rows_width};
    use crate::parallel::{Shared, for_each_rows};
    use crate::storage::{Element, View, filled, with_element};
    use crate::vector::vectorized;

    pub(super) fn dropout(x: &Tensor, d: &Dropout) -> Result<Tensor> {
        let (batch, positions, width) = batch_rows_width("dropout", x)?;
        let x = x.contiguous()?;
        let view = View::new(&x)?;
        with_element!(x.dtype(), T, {
            let x_data = view.slice::<T>()?;
            filled::<T>(x.shape(), |y| {
                let y = Shared::new(y);
                for_each_rows(batch * positions, width, |rows| {
                    for row in rows {
                        let mask = d.row_mask(row / positions, row % positions);
                        // SAFETY: each row belongs to one part.
                        let y = unsafe { y.slice(row * width, width) };
                        drop_row(&x_data[row * width..][..width], mask, y);
                    }
                });
                Ok(())
            })
        })
    }

    pub(super) fn dropout_add(residual: &Tensor, x: &Tensor, d: &Dropout) -> Result<Tensor> {
        let (batch, positions, width) = batch_rows_width("dropout_add", x)?;
        let (residual, x) = (residual.contiguous()?, x.contiguous()?);
        let (residual_view, view) = (View::new(&residual)?, View::new(&x)?);
        with_element!(x.dtype(), T, {
            let (residual_data, x_data) = (residual_view.slice::<T>()?, view.slice::<T>()?);
            filled::<T>(x.shape(), |y| {
                let y = Shared::new(y);
                for_each_rows(batch * positions, width, |rows| {
                    for row in rows {
                        let mask = d.row_mask(row / positions, row % positions);
                        let range = row * width..(row + 1) * width;
                        // SAFETY: each row belongs to one part.
                        let y = unsafe { y.slice(range.start, width) };
                        drop_add_row(&residual_data[range.clone()], &x_data[range], mask, y);
                    }
                });
                Ok(())
            })
        })
    }

    pub(super) fn add(residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (residual, x) = (residual.contiguous()?, x.contiguous()?);
        let (residual_view, view) = (View::new(&residual)?, View::new(&x)?);
        with_element!(x.dtype(), T, {
            let (residual_data, x_data) = (residual_view.slice::<T>()?, view.slice::<T>()?);
            filled::<T>(x.shape(), |y| {
                let y = Shared::new(y);
                for_each_rows(x_data.len(), 1, |range| {
                    // SAFETY: each element belongs to one part.
                    let y = unsafe { y.slice(range.start, range.len()) };
                    add_part(&residual_data[range.clone()], &x_data[range], y);
                });
                Ok(())
            })
        })
    }

    vectorized! {
        fn add_part<T: Element>(residual: &[T], x: &[T], y: &mut [T]) {
            for ((y, x), residual) in y.iter_mut().zip(x).zip(residual) {
                *y = T::from_f32(residual.to_f32() + x.to_f32());
            }
        }

        fn drop_row<T: Element>(x: &[T], mask: RowMask, y: &mut [T]) {
            for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                *y = T::from_f32(x.to_f32() * mask.factor(i));
            }
        }

        fn drop_add_row<T: Element>(residual: &[T], x: &[T], mask: RowMask, y: &mut [T]) {
            for (i, ((y, x), residual)) in y.iter_mut().zip(x).zip(residual).enumerate() {
                *y = T::from_f32(residual.to_f32() + x.to_f32() * mask.factor(i));
            }
        }
    }
}

pub(crate) mod reference {
    use candle_core::{Device, Result, Tensor};

    use super::{Dropout, active, batch_rows_width, kept};
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
        let mut factors = Vec::with_capacity(b * t * width);
        for index in 0..b {
            for position in 0..t {
                let key = d.row_key(index, position);
                factors.extend((0..width as u32).map(|channel| kept(d, key, channel)));
            }
        }
        // The scale is applied in the wide dtype, so that an f64 reference is exact.
        let mask = Tensor::from_vec(factors, (b, t, width), &Device::Cpu)?.to_dtype(wide_dtype(x))?;
        (mask * d.scale())?.to_dtype(x.dtype())?.to_device(x.device())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, IndexOp};

    use super::*;
    use crate::testing::{Numbers, assert_close, check_gradient, tolerance, values, weighted};

    fn place(samples: &[u32], step: u64, site: u32) -> Dropout<'_> {
        Dropout { probability: 0.1, seed: 42, step, site, samples }
    }

    fn mask(d: &Dropout, positions: usize, width: usize) -> Tensor {
        dropout(&Tensor::ones((d.samples.len(), positions, width), DType::F32, &Device::Cpu).unwrap(), Some(d)).unwrap()
    }

    #[test]
    fn a_tenth_is_dropped_and_the_mean_is_kept() {
        let mask = mask(&place(&[0, 1, 2, 3], 1, 0), 64, 512);
        let n = mask.elem_count() as f64;
        let dropped = values(&mask).iter().filter(|&&x| x == 0.0).count() as f64;
        // Four standard deviations of a binomial.
        assert!((dropped / n - 0.1).abs() < 4.0 * (0.09 / n).sqrt(), "{}", dropped / n);
        assert!((values(&mask).iter().sum::<f64>() / n - 1.0).abs() < 0.01);
        for channel in 0..512 {
            let kept = mask.i((.., .., channel)).unwrap();
            let rate = values(&kept).iter().filter(|&&x| x == 0.0).count() as f64 / 256.0;
            assert!((rate - 0.1).abs() < 6.0 * (0.09f64 / 256.0).sqrt(), "channel {channel}: {rate}");
        }
    }

    #[test]
    fn masks_of_other_samples_steps_sites_positions_and_channels_are_independent() {
        let samples = [7];
        let base = values(&mask(&place(&samples, 3, 5), 64, 512));
        let others = [
            ("sample", values(&mask(&place(&[8], 3, 5), 64, 512))),
            ("step", values(&mask(&place(&samples, 4, 5), 64, 512))),
            ("site", values(&mask(&place(&samples, 3, 6), 64, 512))),
            ("seed", values(&mask(&Dropout { seed: 43, ..place(&samples, 3, 5) }, 64, 512))),
            ("position", [&base[512..], &base[..512]].concat()),
            ("channel", [&base[1..], &base[..1]].concat()),
        ];
        for (what, other) in others {
            let n = base.len() as f64;
            let both = base.iter().zip(&other).filter(|&(&a, &b)| a == 0.0 && b == 0.0).count() as f64;
            assert!((both / n - 0.01).abs() < 5.0 * (0.0099 / n).sqrt(), "{what}: both dropped {}", both / n);
        }
    }

    #[test]
    fn the_mask_does_not_depend_on_the_cut_of_the_batch_or_on_padding() {
        let whole = mask(&place(&[4, 9, 2], 1, 1), 10, 33);
        let alone = mask(&place(&[9], 1, 1), 17, 33);
        assert_eq!(values(&whole.i((1, ..10)).unwrap()), values(&alone.i((0, ..10)).unwrap()));
    }

    #[test]
    fn kernels_agree_with_the_reference_and_backward_is_the_same_call() {
        for shape in [[1, 1, 1], [2, 7, 65], [3, 130, 96]] {
            for dtype in [DType::F32, DType::BF16, DType::F64] {
                let mut numbers = Numbers::new(5);
                let (x, residual) = (numbers.tensor(&shape, dtype), numbers.tensor(&shape, dtype));
                let samples = [3, 1, 2];
                let d = place(&samples[..shape[0]], 9, 2);
                for d in [Some(&d), None] {
                    let what = format!("{shape:?} {dtype:?}");
                    assert_close(
                        &what,
                        &dropout(&x, d).unwrap(),
                        &reference::dropout(&x, d).unwrap(),
                        tolerance(dtype),
                    );
                    let expected = reference::dropout_add(&residual, &x, d).unwrap();
                    assert_close(&what, &dropout_add(&residual, &x, d).unwrap(), &expected, tolerance(dtype));
                }
            }
        }
        let mut numbers = Numbers::new(6);
        let (x, dy) = (numbers.tensor(&[2, 3, 4], DType::F64), numbers.tensor(&[2, 3, 4], DType::F64));
        let d = place(&[0, 1], 1, 1);
        check_gradient("dx", &x, &dropout(&dy, Some(&d)).unwrap(), |x| weighted(&dropout(x, Some(&d))?, &dy));
    }

    #[test]
    fn what_cannot_be_applied_is_an_error() {
        let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu).unwrap();
        assert!(dropout(&x, Some(&place(&[1], 0, 0))).is_err(), "one sample for two sequences");
        assert!(dropout(&x, Some(&Dropout { probability: 1.0, ..place(&[1, 2], 0, 0) })).is_err());
        assert!(dropout(&x, Some(&Dropout { probability: f32::NAN, ..place(&[1, 2], 0, 0) })).is_err());
        assert!(dropout(&x.flatten_all().unwrap(), Some(&place(&[1, 2], 0, 0))).is_err());
    }
}
