use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, autograd, check_gradient, tolerance, weighted};

#[test]
fn the_reference_agrees_with_finite_differences_and_autograd() {
    let mut numbers = Numbers::new(1);
    let [x, w, dy] = [&[2, 3, 5][..], &[4, 5], &[2, 3, 4]].map(|shape| numbers.tensor(shape, DType::F64));
    let dx = linear_backward_input(&dy, &w, None).unwrap();
    let dw = w.zeros_like().unwrap();
    linear_backward_weight(&dy, &x, &dw, true).unwrap();
    check_gradient("dx", &x, &dx, |x| weighted(&linear(x, &w)?, &dy));
    check_gradient("dw", &w, &dw, |w| weighted(&linear(&x, w)?, &dy));
    let expected = autograd(&[&x, &w], &dy, |t| reference::linear(&t[0], &t[1]));
    assert_close("dx", &dx, &expected[0], 1e-12);
    assert_close("dw", &dw, &expected[1], 1e-12);
}

#[test]
fn kernels_agree_with_the_reference() {
    for (case, (b, t, n, k)) in
        [(1, 1, 1, 1), (2, 7, 65, 33), (3, 65, 1, 7), (1, 100, 96, 64), (2, 128, 300, 257)].into_iter().enumerate()
    {
        let dtypes = [DType::F32, DType::BF16].map(|dtype| [DType::F32, DType::BF16].map(|weight| (dtype, weight)));
        for (dtype, weight_dtype) in dtypes.into_iter().flatten() {
            let mut numbers = Numbers::new(case as u64);
            let x = numbers.tensor(&[t, b, k], dtype).transpose(0, 1).unwrap();
            let dy = numbers.tensor(&[t, b, n], dtype).transpose(0, 1).unwrap();
            let w = numbers.tensor(&[k, n], weight_dtype).t().unwrap();
            let sum = numbers.tensor(&[b, t, k], dtype);
            let dws = [numbers.tensor(&[n, k], DType::F32), numbers.tensor(&[n, k], DType::BF16)];
            let what = format!("({b}, {t}, {n}, {k}) {dtype:?}");
            let close = |name, got: &Tensor, expected: &Tensor| {
                assert_eq!(got.dtype(), expected.dtype());
                assert_close(&format!("{what} {name}"), got, expected, tolerance(dtype));
            };
            close("y", &linear(&x, &w).unwrap(), &reference::linear(&x, &w).unwrap());
            for rank in [1, 8, 33] {
                let u = numbers.tensor(&[rank, t, b], dtype).t().unwrap().transpose(0, 2).unwrap();
                let u = u.reshape((b, t, rank)).unwrap();
                let (of_y, of_dx) =
                    (numbers.tensor(&[n, rank], weight_dtype), numbers.tensor(&[rank, k], weight_dtype));
                let [of_y, of_dx] = [&of_y, &of_dx].map(|w| Some(AddedProduct { x: &u, w }));
                let expected = reference::linear_plus_product(&x, &w, of_y).unwrap();
                close("y beside", &linear_plus_product(&x, &w, of_y).unwrap(), &expected);
                for sum in [None, Some(&sum)] {
                    let expected = reference::linear_backward_input_plus_product(&dy, &w, of_dx, sum.cloned()).unwrap();
                    let sum = sum.map(|sum| sum.copy().unwrap());
                    close("dx beside", &linear_backward_input_plus_product(&dy, &w, of_dx, sum).unwrap(), &expected);
                }
            }
            let expected = reference::linear_backward_input(&dy, &w, None).unwrap();
            close("dx", &linear_backward_input(&dy, &w, None).unwrap(), &expected);
            let expected = reference::linear_backward_input(&dy, &w, Some(sum.clone())).unwrap();
            close("dx +=", &linear_backward_input(&dy, &w, Some(sum)).unwrap(), &expected);
            for dw in dws {
                let expected = dw.copy().unwrap();
                for (name, accumulate) in [("dw +=", true), ("dw =", false)] {
                    reference::linear_backward_weight(&dy, &x, &expected, accumulate).unwrap();
                    linear_backward_weight(&dy, &x, &dw, accumulate).unwrap();
                    assert_eq!(dw.dtype(), expected.dtype());
                    let loosest = if dw.dtype() == DType::BF16 { DType::BF16 } else { dtype };
                    assert_close(&format!("{what} {name}"), &dw, &expected, tolerance(loosest));
                }
            }
        }
    }
}

#[test]
fn a_weight_in_bf16_gives_the_bits_of_the_same_values_in_f32() {
    for (rows, n, k) in [(1, 300, 257), (5, 64, 128), (70, 33, 600)] {
        let mut numbers = Numbers::new(9);
        let half = numbers.tensor(&[n, k], DType::BF16);
        let whole = half.to_dtype(DType::F32).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let (x, dy) = (numbers.tensor(&[rows, k], dtype), numbers.tensor(&[rows, n], dtype));
            let bits = |y: Tensor| y.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(bits(linear(&x, &half).unwrap()), bits(linear(&x, &whole).unwrap()), "{rows} x {n} {dtype:?}");
            let dx = |w: &Tensor| bits(linear_backward_input(&dy, w, None).unwrap());
            assert_eq!(dx(&half), dx(&whole), "{rows} x {n} {dtype:?}");
        }
    }
}

#[test]
fn accumulating_twice_adds_twice() {
    for dtype in [DType::F32, DType::F64] {
        let mut numbers = Numbers::new(7);
        let (x, dy) = (numbers.tensor(&[6, 3], dtype), numbers.tensor(&[6, 2], dtype));
        let (once, twice) =
            (Tensor::zeros((2, 3), dtype, x.device()).unwrap(), Tensor::zeros((2, 3), dtype, x.device()).unwrap());
        linear_backward_weight(&dy, &x, &once, true).unwrap();
        linear_backward_weight(&dy, &x, &twice, true).unwrap();
        linear_backward_weight(&dy, &x, &twice, true).unwrap();
        assert_close("twice", &twice, &(once * 2.0).unwrap(), tolerance(dtype));
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut numbers = Numbers::new(3);
    let (x, w) = (numbers.tensor(&[2, 3], DType::F32), numbers.tensor(&[4, 5], DType::F32));
    let message = linear(&x, &w).unwrap_err().to_string();
    assert!(message.contains("expected shape [4, 3], got [4, 5]"), "{message}");
    assert!(linear_backward_input(&x, &w, None).is_err());
    let w = numbers.tensor(&[4, 3], DType::F32);
    assert!(
        linear_backward_input(&x, &w.t().unwrap(), Some(x.narrow(1, 0, 2).unwrap())).is_err(),
        "a sum of another width"
    );
    for (u, b) in [([2, 5], [4, 6]), ([3, 5], [4, 5]), ([2, 5], [3, 5])] {
        let [u, b] = [u, b].map(|shape| numbers.tensor(&shape, DType::F32));
        let error = linear_plus_product(&x, &w, Some(AddedProduct { x: &u, w: &b })).unwrap_err().to_string();
        assert!(error.contains("beside: expected"), "{error}");
    }
    assert!(linear_backward_weight(&x, &x, &w, true).is_err());
    let square = numbers.tensor(&[3, 3], DType::F32);
    assert!(linear_backward_weight(&square, &square, &square, true).is_err(), "an accumulator that is an operand");
    assert!(linear_backward_weight(&square, &x.t().unwrap(), &w.t().unwrap(), true).is_err());
}
