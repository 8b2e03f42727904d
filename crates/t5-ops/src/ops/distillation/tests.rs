use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance};
use crate::{TokenLoss, logit_cross_entropy_backward};

const OF: Distillation = Distillation { alpha: 0.7, temperature: 2.5 };

/// Whether the device of the tests has no kernel, which only a card may lack and says.
fn is_refused() -> bool {
    let logits = Tensor::zeros((1, 2), DType::F32, &device()).unwrap();
    let refused = distillation_backward(logits.copy().unwrap(), &logits, &[0], 1.0, OF, None).is_err();
    assert!(!refused || !device().is_cpu());
    refused
}

#[test]
fn the_gradient_agrees_with_finite_differences() {
    if is_refused() {
        return;
    }
    let mut numbers = Numbers::new(4);
    let [logits, teacher] = [(); 2].map(|()| (numbers.tensor(&[3, 7], DType::F64) * 4.0).unwrap());
    let labels = [6, IGNORED_LABEL, 0];
    for cap in [None, Some(0.6)] {
        let of = |x: &Tensor| distillation_backward(x.copy()?, &teacher, &labels, 1.0, OF, cap);
        check_gradient("dlogits", &logits, &of(&logits).unwrap().1, |x| Ok(of(x)?.0.objective));
    }
}

#[test]
fn without_a_share_of_the_teacher_it_is_the_cross_entropy_and_a_student_like_its_teacher_has_nothing_to_learn_from_it()
{
    if is_refused() {
        return;
    }
    let mut numbers = Numbers::new(5);
    let [logits, teacher] = [(); 2].map(|()| numbers.tensor(&[4, 33], DType::F32));
    let labels = [3, 32, IGNORED_LABEL, 0];
    let alone = Distillation { alpha: 0.0, temperature: 3.0 };
    let copy = || logits.copy().unwrap();
    let (loss, gradient) = distillation_backward(copy(), &teacher, &labels, 0.5, alone, None).unwrap();
    let (expected, of_label) = logit_cross_entropy_backward(copy(), &labels, 0.5, TokenLoss::default(), None).unwrap();
    assert!((loss.objective - expected.cross_entropy).abs() < 1e-5 && loss.cross_entropy == loss.objective);
    assert_close("dlogits", &gradient, &of_label, 1e-6);
    let whole = Distillation { alpha: 1.0, temperature: 3.0 };
    let (loss, gradient) = distillation_backward(copy(), &logits, &labels, 1.0, whole, None).unwrap();
    let largest = gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(loss.objective.abs() < 1e-5 && largest < 1e-6, "{loss:?} {largest}");
}

#[test]
fn kernels_agree_with_the_reference() {
    if is_refused() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        for (rows, width) in [(1, 1), (5, 33), (64, 1000)] {
            let mut numbers = Numbers::new(8);
            let [logits, teacher] =
                [(); 2].map(|()| (numbers.tensor(&[rows, width], DType::F32) * 9.0).unwrap().to_dtype(dtype).unwrap());
            let label = |row| if row % 4 == 3 { IGNORED_LABEL } else { (row * 7 % width) as u32 };
            let labels: Vec<u32> = (0..rows).map(label).collect();
            let (loss, gradient) = reference::distillation_backward(&logits, &teacher, &labels, 0.5, OF).unwrap();
            let (got, got_gradient) =
                distillation_backward(logits.copy().unwrap(), &teacher, &labels, 0.5, OF, None).unwrap();
            let close = |got: f64, loss: f64| (got - loss).abs() <= 1e-5 * loss.abs().max(1.0);
            assert!(close(got.cross_entropy, loss.cross_entropy), "{got:?} {loss:?}");
            assert!(close(got.objective, loss.objective), "{got:?} {loss:?}");
            assert_close("dlogits", &got_gradient, &gradient, tolerance(dtype));
        }
    }
}

#[test]
fn shapes_and_labels_that_do_not_fit_are_errors() {
    let logits = || Tensor::zeros((2, 3), DType::F32, &device()).unwrap();
    let other = Tensor::zeros((2, 4), DType::F32, &device()).unwrap();
    assert!(distillation_backward(logits(), &logits(), &[0], 1.0, OF, None).is_err());
    assert!(distillation_backward(logits(), &logits(), &[0, 3], 1.0, OF, None).is_err());
    assert!(distillation_backward(logits(), &other, &[0, 1], 1.0, OF, None).is_err());
}

