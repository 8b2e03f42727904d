use super::*;
use crate::testing::{Numbers, assert_close, device};

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &device()).unwrap()
}

type Update = fn(&Tensor, &Tensor, &Tensor, &Tensor, &AdamwHyper) -> Result<()>;

/// The parameter after five updates with the same stream of gradients.
fn run(shape: &[usize], dtype: DType, h: &AdamwHyper, update: Update) -> Tensor {
    let mut numbers = Numbers::new(21);
    let param = numbers.tensor(shape, dtype);
    let (first, second) = (zeros(shape, dtype), zeros(shape, dtype));
    for step in 1..=5 {
        let grad = (numbers.tensor(shape, dtype) * 0.01).unwrap();
        update(&param, &grad, &first, &second, &AdamwHyper { update: step, ..*h }).unwrap();
    }
    param
}

#[test]
fn kernels_agree_with_the_reference_in_f64() {
    let variants = [
        AdamwHyper::default(),
        AdamwHyper { learning_rate: 1e-2, weight_decay: 0.0, ..AdamwHyper::default() },
        AdamwHyper { beta1: 0.0, beta2: 0.9, eps: 1e-6, ..AdamwHyper::default() },
        AdamwHyper { weight_decay: 0.3, gradient_scale: 0.01, ..AdamwHyper::default() },
        AdamwHyper { step_scale: 0.04, ..AdamwHyper::default() },
    ];
    for shape in [&[1][..], &[7], &[65], &[1, 1], &[7, 65], &[65, 7], &[300, 96], &[2, 3, 5]] {
        for h in &variants {
            let expected = run(shape, DType::F64, h, reference::adamw);
            let what = format!("{shape:?} {h:?}");
            assert_close(&what, &run(shape, DType::F32, h, adamw), &expected, 2e-6);
            assert_close(&what, &run(shape, DType::F64, h, adamw), &expected, 1e-12);
        }
    }
}

#[test]
fn a_bf16_parameter_is_updated_in_f32_and_rounded_as_the_reference_rounds() {
    for rounding in [Rounding::Nearest, Rounding::Stochastic { key: 7 }] {
        for shape in [&[65][..], &[7, 65], &[300, 96], &[2, 3, 5]] {
            for grad in [DType::F32, DType::BF16] {
                let step = |update: Update| -> Vec<f32> {
                    let mut numbers = Numbers::new(8);
                    let param = numbers.tensor(shape, DType::F32).to_dtype(DType::BF16).unwrap();
                    let grad = numbers.tensor(shape, DType::F32).to_dtype(grad).unwrap();
                    let h = AdamwHyper { learning_rate: 1e-2, rounding, ..AdamwHyper::default() };
                    update(&param, &grad, &zeros(shape, DType::F32), &zeros(shape, DType::F32), &h).unwrap();
                    param.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
                };
                let (got, expected) = (step(adamw), step(reference::adamw));
                // The last bits of a sum change a few roundings.
                let turned = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                assert!(turned * 200 <= got.len(), "{shape:?} {rounding:?}: {turned} of {}", got.len());
            }
        }
    }
}

#[test]
fn tensors_that_share_memory_or_do_not_fit_are_refused() {
    let [p, g, m, v] = [0, 1, 2, 3].map(|_| zeros(&[4, 4], DType::F32));
    let h = AdamwHyper::default();
    assert!(adamw(&p, &g, &m, &m, &h).is_err());
    assert!(adamw(&p, &p, &m, &v, &h).is_err());
    assert!(adamw(&p, &zeros(&[4, 5], DType::F32), &m, &v, &h).is_err());
    assert!(adamw(&p, &g, &zeros(&[16], DType::F32), &v, &h).is_err());
    assert!(adamw(&p.t().unwrap(), &g, &m, &v, &h).is_err());
    adamw(&p, &g, &m, &v, &h).unwrap();
}
