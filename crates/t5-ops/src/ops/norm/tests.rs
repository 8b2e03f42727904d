use super::*;
use crate::testing::{Numbers, assert_close, autograd, check_gradient, device, tolerance, weighted};

const EPS: f64 = 1e-6;

#[test]
fn the_reference_agrees_with_finite_differences_and_autograd() {
    let mut numbers = Numbers::new(2);
    let [x, weight, dy] = [&[2, 3, 5][..], &[5], &[2, 3, 5]].map(|shape| numbers.tensor(shape, DType::F64));
    let (_, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
    let dweight = weight.zeros_like().unwrap();
    let dx = rms_norm_backward(&x, &weight, &inv_rms, dy.clone(), None, Some(&dweight)).unwrap();
    check_gradient("dx", &x, &dx, |x| weighted(&rms_norm(x, &weight, EPS)?.0, &dy));
    check_gradient("dweight", &weight, &dweight, |w| weighted(&rms_norm(&x, w, EPS)?.0, &dy));
    let expected = autograd(&[&x, &weight], &dy, |t| Ok(reference::rms_norm(&t[0], &t[1], EPS)?.0));
    assert_close("dx", &dx, &expected[0], 1e-12);
    assert_close("dweight", &dweight, &expected[1], 1e-12);
}

#[test]
fn kernels_agree_with_the_reference() {
    for (rows, width) in [(1, 1), (7, 65), (65, 7), (3, 512), (700, 96)] {
        for (dtype, weight_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)] {
            let mut numbers = Numbers::new(rows as u64);
            let x = numbers.tensor(&[width, rows], dtype).t().unwrap();
            let dy = numbers.tensor(&[width, rows], dtype).t().unwrap();
            let weight = numbers.tensor(&[width], weight_dtype);
            let dweight = numbers.tensor(&[width], DType::F32);
            let expected_dweight = dweight.copy().unwrap();
            let (y, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
            let (expected_y, expected_inv) = reference::rms_norm(&x, &weight, EPS).unwrap();
            let close = |name, got: &Tensor, expected: &Tensor, tolerance| {
                assert_eq!(got.dtype(), expected.dtype());
                assert_close(&format!("({rows}, {width}) {dtype:?} {name}"), got, expected, tolerance);
            };
            close("y", &y, &expected_y, tolerance(dtype));
            close("inv_rms", &inv_rms, &expected_inv, 1e-5);
            let residual = numbers.tensor(&[rows, width], dtype);
            for residual in [None, Some(&residual)] {
                let given = dy.copy().unwrap();
                let dx = rms_norm_backward(&x, &weight, &inv_rms, given, residual, Some(&dweight)).unwrap();
                let expected =
                    reference::rms_norm_backward(&x, &weight, &inv_rms, &dy, residual, Some(&expected_dweight))
                        .unwrap();
                // With a single channel the gradient is a difference of equal numbers.
                close("dx", &dx, &expected, if width == 1 { 1.0 } else { tolerance(dtype) });
                close("dweight", &dweight, &expected_dweight, 1e-4);
            }
        }
    }
}

#[test]
fn an_offset_is_added_to_the_weight() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let mut numbers = Numbers::new(9);
        let [x, dy] = [(); 2].map(|()| numbers.tensor(&[12, 256], dtype));
        // Exact in bf16, as the sums are in f32.
        let weight = (numbers.tensor(&[256], DType::BF16) * 0.125).unwrap().to_dtype(dtype).unwrap();
        let sums = weight.to_dtype(DType::F32).unwrap().affine(1.0, 1.0).unwrap();
        let gemma = NormWeight { tensor: &weight, offset: 1.0 };
        let sums = if dtype == DType::F64 { sums.to_dtype(dtype).unwrap() } else { sums };
        let (y, inv_rms) = rms_norm(&x, gemma, EPS).unwrap();
        assert_close("y", &y, &rms_norm(&x, &sums, EPS).unwrap().0, 1e-12);
        let [dweight, expected_dweight] = [(); 2].map(|()| sums.zeros_like().unwrap());
        let dx = rms_norm_backward(&x, gemma, &inv_rms, dy.copy().unwrap(), None, Some(&dweight)).unwrap();
        let expected = rms_norm_backward(&x, &sums, &inv_rms, dy, None, Some(&expected_dweight)).unwrap();
        assert_close("dx", &dx, &expected, 1e-12);
        assert_close("dweight", &dweight, &expected_dweight, 1e-12);
    }
}

#[test]
fn a_row_of_zeros_stays_finite() {
    let x = Tensor::zeros((2, 8), DType::F32, &device()).unwrap();
    let weight = x.get(0).unwrap().ones_like().unwrap();
    let (y, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
    assert_eq!(y.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
    let dx = rms_norm_backward(&x, &weight, &inv_rms, y.ones_like().unwrap(), None, None).unwrap();
    assert!(dx.sum_all().unwrap().to_scalar::<f32>().unwrap().is_finite());
}
