use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance};

#[test]
fn the_reference_agrees_with_finite_differences_and_with_the_head_s_loss() {
    let mut numbers = Numbers::new(4);
    let (logits, labels) = (numbers.tensor(&[3, 7], DType::F64), [6, IGNORED_LABEL, 0]);
    let (loss, gradient) = logit_cross_entropy_backward(logits.copy().unwrap(), &labels, 1.0).unwrap();
    assert!((loss - logit_cross_entropy(&logits, &labels).unwrap()).abs() < 1e-12);
    check_gradient("dlogits", &logits, &gradient, |x| logit_cross_entropy(x, &labels));
    let eye = Tensor::eye(7, DType::F64, &device()).unwrap();
    let c = crate::CrossEntropy { logit_scale: 1.0, gradient_scale: 1.0, chunk_rows: 2 };
    assert!((loss - crate::linear_cross_entropy(&logits, &eye, &labels, &c).unwrap()).abs() < 1e-12);
}

#[test]
fn kernels_agree_with_the_reference() {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, width) in [(1, 1), (5, 33), (64, 1000)] {
            let mut numbers = Numbers::new(8);
            let logits = (numbers.tensor(&[rows, width], DType::F32) * 9.0).unwrap().to_dtype(dtype).unwrap();
            let label = |row| if row % 4 == 3 { IGNORED_LABEL } else { (row * 7 % width) as u32 };
            let labels: Vec<u32> = (0..rows).map(label).collect();
            let (loss, gradient) = reference::logit_cross_entropy_backward(&logits, &labels, 0.5).unwrap();
            let alone = logit_cross_entropy(&logits, &labels).unwrap();
            let (got, got_gradient) = logit_cross_entropy_backward(logits.copy().unwrap(), &labels, 0.5).unwrap();
            assert_eq!(alone, got);
            assert!((got - loss).abs() <= 1e-5 * loss.abs().max(1.0), "{got} {loss}");
            assert_close("dlogits", &got_gradient, &gradient, tolerance(dtype));
        }
    }
}

#[test]
fn labels_that_do_not_fit_are_errors() {
    let logits = Tensor::zeros((2, 3), DType::F32, &device()).unwrap();
    assert!(logit_cross_entropy(&logits, &[0]).is_err());
    assert!(logit_cross_entropy(&logits, &[0, 3]).is_err());
}
