use candle_core::{DType, IndexOp};

use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance, values, weighted};

fn place(samples: &[u32], step: u64, site: u32) -> Dropout<'_> {
    Dropout { probability: 0.1, seed: 42, step, site, samples }
}

fn mask(d: &Dropout, positions: usize, width: usize) -> Tensor {
    dropout(&Tensor::ones((d.samples.len(), positions, width), DType::F32, &device()).unwrap(), Some(d)).unwrap()
}

#[test]
fn a_tenth_is_dropped_and_the_mean_is_kept() {
    let mask = mask(&place(&[0, 1, 2, 3], 1, 0), 64, 512);
    let n = mask.elem_count() as f64;
    let dropped = values(&mask).iter().filter(|&&x| x == 0.0).count() as f64;
    // Four standard deviations of a binomial.
    assert!((dropped / n - 0.1).abs() < 4.0 * (0.09 / n).sqrt(), "{}", dropped / n);
    assert!((values(&mask).iter().sum::<f64>() / n - 1.0).abs() < 0.01);
    for channel in 0..512 {
        let kept = mask.i((.., .., channel)).unwrap();
        let rate = values(&kept).iter().filter(|&&x| x == 0.0).count() as f64 / 256.0;
        assert!((rate - 0.1).abs() < 6.0 * (0.09f64 / 256.0).sqrt(), "channel {channel}: {rate}");
    }
}

#[test]
fn masks_of_other_samples_steps_sites_positions_and_channels_are_independent() {
    let samples = [7];
    let base = values(&mask(&place(&samples, 3, 5), 64, 512));
    let others = [
        ("sample", values(&mask(&place(&[8], 3, 5), 64, 512))),
        ("step", values(&mask(&place(&samples, 4, 5), 64, 512))),
        ("site", values(&mask(&place(&samples, 3, 6), 64, 512))),
        ("seed", values(&mask(&Dropout { seed: 43, ..place(&samples, 3, 5) }, 64, 512))),
        ("position", [&base[512..], &base[..512]].concat()),
        ("channel", [&base[1..], &base[..1]].concat()),
        ("channel of the pair", [&base[8..], &base[..8]].concat()),
    ];
    for (what, other) in others {
        let n = base.len() as f64;
        let both = base.iter().zip(&other).filter(|&(&a, &b)| a == 0.0 && b == 0.0).count() as f64;
        assert!((both / n - 0.01).abs() < 5.0 * (0.0099 / n).sqrt(), "{what}: both dropped {}", both / n);
    }
}

#[test]
fn the_mask_does_not_depend_on_the_cut_of_the_batch_or_on_padding() {
    let whole = mask(&place(&[4, 9, 2], 1, 1), 10, 33);
    let alone = mask(&place(&[9], 1, 1), 17, 33);
    assert_eq!(values(&whole.i((1, ..10)).unwrap()), values(&alone.i((0, ..10)).unwrap()));
}

#[test]
fn kernels_agree_with_the_reference_and_backward_is_the_same_call() {
    for shape in [[1, 1, 1], [2, 7, 65], [3, 130, 96]] {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let mut numbers = Numbers::new(5);
            let (x, residual) = (numbers.tensor(&shape, dtype), numbers.tensor(&shape, dtype));
            let samples = [3, 1, 2];
            let d = place(&samples[..shape[0]], 9, 2);
            for d in [Some(&d), None] {
                let what = format!("{shape:?} {dtype:?}");
                assert_close(&what, &dropout(&x, d).unwrap(), &reference::dropout(&x, d).unwrap(), tolerance(dtype));
                let expected = reference::dropout_add(&residual, &x, d).unwrap();
                assert_close(&what, &dropout_add(&residual, &x, d).unwrap(), &expected, tolerance(dtype));
            }
        }
    }
    let mut numbers = Numbers::new(6);
    let (x, dy) = (numbers.tensor(&[2, 3, 4], DType::F64), numbers.tensor(&[2, 3, 4], DType::F64));
    let d = place(&[0, 1], 1, 1);
    check_gradient("dx", &x, &dropout(&dy, Some(&d)).unwrap(), |x| weighted(&dropout(x, Some(&d))?, &dy));
}

#[test]
fn what_cannot_be_applied_is_an_error() {
    let x = Tensor::ones((2, 3, 4), DType::F32, &device()).unwrap();
    assert!(dropout(&x, Some(&place(&[1], 0, 0))).is_err(), "one sample for two sequences");
    assert!(dropout(&x, Some(&Dropout { probability: 1.0, ..place(&[1, 2], 0, 0) })).is_err());
    assert!(dropout(&x, Some(&Dropout { probability: f32::NAN, ..place(&[1, 2], 0, 0) })).is_err());
    assert!(dropout(&x.flatten_all().unwrap(), Some(&place(&[1, 2], 0, 0))).is_err());
}
