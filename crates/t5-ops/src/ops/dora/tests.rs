use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, device, tolerance};
use crate::{Precision, Quantised};

const SHAPES: [(usize, usize, usize, usize); 4] = [(1, 1, 1, 1), (7, 33, 65, 3), (70, 300, 257, 16), (3, 8, 64, 5)];

#[test]
fn kernels_agree_with_the_reference() {
    for (rows, n, k, rank) in SHAPES {
        for dtype in [DType::F32, DType::BF16] {
            let mut numbers = Numbers::new(5);
            let weight = numbers.tensor(&[n, k], dtype);
            let (a, b) = (numbers.tensor(&[rank, k], DType::F32), numbers.tensor(&[n, rank], DType::F32));
            let lengths = adapted_row_norms(&weight, &a, &b, 0.7).unwrap();
            let expected = reference::adapted_row_norms(&weight, &a, &b, 0.7).unwrap();
            assert_eq!((lengths.dtype(), lengths.dims()), (DType::F32, &[n][..]));
            assert_close("lengths", &lengths, &expected, 2e-5);

            let (y, z) = (numbers.tensor(&[2, rows, n], dtype), numbers.tensor(&[2, rows, n], dtype));
            let expected = reference::scale_columns(&y, &lengths).unwrap();
            let scaled = scale_columns(y.copy().unwrap(), &lengths).unwrap();
            assert_eq!(scaled.dtype(), dtype);
            assert_close("scaled", &scaled, &expected, tolerance(dtype));

            let [got, expected] = [1, 1].map(|_| Numbers::new(2).tensor(&[n], DType::F32));
            magnitude_backward(&y, &z, &lengths, &got).unwrap();
            reference::magnitude_backward(&y, &z, &lengths, &expected).unwrap();
            assert_close("dmagnitude", &got, &expected, tolerance(DType::F32) * 10.0);
        }
    }
}

#[test]
fn without_an_adapter_they_are_the_lengths_of_the_rows() {
    let weight = Tensor::new(&[[3f32, 4.0], [0.0, 2.0]], &device()).unwrap();
    let (a, b) = (Numbers::new(1).tensor(&[4, 2], DType::F32), weight.zeros_like().unwrap().repeat((1, 2)).unwrap());
    assert_eq!(adapted_row_norms(&weight, &a, &b, 2.0).unwrap().to_vec1::<f32>().unwrap(), [5.0, 2.0]);
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut numbers = Numbers::new(3);
    let (weight, a, b) =
        (numbers.tensor(&[4, 6], DType::F32), numbers.tensor(&[2, 6], DType::F32), numbers.tensor(&[4, 2], DType::F32));
    let lengths = adapted_row_norms(&weight, &a, &b, 1.0).unwrap();
    assert!(adapted_row_norms(&weight, &b, &a, 1.0).is_err());
    assert!(scale_columns(weight.clone(), &lengths).is_err());
    assert!(magnitude_backward(&weight, &weight, &lengths, &lengths).is_err());
    assert!(magnitude_backward(&weight.t().unwrap(), &weight, &lengths, &lengths).is_err());
}

#[test]
fn a_narrow_weight_has_the_lengths_of_its_values() {
    // The host alone: codes are made there. `tests/device` has them on a card.
    if !device().is_cpu() {
        return;
    }
    let (n, k, rank) = (70, 96, 5);
    let mut numbers = Numbers::new(6);
    let weight = numbers.tensor(&[n, k], DType::F32);
    let (a, b) = (numbers.tensor(&[rank, k], DType::F32), numbers.tensor(&[n, rank], DType::F32));
    let lengths = |weight: Weight<'_>| adapted_row_norms(weight, &a, &b, 0.7).unwrap().to_vec1::<f32>().unwrap();
    let nf4 = Quantised::quantise(&weight, Precision::Nf4).unwrap();
    assert_eq!(lengths((&nf4).into()), lengths((&nf4.dequantised().unwrap()).into()));
    let f16 = weight.to_dtype(DType::F16).unwrap();
    assert_eq!(lengths((&f16).into()), lengths((&f16.to_dtype(DType::F32).unwrap()).into()));
}
