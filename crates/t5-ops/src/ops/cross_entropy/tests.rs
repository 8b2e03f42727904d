use candle_core::DType;

use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance, values};

fn scales(chunk_rows: usize) -> CrossEntropy {
    CrossEntropy { logit_scale: 0.7, gradient_scale: 0.25, chunk_rows, ..CrossEntropy::default() }
}

/// No term beside the cross-entropy, each, and both.
const TOKEN_LOSSES: [TokenLoss; 5] = [
    TokenLoss { z_loss: 0.0, label_smoothing: 0.0, is_logit: false },
    TokenLoss { z_loss: 0.3, label_smoothing: 0.0, is_logit: false },
    TokenLoss { z_loss: 0.0, label_smoothing: 0.2, is_logit: false },
    TokenLoss { z_loss: 0.1, label_smoothing: 0.4, is_logit: false },
    TokenLoss { z_loss: 0.0, label_smoothing: 0.0, is_logit: true },
];

fn some_labels(rows: usize, vocabulary: usize) -> Vec<u32> {
    let mut numbers = Numbers::new(31);
    (0..rows).map(|row| if row % 3 == 1 { IGNORED_LABEL } else { numbers.below(vocabulary) as u32 }).collect()
}

#[test]
fn the_reference_agrees_with_finite_differences() {
    let mut numbers = Numbers::new(30);
    let (x, w) = (numbers.tensor(&[5, 3], DType::F64), numbers.tensor(&[7, 3], DType::F64));
    let labels = some_labels(5, 7);
    for (chunk_rows, token_loss) in [1, 2, 100, 2, 3].into_iter().zip(TOKEN_LOSSES) {
        let soft_cap = (chunk_rows == 2).then_some(0.8);
        let c = CrossEntropy { token_loss, soft_cap, ..scales(chunk_rows) };
        let dw = w.zeros_like().unwrap();
        let (loss, dx) = linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&dw, true))).unwrap();
        assert!((loss.cross_entropy - linear_cross_entropy(&x, &w, &labels, &c).unwrap()).abs() < 1e-12);
        let objective = |x: &Tensor, w: &Tensor| linear_cross_entropy_backward(x, w, &labels, &c, None);
        check_gradient("dx", &x, &dx, |x| Ok(0.25 * objective(x, &w)?.0.objective));
        check_gradient("dw", &w, &dw, |w| Ok(0.25 * objective(&x, w)?.0.objective));
    }
}

#[test]
fn the_reference_agrees_with_the_cross_entropy_of_candle() {
    let mut numbers = Numbers::new(33);
    let (x, w) = (numbers.tensor(&[6, 4], DType::F64), numbers.tensor(&[9, 4], DType::F64));
    let labels = [0u32, 8, 3, 3, 1, 5];
    let logits = (reference_logits(&x, &w) * 0.7).unwrap();
    let mean = candle_nn::loss::cross_entropy(&logits, &Tensor::new(&labels, x.device()).unwrap()).unwrap();
    let expected = mean.to_scalar::<f64>().unwrap() * 6.0;
    let got = linear_cross_entropy(&x, &w, &labels, &scales(4)).unwrap();
    assert!((got - expected).abs() < 1e-12, "expected {expected}, got {got}");
}

fn reference_logits(x: &Tensor, w: &Tensor) -> Tensor {
    crate::reference::linear(x, w).unwrap()
}

