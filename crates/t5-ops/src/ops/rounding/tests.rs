use candle_core::{DType, Tensor};
use half::bf16;

use super::*;
use crate::random_mask::hash;
use crate::storage::Element;
use crate::testing::device;

fn rounded(x: f32, n: usize, key: u64) -> Vec<f32> {
    let row = Rounding::Stochastic { key }.row(3).unwrap();
    (0..n).map(|i| <bf16 as Element>::from_f32_stochastic(x, hash(row, i as u32)).to_f32()).collect()
}

#[test]
fn a_value_becomes_one_of_its_two_neighbours_and_is_kept_on_average() {
    for x in [1.0 + 1.0 / 1024.0, -3.301_592_7, 1.999_9, 65_280.5, -1.0e-3, 2.0e-40] {
        let values = rounded(x, 40_000, 17);
        let magnitude = x.abs().to_bits() & 0xFFFF_0000;
        let (low, high) = (f32::from_bits(magnitude).copysign(x), f32::from_bits(magnitude + 0x1_0000).copysign(x));
        assert!(values.iter().all(|&v| v == low || v == high), "{x}");
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
        // Four standard deviations of a coin between the neighbours, at worst a fair one.
        let tolerance = f64::from((high - low).abs()) * 0.5 * 4.0 / 200.0;
        assert!((mean - f64::from(x)).abs() < tolerance, "{x}: mean {mean}");
    }
}

#[test]
fn what_bf16_can_hold_stays_and_what_is_not_finite_stays_so() {
    for x in [0.0, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(rounded(x, 1000, 3).iter().all(|v| v.to_bits() == x.to_bits()), "{x}");
    }
    for bits in [0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001] {
        assert!(rounded(f32::from_bits(bits), 1000, 3).iter().all(|v| v.is_nan()), "{bits:x}");
    }
}

#[test]
fn another_key_or_row_is_other_noise_and_the_same_is_the_same() {
    let x = 1.0 + 1.0 / 256.0;
    assert_eq!(rounded(x, 200, 5), rounded(x, 200, 5));
    assert_ne!(rounded(x, 200, 5), rounded(x, 200, 6));
    let row = |row| {
        let key = Rounding::Stochastic { key: 5 }.row(row).unwrap();
        (0..200).map(|i| hash(key, i)).collect::<Vec<_>>()
    };
    assert_ne!(row(0), row(1));
}

#[test]
fn the_reference_rounds_to_the_same_bits_as_the_kernels() {
    let values: Vec<f32> = (0..7 * 33).map(|i| (i as f32 - 100.0) * 0.0173).collect();
    let x = Tensor::from_vec(values.clone(), (7, 33), &device()).unwrap();
    let rounding = Rounding::Stochastic { key: 99 };
    let got = reference::rounded(&x, DType::BF16, rounding).unwrap().flatten_all().unwrap();
    for (i, (got, x)) in got.to_vec1::<bf16>().unwrap().into_iter().zip(values).enumerate() {
        let noise = hash(rounding.row(i / 33).unwrap(), (i % 33) as u32);
        assert_eq!(got, <bf16 as Element>::from_f32_stochastic(x, noise), "element {i}");
    }
}
