use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, device, tolerance};

#[test]
fn the_sum_of_squares_is_that_of_the_reference() {
    for shape in [&[1][..], &[7, 65], &[300, 700]] {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let x = Numbers::new(3).tensor(shape, dtype);
            let (got, expected) = (square_sum(&x).unwrap(), reference::square_sum(&x).unwrap());
            assert!((got / expected - 1.0).abs() < 1e-6, "{shape:?} {dtype:?}: expected {expected}, got {got}");
        }
    }
}

#[test]
fn what_is_not_finite_shows_in_the_sum() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut data = vec![1f32; 1000];
        data[777] = bad;
        assert!(!square_sum(&Tensor::new(data, &device()).unwrap()).unwrap().is_finite());
    }
}

#[test]
fn zero_clears_in_place() {
    for (shape, dtype) in [((3, 4), DType::F32), ((301, 400), DType::BF16), ((3, 4), DType::F64)] {
        let x = Tensor::ones(shape, dtype, &device()).unwrap();
        let (same, part) = (x.clone(), x.narrow(0, 1, 1).unwrap());
        zero(&part).unwrap();
        assert_eq!(square_sum(&same).unwrap(), ((shape.0 - 1) * shape.1) as f64);
        zero(&x).unwrap();
        assert_eq!(square_sum(&same).unwrap(), 0.0);
    }
}

#[test]
fn two_tensors_are_added_as_the_reference_adds_them() {
    // The host alone: it has bytes to compare.
    if !device().is_cpu() {
        return;
    }
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let mut numbers = Numbers::new(7);
        let [sum, x] = [&[301, 65][..]; 2].map(|shape| numbers.tensor(shape, dtype));
        let expected = sum.copy().unwrap();
        reference::add_in_place(&expected, &x).unwrap();
        add_in_place(&sum, &x).unwrap();
        let [got, expected] = [&sum, &expected].map(|t| tensor_storage::with_bytes(t, <[u8]>::to_vec).unwrap());
        assert_eq!(got, expected, "{dtype:?}");
        assert!(add_in_place(&sum, &x.t().unwrap()).is_err());
        // The kernels cannot read memory that they write; the reference makes a copy first.
        assert_eq!(add_in_place(&sum, &sum).is_err(), dtype != DType::F64, "{dtype:?}");
    }
}

#[test]
fn a_multiple_is_that_of_the_reference() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = Numbers::new(8).tensor(&[301, 65], dtype);
        for x in [x.clone(), x.t().unwrap()] {
            let (got, expected) = (scaled(&x, 0.3).unwrap(), reference::scaled(&x, 0.3).unwrap());
            assert_eq!((got.dtype(), got.dims()), (dtype, x.dims()));
            assert_close("scaled", &got, &expected, tolerance(dtype));
        }
    }
}
