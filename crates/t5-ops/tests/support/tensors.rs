//! Tensors of tests: values that are the same each time, and the bits of results.

use candle_core::{DType, Device, Tensor};

#[path = "../../../cuda-device/tests/support/emulated.rs"]
mod emulated;

#[allow(unused_imports, reason = "some tests ask for no emulated card")]
pub use self::emulated::{is_emulated, test_alone};

/// Numbers in [-1, 1), the same each time for a seed and a shape.
#[allow(dead_code, reason = "some tests have numbers of their own")]
pub fn tensor(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let number = |i: usize| (t5_ops::keys::mix(seed << 32 | i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_vec(values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

/// The bits of all elements as f32, which represents every bf16.
#[allow(dead_code, reason = "some tests compare values")]
pub fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    x.into_iter().map(f32::to_bits).collect()
}
