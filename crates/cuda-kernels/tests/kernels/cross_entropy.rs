//! The cross-entropy of rows of logits.

use candle_core::{DType, Device, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::{IGNORED_LABEL, TokenLoss};

use crate::card::{Buffer, assert_close, in_every_schedule, launch, null, numbers, suffix, tolerance};

#[test]
fn losses_and_gradients_are_those_of_the_cpu() {
    let labels = [2u32, IGNORED_LABEL, 0, 4];
    // A thread keeps the logits of two turns. A third turn reads the others again, one by one from 513 logits on, and by fours from 2,049.
    for width in [5, 130, 132, 1101, 1100, 3300] {
        for (from, to) in [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)] {
            // A token with a logit of minus infinity is never chosen.
            let logits = (numbers(1, &[4, width], DType::F32) * 9.0).unwrap();
            let hidden = Tensor::from_vec(vec![f32::NEG_INFINITY; 2], (2, 1), &Device::Cpu).unwrap();
            let finite = logits.to_dtype(from).unwrap();
            let logits = logits.slice_assign(&[0..2, 1..2], &hidden).unwrap().to_dtype(from).unwrap();
            let plain = TokenLoss::default();
            let (both, of_logit) =
                (TokenLoss { z_loss: 0.1, label_smoothing: 0.2, ..plain }, TokenLoss { is_logit: true, ..plain });
            let ways = [
                (false, false, plain),
                (true, false, plain),
                (true, from == to, plain),
                (true, from == to, both),
                (true, false, of_logit),
            ];
            // The mean of logits is minus infinity where one of them is.
            let ways = ways.into_iter().filter(|(_, _, loss)| *loss == plain || width == 130 || width == 3300);
            for (wants_gradient, in_place, token) in ways {
                let what = format!("{width} {from:?} {to:?} {wants_gradient} {in_place} {token:?}");
                let logits = if token == plain { logits.clone() } else { finite.clone() };
                let got = in_every_schedule(&what, |schedule| {
                    let mut logits = Buffer::copy_of(&logits);
                    let mut labels = Buffer::copy_of(&Tensor::new(&labels, &Device::Cpu).unwrap());
                    let (mut losses, mut gradients) = (Buffer::new(&[16], DType::F32), Buffer::new(&[4, width], to));
                    let target = match (wants_gradient, in_place) {
                        (false, _) => null(),
                        (_, true) => logits.pointer(),
                        _ => gradients.pointer(),
                    };
                    let of_log_z = if token.is_logit { 0.0 } else { 1.0 };
                    let [of_log_z, z_loss, smoothing] =
                        [of_log_z, token.z_loss, token.label_smoothing].map(Argument::from_value);
                    let rest = [
                        target,
                        Argument::from_value(0.5f32),
                        of_log_z,
                        z_loss,
                        smoothing,
                        Argument::from_value(width as i32),
                    ];
                    let arguments = [&[logits.pointer(), labels.pointer(), losses.pointer()], &rest[..]].concat();
                    let name = format!("cross_entropy_{}_{}", suffix(from), suffix(to));
                    launch(&name, [4, 1, 1], 64, 32 * 4, &arguments, schedule);
                    let mut total = Buffer::copy_of(&Tensor::zeros(4, DType::U32, &Device::Cpu).unwrap());
                    let arguments = [losses.pointer(), total.pointer(), Argument::from_value(4i32)];
                    launch("add_totals", [2, 1, 1], 64, 32 * 8, &arguments, schedule);
                    vec![total, if in_place { logits } else { gradients }]
                });
                let bits: Vec<u32> = got[0].to_vec1().unwrap();
                let loss = |i: usize| f64::from_bits(u64::from(bits[i]) | u64::from(bits[i + 1]) << 32);
                let (expected, gradients) =
                    t5_ops::logit_cross_entropy_backward(logits.copy().unwrap(), &labels, 0.5, token, None).unwrap();
                for (loss, expected) in [(loss(0), expected.cross_entropy), (loss(2), expected.objective)] {
                    assert!(
                        (loss - expected).abs() <= 1e-5 * expected.abs(),
                        "{what}: expected {expected}, got {loss}"
                    );
                }
                if wants_gradient {
                    let gradients = gradients.to_dtype(to).unwrap();
                    assert_close(&what, &got[1], &gradients, tolerance(to) + 1e-5);
                }
            }
        }
    }
}

#[test]
fn a_logit_that_is_no_number_makes_a_loss_that_is_none() {
    let mut values = vec![0.5f32; 70];
    values[66] = f32::NAN;
    let logits = Tensor::from_vec(values, (1, 70), &Device::Cpu).unwrap();
    let got = in_every_schedule("NaN", |schedule| {
        let (mut logits, mut losses) = (Buffer::copy_of(&logits), Buffer::new(&[4], DType::F32));
        let mut labels = Buffer::copy_of(&Tensor::new(&[1u32], &Device::Cpu).unwrap());
        let of_terms = [1f64, 0.0, 0.0].map(Argument::from_value);
        let rest = [&[null(), Argument::from_value(1f32)], &of_terms[..], &[Argument::from_value(70i32)]].concat();
        let arguments = [&[logits.pointer(), labels.pointer(), losses.pointer()], &rest[..]].concat();
        launch("cross_entropy_f32_f32", [1, 1, 1], 32, 32 * 4, &arguments, schedule);
        vec![losses]
    });
    let bits: Vec<f32> = got[0].to_vec1().unwrap();
    let loss = f64::from_bits(u64::from(bits[0].to_bits()) | u64::from(bits[1].to_bits()) << 32);
    assert!(loss.is_nan(), "{loss}");
}

#[test]
fn losses_are_added_to_their_totals() {
    // Fewer losses than threads, and more.
    for count in [3usize, 200] {
        let losses: Vec<f64> = (0..2 * count).map(|i| 0.5 + i as f64).collect();
        let expected = [2.25 + losses[..count].iter().sum::<f64>(), -1.0 + losses[count..].iter().sum::<f64>()];
        let losses = Tensor::from_vec(losses, (2, count), &Device::Cpu).unwrap();
        let got = in_every_schedule("total", |schedule| {
            let mut losses = Buffer::copy_of(&losses);
            let mut total = Buffer::copy_of(&Tensor::new(&[2.25f64, -1.0], &Device::Cpu).unwrap());
            let arguments = [losses.pointer(), total.pointer(), Argument::from_value(count as i32)];
            launch("add_totals", [2, 1, 1], 64, 32 * 8, &arguments, schedule);
            vec![total]
        });
        assert_eq!(got[0].to_vec1::<f64>().unwrap(), expected);
    }
}