#[test]
fn of_each_row_the_largest_logits_are_found_and_of_equal_ones_the_first() {
    // The host alone: a device has no kernel.
    let device = candle_core::Device::Cpu;
    let logits = Tensor::new(&[[1f32, 3.0, 3.0, -2.0, 3.0], [0.0, f32::NAN, 9.0, 1.0, 1.0]], &device).unwrap();
    let top = TopLogits::of_logits(&logits, 2).unwrap();
    assert_eq!(top.entries, [1, 2, 1, 2]);
    assert_eq!(top.values.to_vec2::<f32>().unwrap()[0], [3.0, 3.0]);
    let second = top.rows(1, 1).unwrap();
    assert_eq!(second.entries, [1, 2]);
    assert_eq!(TopLogits::concatenated(&[top.rows(0, 1).unwrap(), second]).unwrap().entries, top.entries);
    assert!(TopLogits::of_logits(&logits, 0).is_err() && TopLogits::of_logits(&logits, 6).is_err());
}

#[test]
fn beside_all_logits_the_largest_ones_are_the_whole_teacher_and_fewer_agree_with_the_reference_and_differences() {
    if is_refused() {
        return;
    }
    for dtype in [DType::F32, DType::BF16] {
        let mut numbers = Numbers::new(11);
        let mut random = |width: usize| {
            let values = numbers.tensor(&[6, width], DType::F32);
            (values * 6.0).unwrap().to_dtype(dtype).unwrap()
        };
        let (logits, teacher) = (random(37), random(37));
        let labels = [3, 36, IGNORED_LABEL, 0, 5, 5];
        for count in [1, 5, 37] {
            let top = TopLogits::of_logits(&teacher, count).unwrap();
            let whole = reference::whole(&top, &logits).unwrap().to_dtype(dtype).unwrap();
            let expected = reference::distillation_backward(&logits, &whole, &labels, 0.5, OF).unwrap();
            let got = top_distillation_backward(logits.copy().unwrap(), &top, &labels, 0.5, OF, None).unwrap();
            let close = |got: f64, loss: f64| (got - loss).abs() <= 1e-5 * loss.abs().max(1.0);
            assert!(close(got.0.objective, expected.0.objective), "{count}: {:?} {:?}", got.0, expected.0);
            assert!(close(got.0.cross_entropy, expected.0.cross_entropy));
            assert_close("dlogits", &got.1, &expected.1, tolerance(dtype));
        }
        let top = TopLogits::of_logits(&teacher, 37).unwrap();
        let all = distillation_backward(logits.copy().unwrap(), &teacher, &labels, 1.0, OF, Some(2.0)).unwrap();
        let got = top_distillation_backward(logits.copy().unwrap(), &top, &labels, 1.0, OF, Some(2.0)).unwrap();
        assert!((all.0.objective - got.0.objective).abs() < 1e-4 * all.0.objective.abs());
    }
    let mut numbers = Numbers::new(12);
    let [logits, teacher] = [(); 2].map(|()| (numbers.tensor(&[3, 7], DType::F64) * 4.0).unwrap());
    let top = TopLogits::of_logits(&teacher, 3).unwrap();
    let of = |x: &Tensor| top_distillation_backward(x.copy()?, &top, &[6, IGNORED_LABEL, 0], 1.0, OF, Some(0.6));
    check_gradient("dlogits", &logits, &of(&logits).unwrap().1, |x| Ok(of(x)?.0.objective));
}

#[test]
fn a_teachers_largest_logits_that_do_not_fit_are_errors() {
    // The host alone: a device has no kernel.
    let device = candle_core::Device::Cpu;
    let logits = || Tensor::zeros((2, 3), DType::F32, &device).unwrap();
    let top = TopLogits::of_logits(&logits(), 2).unwrap();
    assert!(top_distillation_backward(logits(), &top, &[0], 1.0, OF, None).is_err());
    assert!(top_distillation_backward(logits(), &top, &[0, 3], 1.0, OF, None).is_err());
    assert!(top_distillation_backward(logits(), &top.rows(0, 1).unwrap(), &[0, 1], 1.0, OF, None).is_err());
    let beyond = TopLogits { entries: vec![0, 1, 2, 3], ..top };
    assert!(top_distillation_backward(logits(), &beyond, &[0, 1], 1.0, OF, None).is_err());
}