#[test]
fn kernels_agree_with_the_reference_for_every_chunk_size() {
    // The host alone: its kernels. `tests/device` has those of a card.
    if !device().is_cpu() {
        return;
    }
    // In the last case an extent has more than one tile of the vocabulary, and the last block has one entry.
    for (rows, v, d) in [(1, 1, 1), (7, 65, 33), (65, 7, 16), (40, 700, 64), (9, 4353, 5)] {
        for (dtype, weight_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F32, DType::BF16)] {
            for (chunk_rows, logits) in [1, 7, 64, 1000]
                .into_iter()
                .flat_map(|chunk_rows| [(chunk_rows, cpu::Logits::Kept), (chunk_rows, cpu::Logits::Recomputed)])
            {
                let mut numbers = Numbers::new(32);
                let (x, w) = (numbers.tensor(&[rows, d], dtype), numbers.tensor(&[v, d], weight_dtype));
                let labels = some_labels(rows, v);
                let token_loss = TOKEN_LOSSES[(rows + chunk_rows) % TOKEN_LOSSES.len()];
                let soft_cap = (chunk_rows == 7 || rows == 65).then_some(1.5);
                let c = CrossEntropy { token_loss, soft_cap, ..scales(chunk_rows) };
                let dw = numbers.tensor(&[v, d], DType::F32);
                let expected_dw = dw.copy().unwrap();
                let valid = valid_rows("test", &x, (&w).into(), &labels, &c).unwrap();
                let (loss, dx) =
                    cpu::gradients(&x, (&w).into(), &labels, &valid, &c, Some((&dw, true)), (logits, None)).unwrap();
                let (expected, expected_dx) =
                    reference::linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&expected_dw, true))).unwrap();
                let what = format!("({rows}, {v}, {d}) {dtype:?} by {chunk_rows} {logits:?}");
                let close = |a: f64, b: f64| (a - b).abs() <= tolerance(dtype) * (1.0 + b.abs());
                let (alone, objective) = (expected.cross_entropy, expected.objective);
                assert!(close(loss.cross_entropy, alone), "{what}: expected {alone}, got {loss:?}");
                assert!(close(loss.objective, objective), "{what}: expected {objective}, got {loss:?}");
                assert!(close(linear_cross_entropy(&x, &w, &labels, &c).unwrap(), alone), "{what}");
                assert_eq!(dx.dtype(), dtype);
                if v > 1 {
                    assert_close(&format!("{what} dx"), &dx, &expected_dx, tolerance(dtype));
                }
                assert_close(&format!("{what} dw"), &dw, &expected_dw, tolerance(dtype));
                let expected_dw = dw.copy().unwrap();
                cpu::gradients(&x, (&w).into(), &labels, &valid, &c, Some((&dw, false)), (logits, None)).unwrap();
                reference::linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&expected_dw, false))).unwrap();
                assert_close(&format!("{what} dw ="), &dw, &expected_dw, tolerance(dtype));
            }
        }
    }
}

#[test]
fn a_table_in_bf16_gives_the_bits_of_the_same_values_in_f32() {
    let mut numbers = Numbers::new(33);
    let (rows, v, d) = (40, 700, 64);
    let half = numbers.tensor(&[v, d], DType::BF16);
    let whole = half.to_dtype(DType::F32).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let (x, labels) = (numbers.tensor(&[rows, d], dtype), some_labels(rows, v));
        for chunk_rows in [1, 64] {
            let loss = |w: &Tensor| linear_cross_entropy(&x, w, &labels, &scales(chunk_rows)).unwrap();
            assert_eq!(loss(&half).to_bits(), loss(&whole).to_bits(), "{dtype:?} by {chunk_rows}");
        }
    }
}

#[test]
fn ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold() {
    let mut numbers = Numbers::new(34);
    let w = numbers.tensor(&[6, 3], DType::F32);
    let x = numbers.tensor(&[2, 3], DType::F32);
    let bad = Tensor::cat(&[&x, &(&x * f64::NAN).unwrap()], 0).unwrap();
    let c = scales(8);
    let expected = linear_cross_entropy(&x, &w, &[1, 2], &c).unwrap();
    let labels = [1, 2, IGNORED_LABEL, IGNORED_LABEL];
    let (loss, dx) = linear_cross_entropy_backward(&bad, &w, &labels, &c, None).unwrap();
    assert_eq!(loss, LossSums { cross_entropy: expected, objective: expected });
    assert!(values(&dx.narrow(0, 2, 2).unwrap()).iter().all(|&x| x == 0.0));
    let (loss, dx) = linear_cross_entropy_backward(&x, &w, &[IGNORED_LABEL; 2], &c, None).unwrap();
    assert_eq!(loss, LossSums::default());
    assert!(values(&dx).iter().all(|&x| x == 0.0));
    let dw = w.ones_like().unwrap();
    linear_cross_entropy_backward(&x, &w, &[IGNORED_LABEL; 2], &c, Some((&dw, false))).unwrap();
    assert!(values(&dw).iter().all(|&x| x == 0.0));
    assert!(linear_cross_entropy(&bad, &w, &[1, 2, 3, 4], &c).unwrap().is_nan());
}

