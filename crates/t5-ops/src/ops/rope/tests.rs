use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance, values, weighted};

const PLAIN: Rope = Rope { base: 10_000.0, factor: 1.0, first_position: 0 };

#[test]
fn the_reference_agrees_with_finite_differences_and_turns_back() {
    let mut numbers = Numbers::new(3);
    let (x, dy) = (numbers.tensor(&[2, 5, 12], DType::F64), numbers.tensor(&[2, 5, 12], DType::F64));
    let of = Rope { base: 100.0, factor: 2.0, first_position: 7 };
    let dx = rope_backward(dy.copy().unwrap(), 3, &of).unwrap();
    check_gradient("dx", &x, &dx, |x| weighted(&rope(x.copy()?, 3, &of)?, &dy));
    let again = rope_backward(rope(x.copy().unwrap(), 3, &of).unwrap(), 3, &of).unwrap();
    // Sines and cosines are f32.
    assert_close("turned back", &again, &x, 1e-6);
}

#[test]
fn kernels_agree_with_the_reference() {
    let ropes =
        [PLAIN, Rope { base: 1e6, factor: 8.0, first_position: 131_000 }, Rope { first_position: 16_000_000, ..PLAIN }];
    for dtype in [DType::F32, DType::BF16] {
        for (of, (b, t, heads, size)) in
            ropes.into_iter().zip([(1, 1, 1, 2), (3, 7, 2, 6), (2, 70, 4, 256)]).chain([(PLAIN, (2, 300, 1, 64))])
        {
            let x = Numbers::new(5).tensor(&[b, t, heads * size], dtype);
            for (got, expected) in [
                (rope(x.copy().unwrap(), heads, &of), reference::rope(&x, heads, &of)),
                (rope_backward(x.copy().unwrap(), heads, &of), reference::rope_backward(&x, heads, &of)),
            ] {
                // The same f32 angle: cosines differ in the last place.
                let tolerance = if dtype == DType::F32 { 1e-6 } else { tolerance(dtype) };
                assert_close("rope", &got.unwrap(), &expected.unwrap(), tolerance);
            }
        }
    }
}

#[test]
fn a_position_has_the_same_rotation_wherever_a_sequence_begins() {
    let x = Numbers::new(6).tensor(&[1, 9, 32], DType::F32);
    let whole = rope(x.copy().unwrap(), 2, &PLAIN).unwrap();
    let from_four =
        rope(x.narrow(1, 4, 5).unwrap().force_contiguous().unwrap(), 2, &Rope { first_position: 4, ..PLAIN });
    assert_eq!(values(&whole.narrow(1, 4, 5).unwrap()), values(&from_four.unwrap()));
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let x = || Tensor::zeros((1, 2, 12), DType::F32, &device()).unwrap();
    assert!(rope(x(), 5, &PLAIN).is_err());
    assert!(rope(x(), 4, &PLAIN).is_err());
    assert!(rope(x(), 0, &PLAIN).is_err());
    assert!(rope(x(), 2, &Rope { base: 0.0, ..PLAIN }).is_err());
    assert!(rope(x(), 2, &Rope { factor: f64::NAN, ..PLAIN }).is_err());
    assert!(rope(x(), 2, &Rope { first_position: usize::MAX, ..PLAIN }).is_err());
}
