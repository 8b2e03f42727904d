use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance, values, weighted};

#[test]
fn the_reference_agrees_with_finite_differences() {
    let mut numbers = Numbers::new(2);
    let (x, dy) = ((numbers.tensor(&[3, 7], DType::F64) * 6.0).unwrap(), numbers.tensor(&[3, 7], DType::F64));
    let dx = soft_cap_backward(&x, dy.copy().unwrap(), 2.5).unwrap();
    check_gradient("dx", &x, &dx, |x| weighted(&soft_cap(x.copy()?, 2.5)?, &dy));
}

#[test]
fn kernels_agree_with_the_reference() {
    for dtype in [DType::F32, DType::BF16] {
        for (n, range) in [(1, 1.0), (33, 0.01), (3000, 20.0), (70_000, 500.0)] {
            let mut numbers = Numbers::new(n as u64);
            let x = (numbers.tensor(&[n], DType::F32) * range).unwrap().to_dtype(dtype).unwrap();
            let dy = numbers.tensor(&[n], dtype);
            let y = soft_cap(x.copy().unwrap(), 30.0).unwrap();
            assert_close("y", &y, &reference::soft_cap(&x, 30.0).unwrap(), tolerance(dtype));
            let dx = soft_cap_backward(&x, dy.copy().unwrap(), 30.0).unwrap();
            assert_close("dx", &dx, &reference::soft_cap_backward(&x, &dy, 30.0).unwrap(), tolerance(dtype));
        }
    }
}

#[test]
fn small_values_keep_their_relative_accuracy_and_no_value_is_above_the_cap() {
    let x = Tensor::new(&[1e-6f32, -3e-4, 0.02, 1e9, f32::NEG_INFINITY, f32::NAN], &device()).unwrap();
    let y = values(&soft_cap(x.copy().unwrap(), 50.0).unwrap());
    for (x, y) in values(&x).into_iter().zip(&y).take(3) {
        assert!((y / (50.0 * (x / 50.0).tanh()) - 1.0).abs() < 1e-6, "{x}: {y}");
    }
    assert_eq!(y[3..5], [50.0, -50.0]);
    assert!(y[5].is_nan());
    assert!(soft_cap(x, 0.0).is_err());
}
