use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, autograd, check_gradient, device, tolerance, values, weighted};

const ALL: [Activation; 4] = [Activation::Relu, Activation::GeluNew, Activation::Gelu, Activation::Silu];

fn place(samples: &[u32]) -> Dropout<'_> {
    Dropout { probability: 0.25, seed: 1, step: 2, site: 3, samples }
}

#[test]
fn values_are_those_of_pytorch() {
    // torch.nn.functional of [-3, -0.5, 0, 0.5, 3].
    let x = Tensor::new(&[-3f64, -0.5, 0.0, 0.5, 3.0], &device()).unwrap();
    let expected = [
        (Activation::Relu, [0.0, 0.0, 0.0, 0.5, 3.0]),
        (Activation::GeluNew, [-0.00363739, -0.15428599, 0.0, 0.34571401, 2.99636261]),
        (Activation::Gelu, [-0.00404969, -0.15426877, 0.0, 0.34573123, 2.99595031]),
        (Activation::Silu, [-0.14227762, -0.18877033, 0.0, 0.31122967, 2.85772238]),
    ];
    for (a, expected) in expected {
        for dtype in [DType::F64, DType::F32] {
            let got = values(&feed_forward_activation(&x.to_dtype(dtype).unwrap(), None, a, None).unwrap());
            for (got, expected) in got.iter().zip(expected) {
                assert!((got - expected).abs() < 5e-7, "{a:?} {dtype:?}: expected {expected}, got {got}");
            }
        }
    }
}

#[test]
fn the_reference_agrees_with_finite_differences_and_autograd() {
    let mut numbers = Numbers::new(11);
    let shape = [2, 3, 5];
    let [gate, up, dh] = [0; 3].map(|_| numbers.tensor(&shape, DType::F64));
    for a in ALL {
        for d in [None, Some(&place(&[4, 5]))] {
            let what = format!("{a:?}");
            let (h, dgate, dup) =
                feed_forward_activation_backward(gate.clone(), Some(up.clone()), a, d, dh.clone()).unwrap();
            let dup = dup.unwrap();
            assert_close(&what, &h, &feed_forward_activation(&gate, Some(&up), a, d).unwrap(), 0.0);
            let value = |gate: &Tensor, up: &Tensor| weighted(&feed_forward_activation(gate, Some(up), a, d)?, &dh);
            check_gradient(&what, &gate, &dgate, |gate| value(gate, &up));
            check_gradient(&what, &up, &dup, |up| value(&gate, up));
            let expected =
                autograd(&[&gate, &up], &dh, |t| reference::feed_forward_activation(&t[0], Some(&t[1]), a, d));
            assert_close(&what, &dgate, &expected[0], 1e-9);
            assert_close(&what, &dup, &expected[1], 1e-9);
            let (_, dgate, none) = feed_forward_activation_backward(gate.clone(), None, a, d, dh.clone()).unwrap();
            assert!(none.is_none());
            check_gradient(&what, &gate, &dgate, |gate| weighted(&feed_forward_activation(gate, None, a, d)?, &dh));
        }
    }
}

#[test]
fn kernels_agree_with_the_reference() {
    for shape in [[1, 1, 1], [2, 7, 65], [2, 100, 96]] {
        for dtype in [DType::F32, DType::BF16] {
            let mut numbers = Numbers::new(12);
            let [gate, up, dh] =
                [0; 3].map(|_| (numbers.tensor(&shape, DType::F32) * 4.0).unwrap().to_dtype(dtype).unwrap());
            let samples = [4, 5];
            let d = place(&samples[..shape[0]]);
            for a in ALL {
                for d in [None, Some(&d)] {
                    for up in [None, Some(&up)] {
                        let what = format!("{shape:?} {dtype:?} {a:?}");
                        let h = feed_forward_activation(&gate, up, a, d).unwrap();
                        let expected = reference::feed_forward_activation(&gate, up, a, d).unwrap();
                        assert_close(&what, &h, &expected, tolerance(dtype));
                        let copy = |x: &Tensor| x.copy().unwrap();
                        let got = feed_forward_activation_backward(copy(&gate), up.map(copy), a, d, copy(&dh)).unwrap();
                        let expected = reference::feed_forward_activation_backward(&gate, up, a, d, &dh).unwrap();
                        assert_close(&what, &got.0, &h, 0.0);
                        assert_close(&what, &got.1, &expected.0, tolerance(dtype));
                        assert_eq!(got.2.is_some(), up.is_some());
                        if let (Some(got), Some(expected)) = (got.2, expected.1) {
                            assert_close(&what, &got, &expected, tolerance(dtype));
                        }
                    }
                }
            }
        }
    }
}
