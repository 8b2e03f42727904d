//! The update in plain candle operations.

use candle_core::{D, DType, Result, Tensor};
use tensor_storage::overwrite;

use super::map::{BLOCK, Map, signed, unsigned};
use super::{AdamwInt8Update, QuantisedMoment};
use crate::dispatch::wide_dtype;
use crate::ops::adamw::reference::adamw;

/// See [`crate::adamw_int8_of_each`].
pub fn adamw_int8(update: &AdamwInt8Update) -> Result<()> {
    let maps = [signed(), unsigned()];
    let [first, second] = update.moments;
    let dtype = wide_dtype(update.param);
    let [m, v] = [values(&first, maps[0], dtype)?, values(&second, maps[1], dtype)?];
    adamw(update.param, update.grad, &m, &v, &update.hyper)?;
    quantise(&first, &m, maps[0])?;
    quantise(&second, &v, maps[1])
}

/// The values of a moment, in its shape.
fn values(moment: &QuantisedMoment, map: &Map, dtype: DType) -> Result<Tensor> {
    let (shape, count) = (moment.codes.shape(), moment.codes.elem_count());
    let numbers = Tensor::new(map.numbers.as_slice(), moment.codes.device())?.to_dtype(dtype)?;
    // candle takes the largest index of a dtype for none.
    let values = numbers.index_select(&moment.codes.flatten_all()?.to_dtype(DType::U32)?, 0)?;
    let values = in_blocks(&values)?.broadcast_mul(&moment.largest.to_dtype(dtype)?.unsqueeze(1)?)?;
    values.flatten_all()?.narrow(0, 0, count)?.reshape(shape)
}

/// Values (N) as blocks (ceil(N / 256), 256), with zeros at the end.
fn in_blocks(values: &Tensor) -> Result<Tensor> {
    let blocks = values.elem_count().div_ceil(BLOCK);
    values.pad_with_zeros(0, 0, blocks * BLOCK - values.elem_count())?.reshape((blocks, BLOCK))
}

/// Replaces the values of a moment.
fn quantise(moment: &QuantisedMoment, values: &Tensor, map: &Map) -> Result<()> {
    let count = values.elem_count();
    let blocks = in_blocks(&values.flatten_all()?.to_dtype(DType::F32)?)?;
    let largest = blocks.abs()?.max_keepdim(D::Minus1)?; // (blocks, 1)
    let scaled = blocks.broadcast_mul(&largest.maximum(1e-38)?.recip()?)?.clamp(-1.0, 1.0)?.flatten_all()?;
    // The number of bounds below each value, found by halves.
    let bounds = Tensor::new(map.bounds.as_slice(), scaled.device())?;
    let mut codes = Tensor::zeros(scaled.shape(), DType::U32, scaled.device())?;
    for half in [128u32, 64, 32, 16, 8, 4, 2, 1] {
        let probed = codes.broadcast_add(&Tensor::new(&[half - 1], scaled.device())?)?;
        let is_below = bounds.index_select(&probed, 0)?.lt(&scaled)?.to_dtype(DType::U32)?;
        codes = (codes + is_below.broadcast_mul(&Tensor::new(&[half], scaled.device())?)?)?;
    }
    overwrite(moment.codes, &codes.narrow(0, 0, count)?.to_dtype(DType::U8)?.reshape(values.shape())?)?;
    overwrite(moment.largest, &largest.flatten_all()?)
}
