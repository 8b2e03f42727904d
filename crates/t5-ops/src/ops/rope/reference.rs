//! Rotations in plain candle operations.

use candle_core::{Result, Tensor};

use super::Rope;
use crate::dispatch::{wide, wide_dtype};

/// See [`crate::rope`].
pub fn rope(x: &Tensor, heads: usize, rope: &Rope) -> Result<Tensor> {
    rotated(x, heads, rope, false)
}

/// See [`crate::rope_backward`].
pub fn rope_backward(dy: &Tensor, heads: usize, rope: &Rope) -> Result<Tensor> {
    rotated(dy, heads, rope, true)
}

pub(super) fn rotated(x: &Tensor, heads: usize, rope: &Rope, back: bool) -> Result<Tensor> {
    let (batch, length, width) = x.dims3()?;
    let half = width / heads / 2;
    let (mut cos, mut sin) = (Vec::with_capacity(length * half), Vec::with_capacity(length * half));
    let frequencies = rope.frequencies(2 * half);
    for position in rope.first_position..rope.first_position + length {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            cos.push(angle.cos() as f32);
            sin.push(if back { -angle.sin() } else { angle.sin() } as f32);
        }
    }
    let table = |of: Vec<f32>| {
        Tensor::from_vec(of, (1, length, 1, half), &candle_core::Device::Cpu)?
            .to_dtype(wide_dtype(x))?
            .to_device(x.device())
    };
    let (cos, sin) = (table(cos)?, table(sin)?);
    let by_heads = wide(x)?.reshape((batch, length, heads, 2 * half))?;
    let (first, second) = (by_heads.narrow(3, 0, half)?, by_heads.narrow(3, half, half)?);
    let rotated = [
        (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?,
        (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?,
    ];
    Tensor::cat(&rotated, 3)?.reshape(x.dims())?.to_dtype(x.dtype())
}
