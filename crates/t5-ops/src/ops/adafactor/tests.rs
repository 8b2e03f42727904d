use super::*;
use crate::testing::{Numbers, assert_close, device};

fn hyper() -> AdafactorHyper {
    AdafactorHyper { learning_rate: 1e-2, beta2: 0.4, ..AdafactorHyper::default() }
}

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &device()).unwrap()
}

fn second_moment(shape: &[usize], dtype: DType) -> SecondMoment {
    match shape {
        [outer @ .., n, k] => SecondMoment::Factored {
            row: zeros(&[outer, &[*n]].concat(), dtype),
            col: zeros(&[outer, &[*k]].concat(), dtype),
        },
        shape => SecondMoment::Full(zeros(shape, dtype)),
    }
}

type Update = fn(&Tensor, &Tensor, &SecondMoment, Option<&Tensor>, &AdafactorHyper) -> Result<()>;

/// The parameter after five steps with the same stream of gradients.
fn run(shape: &[usize], dtype: DType, h: &AdafactorHyper, update: Update) -> Tensor {
    let mut numbers = Numbers::new(21);
    let param = numbers.tensor(shape, dtype);
    let second = second_moment(shape, dtype);
    let first = h.beta1.map(|_| zeros(shape, dtype));
    for step in 1..=5 {
        let grad = (numbers.tensor(shape, dtype) * 0.01).unwrap();
        let h = AdafactorHyper { beta2: 1.0 - f64::from(step).powf(-0.8), ..*h };
        update(&param, &grad, &second, first.as_ref(), &h).unwrap();
    }
    param
}

#[test]
fn kernels_agree_with_the_reference_in_f64() {
    let variants = [
        hyper(),
        AdafactorHyper { scale_parameter: false, ..hyper() },
        AdafactorHyper { beta1: Some(0.9), ..hyper() },
        AdafactorHyper { weight_decay: 0.1, gradient_scale: 0.01, clip_threshold: 0.3, ..hyper() },
        AdafactorHyper { beta1: Some(0.5), weight_decay: 0.1, eps1: 1e-6, ..hyper() },
    ];
    for shape in [&[1][..], &[7], &[65], &[1, 1], &[7, 65], &[65, 7], &[300, 96], &[1, 40], &[2, 3, 5]] {
        for h in &variants {
            let expected = run(shape, DType::F64, h, reference::adafactor);
            let what = format!("{shape:?} {h:?}");
            assert_close(&what, &run(shape, DType::F32, h, adafactor), &expected, 2e-6);
            assert_close(&what, &run(shape, DType::F64, h, adafactor), &expected, 1e-12);
        }
    }
}

/// A parameter of one dtype after one step from f32 moments, by a gradient of another.
fn mixed_step(shape: &[usize], [param, grad]: [DType; 2], h: &AdafactorHyper, update: Update) -> Vec<f32> {
    let mut numbers = Numbers::new(8);
    let param = numbers.tensor(shape, DType::F32).to_dtype(param).unwrap();
    let grad = numbers.tensor(shape, DType::F32).to_dtype(grad).unwrap();
    let first = h.beta1.map(|_| zeros(shape, DType::F32));
    update(&param, &grad, &second_moment(shape, DType::F32), first.as_ref(), h).unwrap();
    param.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn a_bf16_parameter_is_updated_in_f32_and_rounded_as_the_reference_rounds() {
    for rounding in [Rounding::Nearest, Rounding::Stochastic { key: 7 }] {
        for beta1 in [None, Some(0.9)] {
            for shape in [&[65][..], &[7, 65], &[300, 96], &[2, 3, 5]] {
                let h = AdafactorHyper { rounding, beta1, weight_decay: 0.1, ..hyper() };
                for grad in [DType::F32, DType::BF16] {
                    let got = mixed_step(shape, [DType::BF16, grad], &h, adafactor);
                    let expected = mixed_step(shape, [DType::BF16, grad], &h, reference::adafactor);
                    // The sums differ in their last bits, which changes a few roundings.
                    let turned = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                    assert!(turned * 200 <= got.len(), "{shape:?} {rounding:?}: {turned} of {}", got.len());
                    assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= a.abs() / 64.0));
                }
            }
        }
    }
}

#[test]
fn a_bf16_gradient_is_read_as_f32() {
    for beta1 in [None, Some(0.9)] {
        for shape in [&[65][..], &[7, 65], &[300, 96]] {
            let h = AdafactorHyper { beta1, weight_decay: 0.1, ..hyper() };
            let [got, expected] = [adafactor as Update, reference::adafactor]
                .map(|update| mixed_step(shape, [DType::F32, DType::BF16], &h, update));
            assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 2e-6), "{shape:?}");
        }
    }
}

