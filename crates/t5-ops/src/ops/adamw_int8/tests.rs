use candle_core::{DType, Tensor};

use super::*;
use crate::ops::rounding::Rounding;
use crate::testing::{Numbers, assert_close, device, values};

struct State {
    param: Tensor,
    codes: [Tensor; 2],
    largest: [Tensor; 2],
}

impl State {
    fn new(param: Tensor) -> Self {
        let codes = [0, 1].map(|_| Tensor::zeros(param.shape(), DType::U8, &device()).unwrap());
        let blocks = moment_blocks(param.elem_count());
        State { codes, largest: [0, 1].map(|_| Tensor::zeros(blocks, DType::F32, &device()).unwrap()), param }
    }

    fn update<'a>(&'a self, grad: &'a Tensor, hyper: AdamwHyper) -> AdamwInt8Update<'a> {
        let moments = [0, 1].map(|i| QuantisedMoment { codes: &self.codes[i], largest: &self.largest[i] });
        AdamwInt8Update { param: &self.param, grad, moments, hyper }
    }
}

/// The state after six updates with the same stream of gradients.
fn run(shape: &[usize], dtype: DType, make: fn(&AdamwInt8Update) -> Result<()>) -> State {
    let mut numbers = Numbers::new(33);
    let state = State::new(numbers.tensor(shape, dtype));
    for update in 1..=6 {
        let hyper = AdamwHyper { update, gradient_scale: 0.5, learning_rate: 1e-2, ..AdamwHyper::default() };
        make(&state.update(&numbers.tensor(shape, dtype), hyper)).unwrap();
    }
    state
}

fn kernel(update: &AdamwInt8Update) -> Result<()> {
    adamw_int8_of_each(&[*update])
}

#[test]
fn kernels_agree_with_the_reference() {
    for shape in [&[1][..], &[256], &[257], &[7, 65], &[300, 96], &[2, 3, 5]] {
        let (got, expected) = (run(shape, DType::F32, kernel), run(shape, DType::F32, reference::adamw_int8));
        assert_close(&format!("{shape:?}"), &got.param, &expected.param, 2e-6);
        for i in 0..2 {
            assert_close(&format!("{shape:?}"), &got.largest[i], &expected.largest[i], 2e-6);
            // A value between two numbers of a map may round either way.
            let [got, expected] = [&got.codes[i], &expected.codes[i]].map(values);
            let other = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert!(other * 1000 <= got.len(), "{shape:?}: {other} of {} codes", got.len());
        }
    }
}

#[test]
fn moments_are_within_the_spacing_of_their_map() {
    let (shape, mut numbers) = ([40, 96], Numbers::new(5));
    let grad = numbers.tensor(&shape, DType::F32);
    let state = State::new(numbers.tensor(&shape, DType::F32));
    kernel(&state.update(&grad, AdamwHyper::default())).unwrap();
    let bytes: Vec<u8> = state.codes[0].flatten_all().unwrap().to_vec1().unwrap();
    let largest: Vec<f32> = state.largest[0].to_vec1().unwrap();
    for (i, (code, grad)) in bytes.iter().zip(values(&grad)).enumerate() {
        let (value, largest) = (map::signed().numbers[usize::from(*code)] * largest[i / 256], largest[i / 256]);
        let moment = 0.1 * grad as f32;
        // Between 0.1 and 1 there are 64 numbers, and as many for each tenth below as the half of the tenth above.
        assert!((value - moment).abs() <= 0.0071 * largest, "{i}: {value} for {moment}");
    }
}

#[test]
fn a_bf16_parameter_is_rounded_by_row_and_column() {
    let mut numbers = Numbers::new(8);
    let wide = numbers.tensor(&[40, 33], DType::F32);
    let grad = numbers.tensor(&[40, 33], DType::F32);
    let hyper = AdamwHyper { rounding: Rounding::Stochastic { key: 7 }, ..AdamwHyper::default() };
    let states = [State::new(wide.to_dtype(DType::BF16).unwrap()), State::new(wide.to_dtype(DType::BF16).unwrap())];
    kernel(&states[0].update(&grad, hyper)).unwrap();
    let none = [0, 1].map(|_| wide.zeros_like().unwrap());
    crate::adamw(&states[1].param, &grad, &none[0], &none[1], &hyper).unwrap();
    assert_eq!(values(&states[0].param), values(&states[1].param), "the first update is that of moments in f32");
}

#[test]
fn state_of_other_shapes_or_dtypes_is_refused() {
    let state = State::new(Tensor::zeros((4, 4), DType::F32, &device()).unwrap());
    let grad = state.param.ones_like().unwrap();
    kernel(&state.update(&grad, AdamwHyper::default())).unwrap();
    let other = State { largest: [state.largest[0].clone(), grad.clone()], ..State::new(state.param.clone()) };
    assert!(kernel(&other.update(&grad, AdamwHyper::default())).is_err());
    let other = State { codes: [grad.copy().unwrap(), state.codes[1].clone()], ..State::new(state.param.clone()) };
    assert!(kernel(&other.update(&grad, AdamwHyper::default())).is_err());
    assert!(kernel(&state.update(&state.param, AdamwHyper::default())).is_err());
}
