//! Compares operations on a card with those on the CPU: launches, strides, dtypes and places of results. `cuda-kernels` tests the kernels'
//! own numbers. Runs on a card, or on the emulated one.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Result, Tensor};
use cuda_device::Staging;
use t5_ops::{
    Activation, AdafactorHyper, AdafactorUpdate, AdamwHyper, AdamwUpdate, Attended, Attention, CrossEntropy, Dropout,
    Mask, Precision, Quantised, RelativePosition, Rounding, SecondMoment, SquareSums, TokenLoss,
};

const F32: DType = DType::F32;
const BF16: DType = DType::BF16;
const PRECISIONS: [Precision; 2] = [Precision::Int8, Precision::Nf4];

/// Tensors that a call gives, by name.
type Results = Vec<(&'static str, Tensor)>;

/// Makes tensors of the same numbers on either device.
struct Maker {
    device: Device,
    state: u64,
}

impl Maker {
    fn new(device: &Device) -> Self {
        Self { device: device.clone(), state: 0 }
    }

    fn tensor(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        let mut next = || {
            self.state = t5_ops::keys::mix(self.state);
            (self.state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        tensor.to_device(&self.device).unwrap()
    }

    /// The same numbers in codes, which are made on the CPU.
    fn quantised(&mut self, shape: &[usize], precision: Precision) -> Quantised {
        let w = self.tensor(shape, F32).to_device(&Device::Cpu).unwrap();
        let w = Quantised::quantise(&w, precision).unwrap();
        Quantised::new(w.quantisation(), w.bytes().to_device(&self.device).unwrap()).unwrap()
    }

    fn ids(&self, ids: &[u32]) -> Tensor {
        Tensor::new(ids, &self.device).unwrap()
    }
}

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

/// Selects the cases, which begin with a dtype of activations, that the card computes in: before Ampere, f32 alone.
fn offered<T>(cases: impl IntoIterator<Item = (DType, T)>) -> impl Iterator<Item = (DType, T)> {
    let card = card();
    cases.into_iter().filter(move |(dtype, _)| cuda_device::check_dtype(&card, *dtype).is_ok())
}

fn dtypes() -> impl Iterator<Item = DType> {
    offered([(F32, ()), (BF16, ())]).map(|(dtype, ())| dtype)
}

fn numbers(t: &Tensor) -> Vec<f64> {
    let t = t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Runs `call` on the CPU, and twice on the card: the results agree, and both results of the card have the same bits.
#[track_caller]
fn check(what: &str, tolerance: f64, call: impl Fn(&mut Maker) -> Result<Results>) {
    let card = card();
    let expected = call(&mut Maker::new(&Device::Cpu)).unwrap();
    let [first, second] = [0, 1].map(|_| call(&mut Maker::new(&card)).unwrap());
    for (((name, expected), (_, got)), (_, again)) in expected.iter().zip(&first).zip(&second) {
        let what = format!("{what}: {name}");
        assert!(!got.device().is_cpu(), "{what} left the card");
        assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
        let (got, expected, again) = (numbers(got), numbers(expected), numbers(again));
        assert!(got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: other bits the second time");
        let scale = expected.iter().filter(|x| x.is_finite()).fold(1e-30f64, |most, x| most.max(x.abs()));
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            let is_close = g == e || (g - e).abs() <= tolerance * scale;
            assert!(is_close, "{what}: element {i}: expected {e}, got {g} (scale {scale})");
        }
    }
}

fn tolerance(dtype: DType) -> f64 {
    if dtype == BF16 { 1.6e-2 } else { 1e-5 }
}

const SAMPLES: [u32; 2] = [7, 3];

fn drops() -> Dropout<'static> {
    Dropout { probability: 0.2, seed: 5, step: 3, site: 4, samples: &SAMPLES }
}

#[test]
fn products_are_those_of_the_cpu() {
    for (dtype, of_weight) in offered([(F32, F32), (BF16, F32), (BF16, BF16), (F32, BF16)]) {
        check(&format!("linear {dtype:?} by {of_weight:?}"), tolerance(dtype), |make| {
            let x = make.tensor(&[9, 2, 24], dtype).transpose(0, 1)?;
            let (w, dy) = (make.tensor(&[24, 40], of_weight).t()?, make.tensor(&[2, 9, 40], dtype));
            let of_input = make.tensor(&[2, 9, 24], dtype);
            let (u, b, a) = (make.tensor(&[2, 9, 4], dtype), make.tensor(&[40, 4], F32), make.tensor(&[4, 24], F32));
            let [forward, backward] = [&b, &a].map(|w| Some(t5_ops::AddedProduct { x: &u, w }));
            let dw = make.tensor(&[40, 24], F32);
            t5_ops::linear_backward_weight(&dy, &x, &dw, true)?;
            let whole = make.tensor(&[40, 24], F32);
            t5_ops::linear_backward_weight(&dy, &x, &whole, false)?;
            Ok(vec![
                ("y", t5_ops::linear(&x, &w)?),
                ("y beside", t5_ops::linear_plus_product(&x, &w, forward)?),
                ("y scaled", t5_ops::linear_scaled(&x, &w, 0.3)?),
                ("dx beside", t5_ops::linear_backward_input_plus_product(&dy, &w, backward, None)?),
                ("dx scaled", t5_ops::linear_backward_input_scaled(&dy, &w, 0.3)?),
                ("dx", t5_ops::linear_backward_input(&dy, &w, None)?),
                ("dx +=", t5_ops::linear_backward_input(&dy, &w, Some(of_input))?),
                ("dw +=", dw),
                ("dw", whole),
            ])
        });
    }
}

#[test]
fn copies_in_bf16_of_many_weights_are_those_of_the_cpu() {
    check("copies in bf16", 0.0, |make| {
        let wide = [[3, 5], [130, 257]].map(|shape| make.tensor(&shape, F32));
        let narrow = wide.each_ref().map(|wide| make.tensor(wide.dims(), BF16));
        t5_ops::narrow_each(&[(&wide[0], &narrow[0]), (&wide[1], &narrow[1])])?;
        let [small, large] = narrow;
        Ok(vec![("small", small), ("large", large)])
    });
}

#[test]
fn products_with_codes_are_those_of_the_cpu() {
    // Few rows and more; also widths that are not read eight at a time, and a weight of more bytes than are numbers at a time.
    let shapes = [(18, 40, 24), (3, 33, 50), (16, 70, 1_032), (17, 2_056, 4_104)];
    for (dtype, precision) in dtypes().flat_map(|dtype| PRECISIONS.map(|precision| (dtype, precision))) {
        for (rows, n, k) in shapes {
            check(&format!("linear {dtype:?} by {precision:?}, {rows} x ({n}, {k})"), tolerance(dtype), |make| {
                let (x, dy) = (make.tensor(&[rows, k], dtype), make.tensor(&[rows, n], dtype));
                let w = make.quantised(&[n, k], precision);
                let (u, b, a) = (make.tensor(&[rows, 4], dtype), make.tensor(&[n, 4], F32), make.tensor(&[4, k], F32));
                let [forward, backward] = [&b, &a].map(|w| Some(t5_ops::AddedProduct { x: &u, w }));
                let of_input = make.tensor(&[rows, k], dtype);
                Ok(vec![
                    ("y", t5_ops::linear(&x, &w)?),
                    ("y beside", t5_ops::linear_plus_product(&x, &w, forward)?),
                    ("dx beside", t5_ops::linear_backward_input_plus_product(&dy, &w, backward, None)?),
                    ("dx +=", t5_ops::linear_backward_input(&dy, &w, Some(of_input))?),
                ])
            });
        }
    }
}

#[test]
fn lengths_of_adapted_rows_are_those_of_the_cpu() {
    for (n, k) in [(40, 24), (33, 50), (2_056, 4_104)] {
        check(&format!("lengths ({n}, {k})"), 1e-5, |make| {
            let (a, b) = (make.tensor(&[4, k], F32), make.tensor(&[n, 4], F32));
            let mut results = Vec::new();
            for (name, dtype) in [("of f32", F32), ("of bf16", BF16)] {
                let w = make.tensor(&[n, k], dtype);
                results.push((name, t5_ops::adapted_row_norms(&w, &a, &b, 0.7)?));
            }
            for precision in PRECISIONS {
                let w = make.quantised(&[n, k], precision);
                results.push((precision.name(), t5_ops::adapted_row_norms(&w, &a, &b, 0.7)?));
            }
            Ok(results)
        });
    }
}

#[test]
fn a_gradient_in_bf16_takes_the_composition() {
    check("dw of bf16", 2e-2, |make| {
        let (x, dy, dw) = (make.tensor(&[8, 24], F32), make.tensor(&[8, 40], F32), make.tensor(&[40, 24], BF16));
        t5_ops::linear_backward_weight(&dy, &x, &dw, true)?;
        Ok(vec![("dw", dw)])
    });
}

#[test]
fn norms_are_those_of_the_cpu() {
    for (dtype, of_weight) in offered([(F32, F32), (BF16, F32), (BF16, BF16)]) {
        for rows in [1, 700] {
            check(&format!("rms_norm {dtype:?} {rows} rows"), tolerance(dtype), |make| {
                let (x, w) = (make.tensor(&[rows, 36], dtype), make.tensor(&[36], of_weight));
                let (dy, residual, dw) =
                    (make.tensor(&[rows, 36], dtype), make.tensor(&[rows, 36], dtype), make.tensor(&[36], F32));
                let (y, inv_rms) = t5_ops::rms_norm(&x, &w, 1e-6)?;
                let alone = t5_ops::rms_norm_backward(&x, &w, &inv_rms, dy.copy()?, None, None)?;
                let dx = t5_ops::rms_norm_backward(&x, &w, &inv_rms, dy, Some(&residual), Some(&dw))?;
                Ok(vec![("y", y), ("inv_rms", inv_rms), ("dx", dx), ("dx alone", alone), ("dweight", dw)])
            });
        }
    }
}

#[test]
fn dropped_elements_are_those_of_the_cpu() {
    for dtype in dtypes() {
        check(&format!("dropout {dtype:?}"), if dtype == BF16 { 8e-3 } else { 1e-7 }, |make| {
            let (x, residual) = (make.tensor(&[2, 5, 33], dtype), make.tensor(&[2, 5, 33], dtype));
            Ok(vec![
                ("dropped", t5_ops::dropout(&x, Some(&drops()))?),
                ("residual + dropped", t5_ops::dropout_add(&residual, &x, Some(&drops()))?),
                ("residual + whole", t5_ops::dropout_add(&residual, &x, None)?),
            ])
        });
    }
}

#[test]
fn activations_are_those_of_the_cpu() {
    for dtype in dtypes() {
        for activation in [Activation::Relu, Activation::GeluNew, Activation::Gelu, Activation::Silu] {
            for (is_gated, drop) in [(false, None), (true, Some(drops()))] {
                check(&format!("{activation:?} {dtype:?} gated {is_gated}"), tolerance(dtype), |make| {
                    let mut tensor = || make.tensor(&[2, 5, 20], dtype);
                    let (gate, up, dh) = (tensor(), tensor(), tensor());
                    let up = is_gated.then_some(up);
                    let h = t5_ops::feed_forward_activation(&gate, up.as_ref(), activation, drop.as_ref())?;
                    let (again, dgate, dup) =
                        t5_ops::feed_forward_activation_backward(gate, up, activation, drop.as_ref(), dh)?;
                    let mut results = vec![("h", h), ("h again", again), ("dgate", dgate)];
                    results.extend(dup.map(|dup| ("dup", dup)));
                    Ok(results)
                });
            }
        }
    }
}

#[test]
fn attention_is_that_of_the_cpu() {
    // Heads that tensor cores take, a size that they do not take, and a size without kernels.
    for (dtype, head_size) in offered([(F32, 16), (F32, 64), (BF16, 64), (BF16, 16), (F32, 132)]) {
        for (has_bias, causal, drop) in [(true, false, Some(drops())), (true, true, None), (false, false, None)] {
            check(
                &format!("attention {dtype:?} {head_size} bias {has_bias} causal {causal}"),
                tolerance(dtype),
                |make| {
                    let (heads, t, s) = (2, 37, if causal { 37 } else { 70 });
                    let mut tensor = |rows: usize| make.tensor(&[2, rows, heads * head_size], dtype);
                    let (q, k, v, dout) = (tensor(t), tensor(s), tensor(s), tensor(t));
                    let q = (q * 0.3)?;
                    let bias = make.tensor(&[heads, t + s - 1], F32);
                    let dbias = make.tensor(&[heads, t + s - 1], F32);
                    let bias = has_bias.then_some(&bias);
                    let lengths = [s, 20];
                    let a = Attention {
                        bias,
                        mask: Mask::causal_if(causal),
                        dropout: drop,
                        ..Attention::new(heads, &lengths)
                    };
                    let (out, lse) = t5_ops::attention(&q, &k, &v, &a)?;
                    let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
                    let (dq, dk, dv) = t5_ops::attention_backward(&of, &dout, &a, has_bias.then_some(&dbias))?;
                    Ok(vec![("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)])
                },
            );
        }
    }
}

#[test]
fn the_relative_position_bias_is_that_of_the_cpu() {
    for dtype in dtypes() {
        check(&format!("relative bias {dtype:?}"), tolerance(dtype), |make| {
            let table = make.tensor(&[32, 4], dtype);
            let position = RelativePosition { bidirectional: true, buckets: 32, max_distance: 128 };
            let bias = t5_ops::relative_bias(&table, &position, 9, 200, 0)?;
            let dbias = make.tensor(bias.dims(), F32);
            let dtable = make.tensor(&[32, 4], F32);
            t5_ops::relative_bias_backward(&dbias, &position, 9, 200, 0, &dtable)?;
            Ok(vec![("bias", bias), ("dtable", dtable)])
        });
    }
}

#[test]
fn embeddings_are_those_of_the_cpu() {
    for (dtype, of_table) in offered([(F32, F32), (BF16, F32), (BF16, BF16)]) {
        check(&format!("embedding {dtype:?} of {of_table:?}"), tolerance(dtype), |make| {
            // One id three times, not contiguously.
            let ids = make.ids(&[4, 0, 9, 4, 2, 4]).reshape((2, 3))?;
            let (table, dy, dtable) =
                (make.tensor(&[10, 20], of_table), make.tensor(&[2, 3, 20], dtype), make.tensor(&[10, 20], F32));
            let y = t5_ops::embedding(&ids, &table, dtype)?;
            // On the CPU ids stay there.
            t5_ops::embedding_backward(&ids, &dy, &dtable)?;
            Ok(vec![("y", y), ("dtable", dtable)])
        });
    }
}

#[test]
fn losses_are_those_of_the_cpu() {
    for (dtype, of_weight) in offered([(F32, F32), (BF16, F32), (BF16, BF16)]) {
        let token = TokenLoss { z_loss: 0.1, label_smoothing: 0.2, is_logit: false };
        for (chunk_rows, token_loss) in [(3, TokenLoss::default()), (100, TokenLoss::default()), (5, token)] {
            check(&format!("cross-entropy {dtype:?}, {chunk_rows} rows at a time"), tolerance(dtype), |make| {
                let (rows, width, vocabulary) = (11, 20, 70);
                let (x, w) = (make.tensor(&[rows, width], dtype), make.tensor(&[vocabulary, width], of_weight));
                let dw = make.tensor(&[vocabulary, width], F32);
                let labels: Vec<u32> =
                    (0..rows as u32).map(|i| if i % 4 == 1 { t5_ops::IGNORED_LABEL } else { i * 5 }).collect();
                let c = CrossEntropy { logit_scale: 0.7, soft_cap: None, gradient_scale: 0.25, chunk_rows, token_loss };
                let loss = t5_ops::linear_cross_entropy(&x, &w, &labels, &c)?;
                let (again, dx) = t5_ops::linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&dw, true)))?;
                let losses = Tensor::new(&[loss, again.cross_entropy, again.objective], x.device())?;
                Ok(vec![("losses", losses), ("dx", dx), ("dw", dw)])
            });
        }
    }
    check("cross-entropy of logits", 1e-6, |make| {
        let logits = make.tensor(&[5, 70], F32);
        let labels = [3, t5_ops::IGNORED_LABEL, 0, 69, 3];
        let loss = t5_ops::logit_cross_entropy(&logits, &labels, None)?;
        let token = TokenLoss { z_loss: 0.1, label_smoothing: 0.2, is_logit: false };
        let (again, gradient) = t5_ops::logit_cross_entropy_backward(logits, &labels, 0.5, token, None)?;
        let losses = [loss, again.cross_entropy, again.objective];
        Ok(vec![("losses", Tensor::new(&losses, gradient.device())?), ("gradient", gradient)])
    });
}

#[test]
fn updates_are_those_of_the_cpu() {
    let stochastic = Rounding::Stochastic { key: 11 };
    for (dtype, rounding) in offered([(F32, Rounding::Nearest), (BF16, Rounding::Nearest), (BF16, stochastic)]) {
        for shape in [&[70, 33][..], &[33], &[1100, 8]] {
            let what = format!("{shape:?} {dtype:?} {rounding:?}");
            check(&format!("adamw {what}"), 8e-3, |make| {
                let (p, g) = (make.tensor(shape, dtype), make.tensor(shape, F32));
                let [m, v] = [make.tensor(shape, F32), make.tensor(shape, F32).sqr()?];
                let h = AdamwHyper { update: 3, gradient_scale: 0.5, rounding, ..AdamwHyper::default() };
                t5_ops::adamw(&p, &g, &m, &v, &h)?;
                Ok(vec![("parameter", p), ("first", m), ("second", v)])
            });
            for has_first in [false, true] {
                check(&format!("adafactor {what} first moment {has_first}"), 8e-3, |make| {
                    let (p, g) = (make.tensor(shape, dtype), make.tensor(shape, F32));
                    let first = has_first.then(|| make.tensor(shape, F32));
                    let second = match *shape {
                        [rows, width] => SecondMoment::Factored {
                            row: make.tensor(&[rows], F32).sqr()?,
                            col: make.tensor(&[width], F32).sqr()?,
                        },
                        _ => SecondMoment::Full(make.tensor(shape, F32).sqr()?),
                    };
                    let beta1 = has_first.then_some(0.9);
                    let h = AdafactorHyper { beta1, rounding, gradient_scale: 0.5, ..AdafactorHyper::default() };
                    let sums = SquareSums::compute(&g)?;
                    let total = Tensor::new(&[sums.total()?], p.device())?;
                    t5_ops::adafactor_with_sums(&p, &g, &sums, &second, first.as_ref(), &h)?;
                    let mut results = vec![("parameter", p), ("sum of squares", total)];
                    match second {
                        SecondMoment::Factored { row, col } => results.extend([("row", row), ("col", col)]),
                        SecondMoment::Full(v) => results.push(("v", v)),
                    }
                    results.extend(first.map(|first| ("first", first)));
                    Ok(results)
                });
            }
        }
    }
}

/// Parameters of Adafactor and their gradients, as a model has them: matrices and vectors, of two dtypes.
fn parameters(make: &mut Maker) -> Result<Vec<(Tensor, Tensor, SecondMoment)>> {
    let shapes = [(&[70, 33][..], BF16), (&[33], F32), (&[1100, 8], BF16), (&[7, 1030], F32), (&[33], F32)];
    let parameter = |&(shape, dtype): &(&[usize], DType)| {
        let second = match *shape {
            [rows, width] => {
                SecondMoment::Factored { row: make.tensor(&[rows], F32).sqr()?, col: make.tensor(&[width], F32).sqr()? }
            }
            _ => SecondMoment::Full(make.tensor(shape, F32).sqr()?),
        };
        Ok((make.tensor(shape, dtype), make.tensor(shape, F32), second))
    };
    shapes.iter().map(parameter).collect()
}

#[test]
fn parameters_that_are_updated_together_have_the_bits_that_they_have_alone() {
    let hyper = |i: usize| {
        let rounding = if i.is_multiple_of(2) { Rounding::Stochastic { key: i as u64 } } else { Rounding::Nearest };
        // Updates with another scale are launched separately.
        let gradient_scale = if i == 4 { 0.25 } else { 0.5 };
        AdafactorHyper { rounding, learning_rate: 0.1, gradient_scale, ..AdafactorHyper::default() }
    };
    // Together, together in another order, and one by one.
    let updated = |order: &[usize], alone: bool| -> Result<Vec<(usize, Vec<f64>, f64)>> {
        let parameters = parameters(&mut Maker::new(&card()))?;
        let sums: Vec<SquareSums> = match alone {
            true => parameters.iter().map(|(_, grad, _)| SquareSums::compute(grad)).collect::<Result<_>>()?,
            false => SquareSums::of_each(&parameters.iter().map(|(_, grad, _)| grad).collect::<Vec<_>>())?,
        };
        let update = |&i: &usize| {
            let (param, grad, second) = &parameters[i];
            AdafactorUpdate { param, grad, sums: &sums[i], second, first: None, hyper: hyper(i) }
        };
        let updates: Vec<AdafactorUpdate> = order.iter().map(update).collect();
        match alone {
            true => updates.iter().try_for_each(|update| t5_ops::adafactor_of_each(&[*update]))?,
            false => t5_ops::adafactor_of_each(&updates)?,
        }
        let totals = SquareSums::totals(&sums)?;
        Ok(parameters.iter().enumerate().map(|(i, (param, ..))| (i, numbers(param), totals[i])).collect())
    };
    let together = updated(&[0, 1, 2, 3, 4], false).unwrap();
    assert_eq!(together, updated(&[3, 0, 4, 2, 1], false).unwrap());
    assert_eq!(together, updated(&[0, 1, 2, 3, 4], true).unwrap());
}

#[test]
fn updates_that_wait_for_the_scale_have_the_bits_of_those_that_have_it() {
    const SCALE: f64 = 0.3;
    let adafactor = |is_ready: bool| -> Result<Vec<Vec<f64>>> {
        let parameters = parameters(&mut Maker::new(&card()))?;
        let sums = SquareSums::of_each(&parameters.iter().map(|(_, grad, _)| grad).collect::<Vec<_>>())?;
        let hyper = AdafactorHyper { gradient_scale: if is_ready { 1.0 } else { SCALE }, ..AdafactorHyper::default() };
        let update = |((param, grad, second), sums)| AdafactorUpdate { param, grad, sums, second, first: None, hyper };
        let updates: Vec<_> = parameters.iter().map(|(p, g, v)| (p, g, v)).zip(&sums).map(update).collect();
        match is_ready {
            true => t5_ops::adafactor_ready(&updates)?.expect("kernels take all of them").make(SCALE)?,
            false => t5_ops::adafactor_of_each(&updates)?,
        }
        let moments = |second: &SecondMoment| match second {
            SecondMoment::Factored { row, col } => [numbers(row), numbers(col)].concat(),
            SecondMoment::Full(v) => numbers(v),
        };
        Ok(parameters.iter().flat_map(|(param, _, second)| [numbers(param), moments(second)]).collect())
    };
    assert_eq!(adafactor(true).unwrap(), adafactor(false).unwrap());
    let adamw = |is_ready: bool| -> Result<Vec<Vec<f64>>> {
        let mut make = Maker::new(&card());
        // Enough parameters that their table is uploaded in two pieces.
        let parameters: Vec<[Tensor; 4]> = (0..700)
            .map(|i| [BF16, F32, F32, F32].map(|dtype| make.tensor(&[1 + i % 3, 5], dtype).abs().unwrap()))
            .collect();
        let hyper = AdamwHyper { gradient_scale: if is_ready { 1.0 } else { SCALE }, ..AdamwHyper::default() };
        let updates: Vec<_> = parameters
            .iter()
            .map(|[param, grad, first, second]| AdamwUpdate { param, grad, first, second, hyper })
            .collect();
        match is_ready {
            true => t5_ops::adamw_ready(&updates)?.expect("kernels take all of them").make(SCALE)?,
            false => updates.iter().try_for_each(|update| t5_ops::adamw_of_each(&[*update]))?,
        }
        Ok(parameters.iter().flatten().map(numbers).collect())
    };
    assert_eq!(adamw(true).unwrap(), adamw(false).unwrap());
}

#[test]
fn gradients_are_added_and_set_to_zero_in_place() {
    for dtype in dtypes() {
        check(&format!("sums {dtype:?}"), 8e-3, |make| {
            let (sum, x, zero) =
                (make.tensor(&[70, 33], dtype), make.tensor(&[70, 33], dtype), make.tensor(&[3, 5], dtype));
            t5_ops::add_in_place(&sum, &x)?;
            t5_ops::zero(&zero)?;
            Ok(vec![("sum", sum), ("zero", zero)])
        });
    }
}

#[test]
fn what_generation_reads_and_copies_is_that_of_the_cpu() {
    for dtype in dtypes() {
        check(&format!("decoding {dtype:?}"), tolerance(dtype), |make| {
            let (logits, cache) = (make.tensor(&[3, 50], dtype), make.tensor(&[4, 6, 8], dtype));
            let [keys, values, other] = [[4, 1, 8], [4, 1, 8], [4, 6, 8]].map(|shape| make.tensor(&shape, dtype));
            let third = make.ids(&[3]);
            let [at, on_card] = [None, Some(&third)].map(|on_card| t5_ops::Position { number: 3, on_card });
            t5_ops::append([&cache, &other], [&keys, &values], at)?;
            let moved = other.copy()?;
            t5_ops::append([&moved, &moved.copy()?], [&values, &keys], on_card)?;
            // One position of the bias of all positions, by its number and by its place on the card.
            let bias = make.tensor(&[2, 11], F32);
            let of_cache = Attention { bias: Some(&bias), ..Attention::new(2, &[]) };
            let attended =
                |position| t5_ops::attention_at(&keys, [&cache, &other], &of_cache, position).map(|(out, _)| out);
            let scores = t5_ops::scores(&logits, true)?;
            let largest = t5_ops::largest(&logits)?;
            t5_ops::copy_rows(&cache, &[(0, 3), (2, 1)], 4)?;
            // Elements after these positions are unspecified.
            Ok(vec![
                ("scores", Tensor::new(scores, logits.device())?),
                ("largest", Tensor::new(largest, logits.device())?),
                ("cache", cache.narrow(1, 0, 4)?.contiguous()?),
                ("moved", moved),
                ("attention", attended(at)?),
                ("attention by a position on the card", attended(on_card)?),
                ("joined", t5_ops::join(&[cache.narrow(0, 1, 2)?, other.clone(), cache.narrow(0, 3, 1)?])?),
                ("scaled", t5_ops::scaled(&other, 0.3)?),
                ("other cache", other),
            ])
        });
    }
}

#[test]
fn candidates_of_a_card_have_the_scores_of_all_tokens_there() {
    let mut make = Maker::new(&card());
    for dtype in dtypes() {
        let logits = make.tensor(&[3, 500], dtype);
        let scores = t5_ops::scores(&logits, true).unwrap();
        let (tokens, of_tokens) =
            t5_ops::candidates(&logits, &[0.0, -7.5, -1e9], 9).unwrap().expect("few are asked for");
        for (place, (&token, &score)) in tokens.iter().zip(&of_tokens).enumerate() {
            assert_eq!(scores[place / 9 * 500 + token as usize].to_bits(), score.to_bits());
        }
        // Added to the last offset, all scores vanish.
        assert_eq!(tokens[18..], [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let worst = of_tokens[8];
        assert!(scores[..500].iter().filter(|&&score| score > worst).count() < 9, "nothing else is likelier");
        assert!(t5_ops::candidates(&logits, &[0.0; 3], 65).unwrap().is_none(), "each is a walk through the logits");
        assert!(t5_ops::candidates(&logits, &[0.0; 2], 1).is_err());
    }
}

#[test]
fn few_queries_over_part_of_a_bias_are_those_of_the_cpu() {
    for (dtype, queries) in offered([(F32, 1), (BF16, 1), (F32, 4), (F32, 9)]) {
        for lengths in [[12, 12], [12, 5]] {
            check(&format!("{queries} queries {dtype:?} {lengths:?}"), tolerance(dtype), |make| {
                let (heads, size, keys) = (2, 20, 16);
                let mut tensor = |rows| make.tensor(&[2, rows, heads * size], dtype);
                let (q, k, v) = (tensor(queries), tensor(keys), tensor(keys));
                let bias = make.tensor(&[heads, 50], F32).narrow(1, 11, queries + keys - 1)?;
                let a = Attention { bias: Some(&bias), ..Attention::new(heads, &lengths) };
                let (out, lse) = t5_ops::attention(&q, &k, &v, &a)?;
                Ok(vec![("out", out), ("lse", lse)])
            });
        }
    }
}

#[test]
fn another_thread_copies_some_of_the_bytes_of_a_tensor_both_ways() {
    let device = cuda_device::open_card(0).expect("a card");
    let x = Tensor::arange(0f32, 12.0, &device).unwrap().reshape((3, 4)).unwrap();
    let staging = Staging::for_device(&device).unwrap().expect("a card has streams");
    assert!(staging.stage(&Tensor::zeros(3, F32, &Device::Cpu).unwrap()).unwrap().is_none());
    assert!(Staging::for_device(&Device::Cpu).unwrap().is_none());
    let staged = staging.stage(&x).unwrap().expect("it is on the card");
    assert_eq!(staged.bytes(), 48);
    let copied = std::thread::spawn(move || {
        let mut bytes = [0; 8];
        staged.read(16, &mut bytes).unwrap();
        staged.write(40, &bytes).unwrap();
        bytes
    });
    assert_eq!(copied.join().unwrap(), [4f32.to_le_bytes(), 5f32.to_le_bytes()].concat()[..]);
    assert_eq!(x.to_vec2::<f32>().unwrap()[2], [8.0, 9.0, 4.0, 5.0]);
    let turned = staging.stage(&x.t().unwrap()).unwrap().expect("it is on the card");
    assert!(turned.read(0, &mut [0; 4]).is_err(), "its bytes are not in their order");
}
