//! Initialisation from scratch: transformers' `_init_weights` with a counter-based normal generator.
//!
//! Value `i` of a parameter is a pure function of (seed, parameter name, i): neither the number of
//! threads nor the order of the parameters changes it. Two consecutive values are one Box-Muller pair of
//! two splitmix64 outputs.

use std::f64::consts::TAU;
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use t5_ops::keys::{self, mix};

use crate::error::Result;
use crate::parameters::{Initial, ParameterSpec};

/// Values that a thread fills at a time; even, so that pairs stay together.
const CHUNK_VALUES: usize = 1 << 16;

/// Computes two values of a distribution from two outputs of the generator.
type Pair = fn(u64, u64) -> [f64; 2];

/// The first values of one parameter.
pub(crate) fn initial_tensor(spec: &ParameterSpec, seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = spec.shape.as_slice();
    let (pair, factor): (Pair, f64) = match spec.initial {
        Initial::Constant(value) => return Ok(Tensor::full(value as f32, shape, device)?.to_dtype(dtype)?),
        Initial::Normal { std } => (normal_pair, std),
        Initial::Uniform { bound } => (uniform_pair, bound),
    };
    let key = key(seed, &spec.name);
    let count = spec.elements() as usize;
    let tensor = if dtype == DType::F64 {
        let mut values = vec![0f64; count];
        fill(&mut values, pair, |value| value * factor, key);
        Tensor::from_vec(values, shape, device)?
    } else {
        let mut values = vec![0f32; count];
        fill(&mut values, pair, |value| (value * factor) as f32, key);
        Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?
    };
    Ok(tensor)
}

/// Bytes in memory while [`initial_tensor`] makes a parameter: the parameter, and its values in f32 where they are rounded.
pub(crate) fn making_bytes(spec: &ParameterSpec, dtype: DType) -> u64 {
    let rounded = if spec.dtype(dtype) == DType::BF16 { spec.elements() * size_of::<f32>() as u64 } else { 0 };
    spec.bytes(dtype) + rounded
}

/// The key of the name, mixed with the seed.
fn key(seed: u64, name: &str) -> u64 {
    mix(mix(seed).wrapping_add(keys::of_name(name)))
}

/// Uniform in (0, 1]: never zero, so its logarithm is finite.
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) + 1) as f64 * (-53f64).exp2()
}

/// Two values of a standard normal distribution, from two outputs of the generator.
fn normal_pair(one: u64, other: u64) -> [f64; 2] {
    let radius = (-2.0 * uniform(one).ln()).sqrt();
    let (sin, cos) = (TAU * uniform(other)).sin_cos();
    [radius * cos, radius * sin]
}

/// Two values between -1 and 1.
fn uniform_pair(one: u64, other: u64) -> [f64; 2] {
    [one, other].map(|bits| 2.0 * uniform(bits) - 1.0)
}

fn fill<T: Send>(values: &mut [T], of: Pair, convert: impl Fn(f64) -> T + Sync + Send, key: u64) {
    let per_part = values.len().div_ceil(t5_ops::threads()).next_multiple_of(CHUNK_VALUES);
    let parts: Vec<_> = values.chunks_mut(per_part).map(Mutex::new).collect();
    t5_ops::for_each_part(parts.len(), |part| {
        let mut values = parts[part].lock().expect("a part is filled once");
        let first_pair = (part * per_part / 2) as u64;
        for (pair, out) in values.chunks_mut(2).enumerate() {
            let counter = key.wrapping_add((first_pair + pair as u64) << 1);
            for (out, value) in out.iter_mut().zip(of(mix(counter), mix(counter ^ 1))) {
                *out = convert(value);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::test_device::device;

    #[test]
    fn moments_are_those_that_transformers_asks_for() {
        let config = Config { d_model: 96, d_kv: 24, num_heads: 5, d_ff: 160, vocab_size: 700, ..Config::default() };
        for spec in ParameterSpec::all(&config).iter().filter(|spec| spec.elements() > 1000) {
            let Initial::Normal { std } = spec.initial else { continue };
            let values = initial_tensor(spec, 7, DType::F32, &device()).unwrap().flatten_all().unwrap();
            let values = values.to_vec1::<f32>().unwrap();
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
            assert!(mean.abs() < 4.0 * std / n.sqrt(), "{}: mean {mean}", spec.name);
            assert!((variance.sqrt() / std - 1.0).abs() < 3.0 / n.sqrt(), "{}: std {}", spec.name, variance.sqrt());
        }
    }

    #[test]
    fn a_value_depends_on_seed_name_and_index_only() {
        let spec = |name: &str, n| ParameterSpec {
            quantisation: None,
            stored: None,
            name: name.into(),
            shape: vec![n],
            part: crate::Part::Shared,
            initial: Initial::Normal { std: 1.0 },
        };
        let values = |spec: &ParameterSpec, seed| {
            initial_tensor(spec, seed, DType::F32, &device()).unwrap().to_vec1::<f32>().unwrap()
        };
        let long = values(&spec("a", 3 * CHUNK_VALUES + 5), 1);
        assert_eq!(long[..CHUNK_VALUES - 1], values(&spec("a", CHUNK_VALUES - 1), 1));
        assert_ne!(long[..8], values(&spec("b", 8), 1));
        assert_ne!(long[..8], values(&spec("a", 8), 2));
        // No two values of the sequence are equal: the counter does not repeat.
        let mut sorted = long.clone();
        sorted.sort_by(f32::total_cmp);
        sorted.dedup();
        assert!(sorted.len() > long.len() * 98 / 100);
    }
}