#[test]
fn sums_of_squares_are_those_of_the_elements() {
    for dtype in [DType::F32, DType::BF16] {
        for shape in [&[65][..], &[7, 65], &[300, 96], &[2, 3, 5]] {
            let grad = Numbers::new(5).tensor(shape, dtype);
            let sums = SquareSums::compute(&grad).unwrap();
            let squares = grad.to_dtype(DType::F64).unwrap().sqr().unwrap();
            let total: f64 = squares.sum_all().unwrap().to_scalar().unwrap();
            let got = sums.total().unwrap();
            assert!((got / total - 1.0).abs() < 1e-6, "{shape:?}: expected {total}, got {got}");
            let Some((rows, cols)) = sums.factored else {
                assert!(shape.len() != 2 || !device().is_cpu(), "{shape:?}");
                continue;
            };
            assert_eq!(SquareSums::bytes(shape), 4 * (rows.len() + cols.len()) as u64);
            for (got, dimension) in [(rows, 1), (cols, 0)] {
                let expected = squares.sum(dimension).unwrap().to_vec1::<f64>().unwrap();
                let close = |(got, expected): (&f32, &f64)| (f64::from(*got) / expected - 1.0).abs() < 1e-6;
                assert!(got.iter().zip(&expected).all(close), "{shape:?}: sums over dimension {dimension}");
            }
        }
    }
}

#[test]
fn updates_too_small_for_bf16_are_kept_on_average_by_stochastic_rounding_and_lost_by_nearest() {
    // u = sign(g) = 1 and lr = 1e-3: each step takes 0.001 from 1, where bf16 is spaced by 0.0039 below.
    let shape = [64, 64];
    let after = |rounding: fn(u64) -> Rounding| {
        let param = Tensor::ones(&shape, DType::BF16, &device()).unwrap();
        let grad = Tensor::ones(&shape, DType::F32, &device()).unwrap();
        let second = second_moment(&shape, DType::F32);
        for step in 0..50 {
            let h = AdafactorHyper {
                learning_rate: 1e-3,
                scale_parameter: false,
                beta2: 0.0,
                rounding: rounding(step),
                ..hyper()
            };
            adafactor(&param, &grad, &second, None, &h).unwrap();
        }
        param.to_dtype(DType::F32).unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap()
    };
    assert_eq!(after(|_| Rounding::Nearest), 1.0);
    let mean = after(|key| Rounding::Stochastic { key });
    assert!((mean - 0.95).abs() < 1e-3, "{mean}");
}

#[test]
fn the_first_step_of_a_uniform_gradient_is_the_clipped_learning_rate() {
    // By hand: with beta2 = 0 and |g| equal everywhere, u = sign(g), RMS(u) = 1, lr = 1e-2 * RMS(p) = 2e-2.
    let param = Tensor::new(&[[2f32, -2.0], [2.0, -2.0]], &device()).unwrap();
    let grad = Tensor::new(&[[0.5f32, -0.5], [-0.5, 0.5]], &device()).unwrap();
    let h = AdafactorHyper { beta2: 0.0, ..hyper() };
    adafactor(&param, &grad, &second_moment(&[2, 2], DType::F32), None, &h).unwrap();
    let expected = Tensor::new(&[[1.98f32, -1.98], [2.02, -2.02]], &device()).unwrap();
    assert_close("param", &param, &expected, 1e-6);
}

#[test]
fn a_zero_gradient_leaves_the_parameter_alone() {
    let param = Numbers::new(5).tensor(&[8, 8], DType::F32);
    let before = param.copy().unwrap();
    adafactor(&param, &zeros(&[8, 8], DType::F32), &second_moment(&[8, 8], DType::F32), None, &hyper()).unwrap();
    assert_close("param", &param, &before, 0.0);
}

#[test]
fn state_of_the_wrong_shape_is_an_error() {
    let (p, g) = (zeros(&[4, 3], DType::F32), zeros(&[4, 3], DType::F32));
    let good = second_moment(&[4, 3], DType::F32);
    assert!(adafactor(&p, &g, &second_moment(&[3, 4], DType::F32), None, &hyper()).is_err());
    assert!(adafactor(&p, &g.t().unwrap(), &good, None, &hyper()).is_err());
    assert!(adafactor(&p, &g, &good, Some(&g), &hyper()).is_err(), "a first moment without beta1");
    assert!(adafactor(&p, &g, &good, None, &AdafactorHyper { beta1: Some(0.9), ..hyper() }).is_err());
    assert!(adafactor(&p, &p, &good, None, &hyper()).is_err(), "the parameter as its own gradient");
}