#[test]
fn a_label_outside_the_vocabulary_is_an_error() {
    let mut numbers = Numbers::new(35);
    let (x, w) = (numbers.tensor(&[2, 3], DType::F32), numbers.tensor(&[6, 3], DType::F32));
    let message = linear_cross_entropy(&x, &w, &[1, 6], &scales(8)).unwrap_err().to_string();
    assert!(message.contains("row 1: expected a label below 6, got 6"), "{message}");
    assert!(linear_cross_entropy(&x, &w, &[1], &scales(8)).is_err());
    assert!(linear_cross_entropy(&x, &w, &[1, 2], &scales(0)).is_err());
}

#[test]
fn smoothed_labels_spread_their_share_over_all_entries() {
    let logits = [[0.5, -1.0, 2.0, 0.25], [3.0, 0.0, -2.0, 1.0], [-0.5, 0.75, 0.125, -3.0]];
    let labels = [2, 1, 0];
    // As torch defines it: the mean over all classes has the share.
    let expected = |z_loss: f64, smoothing: f64| -> f64 {
        let of_row = |(row, label): (&[f64; 4], usize)| {
            let log_z = row.iter().map(|l| l.exp()).sum::<f64>().ln();
            let of = |class: usize| log_z - row[class];
            let spread = (0..4).map(|class| smoothing / 4.0 * of(class)).sum::<f64>();
            (1.0 - smoothing) * of(label) + spread + z_loss * log_z.powi(2)
        };
        logits.iter().zip(labels).map(of_row).sum()
    };
    let x = Tensor::new(&logits, &device()).unwrap();
    let eye = Tensor::eye(4, DType::F64, &device()).unwrap();
    let labels = labels.map(|label| label as u32);
    for token_loss in TOKEN_LOSSES.into_iter().filter(|loss| !loss.is_logit) {
        let c = CrossEntropy { token_loss, ..CrossEntropy::default() };
        let (loss, _) = linear_cross_entropy_backward(&x, &eye, &labels, &c, None).unwrap();
        let expected = expected(token_loss.z_loss, token_loss.label_smoothing);
        assert!((loss.objective - expected).abs() < 1e-12, "{token_loss:?}: {} {expected}", loss.objective);
    }
}

#[test]
fn groups_of_rows_have_their_own_losses_and_factors() {
    let mut numbers = Numbers::new(21);
    for dtype in [DType::F32, DType::F64] {
        let [x, w] = [[12, 8], [50, 8]].map(|shape| numbers.tensor(&shape, dtype));
        let labels: Vec<u32> = (0..12).map(|row| if row % 5 == 4 { IGNORED_LABEL } else { row * 4 }).collect();
        let c = CrossEntropy { chunk_rows: 5, ..CrossEntropy::default() };
        let of = |first: usize, count: usize| x.narrow(0, first, count).unwrap();
        let losses = linear_cross_entropies(&x, &w, &labels, &[2, 1, 9], &c).unwrap();
        for (loss, (first, count)) in losses.iter().zip([(0, 2), (2, 1), (3, 9)]) {
            let expected = linear_cross_entropy(&of(first, count), &w, &labels[first..first + count], &c).unwrap();
            assert!((loss - expected).abs() < 1e-5 * expected.abs().max(1.0), "{loss} {expected}");
        }
        let factors = [0.5, -2.0, 0.0, 3.0];
        let (loss, dx) = weighted_linear_cross_entropy_backward(&x, &w, &labels, &factors, &c).unwrap();
        let mut sum = 0.0;
        for (group, factor) in factors.iter().enumerate() {
            let (first, c) = (group * 3, CrossEntropy { gradient_scale: *factor, ..c });
            let labels = &labels[first..first + 3];
            let (of_group, expected) = linear_cross_entropy_backward(&of(first, 3), &w, labels, &c, None).unwrap();
            sum += of_group.cross_entropy;
            assert_close("dx", &dx.narrow(0, first, 3).unwrap(), &expected, 1e-6);
        }
        assert!((loss.cross_entropy - sum).abs() < 1e-5 * sum.abs());
    }
}
