//! Dropout and the feed-forward's activation.

use candle_core::{DType, Tensor};
use cuda_kernels::emulation::{Argument, Schedule};
use t5_ops::keys::mix;
use t5_ops::{Activation, Dropout};

use crate::card::{
    Buffer, assert_close, assert_same_bits, in_every_schedule, launch, null, numbers, suffix, tolerance,
};

/// A kernel's dropout.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Mask {
    step: u64,
    site: u32,
    threshold: u32,
    scale: f32,
    step_on_card: u64,
}

impl Mask {
    pub fn new(d: Option<&Dropout>) -> Self {
        let Some(d) = d else { return Self { step: 0, site: 0, threshold: 0, scale: 1.0, step_on_card: 0 } };
        let threshold = ((f64::from(d.probability) * 65_536.0).round() as u32) << 16;
        let scale = (1.0 / (1.0 - f64::from(d.probability))) as f32;
        Self { step: mix(d.seed ^ mix(d.step + 1)), site: d.site, threshold, scale, step_on_card: 0 }
    }

    /// The same mask with its step on the card. The step argument is wrong, and must not be read.
    fn on_card(self, step: &mut Buffer) -> Self {
        Self { step: 77, step_on_card: step.address(), ..self }
    }
}

#[test]
fn a_step_that_lies_on_the_card_has_the_mask_of_one_that_is_an_argument() {
    let shape = [2, 3, 68];
    let x = numbers(1, &shape, DType::F32);
    let [by_value, on_card] = [false, true].map(|is_on_card| {
        in_every_schedule("a step on the card", |schedule| {
            let (mut x, mut y, mut samples) = (Buffer::copy_of(&x), Buffer::new(&shape, DType::F32), samples());
            let mask = Mask::new(Some(&dropped()));
            let mut step = Buffer::of_entries(&[mask.step]);
            let mask = if is_on_card { mask.on_card(&mut step) } else { mask };
            let arguments = [Argument::from_value(mask), samples.pointer(), null(), x.pointer(), y.pointer()];
            run("dropout_f32", shape, &arguments, schedule);
            vec![y]
        })
    });
    assert_same_bits(&by_value[0], &on_card[0]);
}

const SAMPLES: [u32; 2] = [5, 40];

fn dropped() -> Dropout<'static> {
    Dropout { probability: 0.25, seed: 7, step: 3, site: 11, samples: &SAMPLES }
}

fn samples() -> Buffer {
    Buffer::copy_of(&Tensor::new(&SAMPLES, &candle_core::Device::Cpu).unwrap())
}

/// The last arguments of each kernel are the rows, the positions of a sequence and their width. A block has four rows.
fn run(name: &str, shape: [usize; 3], arguments: &[Argument], schedule: Schedule) {
    let rows = shape[0] * shape[1];
    let sizes = [rows, shape[1], shape[2]].map(|size| Argument::from_value(size as i32));
    launch(name, [rows.div_ceil(4), 1, 1], 64, 4 * 8, &[arguments, &sizes].concat(), schedule);
}

#[test]
fn dropout_drops_the_elements_that_the_cpu_drops() {
    for shape in [[2, 3, 5], [2, 4, 68], [2, 1, 300], [2, 3, 48], [2, 1, 1_040]] {
        for dtype in [DType::F32, DType::BF16] {
            let (x, residual) = (numbers(1, &shape, dtype), numbers(2, &shape, dtype));
            for d in [None, Some(dropped())] {
                for residual in [None, Some(&residual)] {
                    let what = format!("{shape:?} {dtype:?}");
                    let got = in_every_schedule(&what, |schedule| {
                        let (mut x, mut y, mut samples) = (Buffer::copy_of(&x), Buffer::new(&shape, dtype), samples());
                        let mut residual = residual.map(Buffer::copy_of);
                        let arguments = [
                            Argument::from_value(Mask::new(d.as_ref())),
                            samples.pointer(),
                            residual.as_mut().map_or_else(null, Buffer::pointer),
                            x.pointer(),
                            y.pointer(),
                        ];
                        run(&format!("dropout_{}", suffix(dtype)), shape, &arguments, schedule);
                        vec![y]
                    });
                    let expected = match residual {
                        None => t5_ops::dropout(&x, d.as_ref()),
                        Some(residual) => t5_ops::dropout_add(residual, &x, d.as_ref()),
                    };
                    // The same operations in the same order: the same bits.
                    assert_close(&what, &got[0], &expected.unwrap(), 0.0);
                }
            }
        }
    }
}

#[test]
fn activations_and_their_gradients_are_those_of_the_cpu() {
    let kinds = [Activation::Relu, Activation::GeluNew, Activation::Gelu, Activation::Silu];
    for (kind, activation) in kinds.into_iter().enumerate() {
        let narrow = [[2, 3, 5], [2, 2, 72], [2, 3, 48]].map(|shape| (shape, DType::F32));
        for (shape, dtype) in narrow.into_iter().chain([[2, 2, 72], [2, 3, 48]].map(|shape| (shape, DType::BF16))) {
            let three = (numbers(1, &shape, DType::F32) * 3.0).unwrap().to_dtype(dtype).unwrap();
            let (gate, up, dh) = (three, numbers(2, &shape, dtype), numbers(3, &shape, dtype));
            for (up, d) in [(None, None), (Some(&up), Some(dropped())), (None, Some(dropped())), (Some(&up), None)] {
                let what = format!("{activation:?} {shape:?} {dtype:?} {}", up.is_some());
                let first = [Argument::from_value(kind as i32), Argument::from_value(Mask::new(d.as_ref()))];
                let got = in_every_schedule(&what, |schedule| {
                    let (mut gate, mut h, mut samples) =
                        (Buffer::copy_of(&gate), Buffer::new(&shape, dtype), samples());
                    let mut up = up.map(Buffer::copy_of);
                    let of_up = up.as_mut().map_or_else(null, Buffer::pointer);
                    let rest = [samples.pointer(), gate.pointer(), of_up, h.pointer()];
                    let arguments = [&first[..], &rest].concat();
                    run(&format!("activation_{}", suffix(dtype)), shape, &arguments, schedule);
                    vec![h]
                });
                let expected = t5_ops::feed_forward_activation(&gate, up, activation, d.as_ref()).unwrap();
                assert_close(&what, &got[0], &expected, tolerance(dtype));

                let got = in_every_schedule(&what, |schedule| {
                    let (mut gate, mut dh, mut samples) = (Buffer::copy_of(&gate), Buffer::copy_of(&dh), samples());
                    let mut up = up.map(Buffer::copy_of);
                    let of_up = up.as_mut().map_or_else(null, Buffer::pointer);
                    let rest = [samples.pointer(), gate.pointer(), of_up, dh.pointer()];
                    let arguments = [&first[..], &rest].concat();
                    run(&format!("activation_backward_{}", suffix(dtype)), shape, &arguments, schedule);
                    [gate, dh].into_iter().chain(up).collect()
                });
                let given = |t: &Tensor| t.copy().unwrap();
                let (h, dgate, dup) = t5_ops::feed_forward_activation_backward(
                    given(&gate),
                    up.map(given),
                    activation,
                    d.as_ref(),
                    given(&dh),
                )
                .unwrap();
                assert_close(&format!("{what} h"), &got[0], &h, tolerance(dtype));
                assert_close(&format!("{what} dgate"), &got[1], &dgate, tolerance(dtype));
                if let Some(dup) = dup {
                    assert_close(&format!("{what} dup"), &got[2], &dup, tolerance(dtype));
                }
            }
        }
    }
}
