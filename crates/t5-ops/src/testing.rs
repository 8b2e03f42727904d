//! Shared by the tests of the operations: reproducible tensors, comparisons, finite differences.

#[path = "../../cuda-device/tests/support/device.rs"]
mod test_device;

use candle_core::{DType, Device, Result, Tensor, Var};

pub(crate) use self::test_device::device;

/// A reproducible stream of numbers in [-1, 1).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> f64 {
        // xorshift64* (Vigna 2016).
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (((self.next() + 1.0) / 2.0 * n as f64) as usize).min(n - 1)
    }

    pub(crate) fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let n = shape.iter().product();
        let values: Vec<f64> = (0..n).map(|_| self.next()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(&device()).unwrap()
    }
}

pub(crate) fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Panics unless every element differs by at most `tolerance` times the largest expected magnitude.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), expected.dims(), "{what}: shape");
    let (got, expected) = (values(got), values(expected));
    let scale = expected.iter().filter(|x| x.is_finite()).fold(1e-30f64, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        let same = g == e || (g - e).abs() <= tolerance * scale;
        assert!(same, "{what}: element {i}: expected {e}, got {g} (scale {scale}, tolerance {tolerance})");
    }
}

/// The tolerance of a kernel in `dtype` against its reference.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        _ => 2e-2,
    }
}

/// Checks `gradient` of the scalar function `f` at `x` (f64) by central differences in some coordinates.
#[track_caller]
pub(crate) fn check_gradient(what: &str, x: &Tensor, gradient: &Tensor, f: impl Fn(&Tensor) -> Result<f64>) {
    assert_eq!(x.dims(), gradient.dims(), "{what}: shape of the gradient");
    let (at, gradient) = (values(x), values(gradient));
    let scale = gradient.iter().fold(1e-3f64, |m, g| m.max(g.abs()));
    let mut numbers = Numbers::new(at.len() as u64 + 17);
    for _ in 0..8 {
        let i = numbers.below(at.len());
        let step = 1e-5;
        let value = |delta: f64| {
            let mut moved = at.clone();
            moved[i] += delta;
            f(&Tensor::from_vec(moved, x.shape(), &device()).unwrap()).unwrap()
        };
        let expected = (value(step) - value(-step)) / (2.0 * step);
        let error = (gradient[i] - expected).abs();
        assert!(error <= 1e-6 * scale, "{what}: coordinate {i}: expected {expected}, got {}", gradient[i]);
    }
}

/// The sum of `weights * x`: a scalar whose gradient with respect to `x` is `weights`.
pub(crate) fn weighted(x: &Tensor, weights: &Tensor) -> Result<f64> {
    (x * weights)?.sum_all()?.to_dtype(DType::F64)?.to_scalar()
}

/// The gradients of `sum(weights * f(inputs))` by candle's autograd.
pub(crate) fn autograd(inputs: &[&Tensor], weights: &Tensor, f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Tensor> {
    let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let loss = (f(&tensors).unwrap() * weights).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    vars.iter().map(|v| gradients.get(v).expect("a gradient for every input").clone()).collect()
}
