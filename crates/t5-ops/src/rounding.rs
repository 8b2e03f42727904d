//! Rounding of an updated parameter to bf16: to the nearest value, or stochastically.
//!
//! A bf16 has eight significant bits: an update below 1/512 of its parameter is lost when it is rounded to
//! the nearest value, every time. Rounded up or down with the probabilities that make the expected value the
//! exact one, it is kept on average, and no copy of the parameters in f32 is needed (Zamirai et al. 2020,
//! "Revisiting BFloat16 Training", section 4).
//!
//! The noise is a hash of (key, row, column): a function of what an element is, never of threads or order.

use crate::dropout::RowKey;

/// How an updated parameter in bf16 is rounded; in f32 and f64 there is nothing to round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    Nearest,
    /// Up or down, at random and right on average.
    Stochastic {
        /// What the noise of this tensor at this update is a function of, beside the element's place.
        key: u64,
    },
}

impl Rounding {
    /// The noise of a row, if there is any.
    pub(crate) fn row(self, row: usize) -> Option<RowKey> {
        match self {
            Rounding::Nearest => None,
            Rounding::Stochastic { key } => Some(RowKey::new(key, row as u64)),
        }
    }
}

pub(crate) mod reference {
    use candle_core::{DType, Device, Result, Tensor};
    use half::bf16;

    use super::Rounding;
    use crate::dropout::hash;

    /// `x`, in f32 or f64, as a tensor of `dtype`; rows are along the last dimension.
    pub fn rounded(x: &Tensor, dtype: DType, rounding: Rounding) -> Result<Tensor> {
        if dtype != DType::BF16 || rounding == Rounding::Nearest {
            return x.to_dtype(dtype);
        }
        let width = x.dims().last().copied().unwrap_or(1).max(1);
        let values = x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let round = |(i, x): (usize, f32)| {
            let Some(key) = rounding.row(i / width).filter(|_| x.is_finite()) else { return bf16::from_f32(x) };
            // The bits that bf16 leaves off are a fraction of its spacing; the noise is a uniform one.
            let (below, fraction) = (x.to_bits() >> 16, x.to_bits() & 0xFFFF);
            let noise = hash(key, (i % width) as u32) >> 16;
            bf16::from_bits((below + u32::from(fraction + noise >= 1 << 16)) as u16)
        };
        let rounded: Vec<bf16> = values.into_iter().enumerate().map(round).collect();
        Tensor::from_vec(rounded, x.shape(), &Device::Cpu)?.to_device(x.device())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use half::bf16;

    use super::*;
    use crate::dropout::hash;
    use crate::storage::Element;

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
        let x = Tensor::from_vec(values.clone(), (7, 33), &Device::Cpu).unwrap();
        let rounding = Rounding::Stochastic { key: 99 };
        let got = reference::rounded(&x, DType::BF16, rounding).unwrap().flatten_all().unwrap();
        for (i, (got, x)) in got.to_vec1::<bf16>().unwrap().into_iter().zip(values).enumerate() {
            let noise = hash(rounding.row(i / 33).unwrap(), (i % 33) as u32);
            assert_eq!(got, <bf16 as Element>::from_f32_stochastic(x, noise), "element {i}");
        }
    }
}
