use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance};

#[test]
fn the_reference_agrees_with_finite_differences_and_with_the_head_s_loss() {
    let mut numbers = Numbers::new(4);
    let (logits, labels) = (numbers.tensor(&[3, 7], DType::F64), [6, IGNORED_LABEL, 0]);
    let token = TokenLoss { z_loss: 0.2, label_smoothing: 0.3, is_logit: false };
    let of = |x: &Tensor| logit_cross_entropy_backward(x.copy()?, &labels, 1.0, token, None);
    let (loss, gradient) = of(&logits).unwrap();
    assert!((loss.cross_entropy - logit_cross_entropy(&logits, &labels, None).unwrap()).abs() < 1e-12);
    check_gradient("dlogits", &logits, &gradient, |x| Ok(of(x)?.0.objective));
    let eye = Tensor::eye(7, DType::F64, &device()).unwrap();
    let c = crate::CrossEntropy { chunk_rows: 2, token_loss: token, ..Default::default() };
    let capped = |x: &Tensor| logit_cross_entropy_backward(x.copy()?, &labels, 1.0, token, Some(0.6));
    let (loss_of_capped, gradient) = capped(&logits).unwrap();
    check_gradient("dlogits", &logits, &gradient, |x| Ok(capped(x)?.0.objective));
    let of_cap = crate::CrossEntropy { soft_cap: Some(0.6), ..c };
    let (of_head, _) = crate::linear_cross_entropy_backward(&logits, &eye, &labels, &of_cap, None).unwrap();
    assert!((loss_of_capped.objective - of_head.objective).abs() < 1e-12);
    assert!((logit_cross_entropy(&logits, &labels, Some(0.6)).unwrap() - of_head.cross_entropy).abs() < 1e-12);
    let (of_head, _) = crate::linear_cross_entropy_backward(&logits, &eye, &labels, &c, None).unwrap();
    assert!((loss.objective - of_head.objective).abs() < 1e-12);
}

#[test]
fn kernels_agree_with_the_reference() {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, width) in [(1, 1), (5, 33), (64, 1000)] {
            let mut numbers = Numbers::new(8);
            let logits = (numbers.tensor(&[rows, width], DType::F32) * 9.0).unwrap().to_dtype(dtype).unwrap();
            let label = |row| if row % 4 == 3 { IGNORED_LABEL } else { (row * 7 % width) as u32 };
            let labels: Vec<u32> = (0..rows).map(label).collect();
            let plain = TokenLoss::default();
            let both = TokenLoss { z_loss: 1e-2, label_smoothing: 0.1, ..plain };
            for token in [plain, both, TokenLoss { is_logit: true, ..plain }] {
                let (loss, gradient) = reference::logit_cross_entropy_backward(&logits, &labels, 0.5, token).unwrap();
                let alone = logit_cross_entropy(&logits, &labels, None).unwrap();
                let (got, got_gradient) =
                    logit_cross_entropy_backward(logits.copy().unwrap(), &labels, 0.5, token, None).unwrap();
                assert!(token.is_logit || alone == got.cross_entropy);
                let close = |got: f64, loss: f64| (got - loss).abs() <= 1e-5 * loss.abs().max(1.0);
                assert!(close(got.cross_entropy, loss.cross_entropy), "{got:?} {loss:?}");
                assert!(close(got.objective, loss.objective), "{got:?} {loss:?}");
                assert_close("dlogits", &got_gradient, &gradient, tolerance(dtype));
            }
        }
    }
}

#[test]
fn labels_that_do_not_fit_are_errors() {
    let logits = Tensor::zeros((2, 3), DType::F32, &device()).unwrap();
    assert!(logit_cross_entropy(&logits, &[0], None).is_err());
    assert!(logit_cross_entropy(&logits, &[0, 3], None).is_err());
}
