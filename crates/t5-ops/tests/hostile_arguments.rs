//! Public operations with arguments that no caller should pass, and with arguments at the edge of the valid ones: an error or the right
//! result, and never a change outside of the named tensors.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;
#[path = "support/tensors.rs"]
mod tensors;

use candle_core::{DType, Result, Tensor};
use proptest::prelude::*;
use t5_ops::{
    Activation, AdafactorHyper, Attended, Attention, CrossEntropy, Dropout, IGNORED_LABEL, LossSums, Mask, Path,
    RelativePosition, SecondMoment, SquareSums, TokenLoss, adafactor, adafactor_with_sums, attention,
    attention_backward, dropout, dropout_add, embedding, embedding_backward, feed_forward_activation,
    feed_forward_activation_backward, linear, linear_backward_input, linear_backward_weight, linear_cross_entropy,
    linear_cross_entropy_backward, linear_cross_entropy_backward_needs, linear_cross_entropy_needs, relative_bias,
    rms_norm, rms_norm_backward, zero,
};

use self::device::device;
use self::tensors::bits;

const SCALES: CrossEntropy = CrossEntropy {
    logit_scale: 0.5,
    soft_cap: None,
    gradient_scale: 0.1,
    chunk_rows: 3,
    token_loss: TokenLoss { z_loss: 0.0, label_smoothing: 0.0, is_logit: false },
};

fn numbers(shape: &[usize], dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 64) as f32 / 32.0 - 1.0).collect();
    Tensor::from_vec(values, shape, &device()).unwrap().to_dtype(dtype).unwrap()
}

/// The same numbers as a view: a part of a larger tensor with the first two dimensions exchanged.
fn view(shape: &[usize], dtype: DType) -> Tensor {
    let [first, second, rest @ ..] = shape else { return numbers(shape, dtype) };
    let turned = numbers(shape, dtype).transpose(0, 1).unwrap().contiguous().unwrap();
    let around = |n: usize| numbers(&[&[n], &[*first], rest].concat(), dtype);
    let larger = Tensor::cat(&[&around(1), &turned, &around(2)], 0).unwrap();
    let view = larger.narrow(0, 1, *second).unwrap().transpose(0, 1).unwrap();
    assert_eq!(view.dims(), shape);
    view
}

/// The same numbers without gaps, one element after the start of an allocation: not aligned to several elements.
fn behind_one(shape: &[usize], dtype: DType) -> Tensor {
    let all = numbers(shape, dtype);
    let larger = Tensor::cat(&[&numbers(&[1], dtype), &all.flatten_all().unwrap()], 0).unwrap();
    let view = larger.narrow(0, 1, all.elem_count()).unwrap().reshape(shape).unwrap();
    assert!(view.is_contiguous() && view.storage_and_layout().1.start_offset() == 1);
    view
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// A tensor to add to, between others whose values [`Accumulator::result`] checks.
struct Accumulator {
    all: Tensor,
    part: Tensor,
}

impl Accumulator {
    /// Zeros of (rows, ..) between rows of sevens.
    fn new(shape: &[usize], dtype: DType) -> Self {
        let (rows, rest) = shape.split_first().unwrap();
        let sevens =
            |rows: usize| Tensor::full(7f32, [&[rows], rest].concat(), &device()).unwrap().to_dtype(dtype).unwrap();
        let zeros = Tensor::zeros(shape, dtype, &device()).unwrap();
        let all = Tensor::cat(&[&sevens(2), &zeros, &sevens(3)], 0).unwrap();
        let part = all.narrow(0, 2, *rows).unwrap();
        Self { all, part }
    }

    #[track_caller]
    fn result(&self) -> Vec<u32> {
        let rows = self.part.dim(0).unwrap();
        for (first, count) in [(0, 2), (2 + rows, 3)] {
            let around = self.all.narrow(0, first, count).unwrap();
            assert!(values(&around).iter().all(|&x| x == 7.0), "what lies beside an accumulator");
        }
        bits(&self.part)
    }
}

fn mask(samples: &[u32]) -> Dropout<'_> {
    Dropout { probability: 0.3, seed: 1, step: 2, site: 3, samples }
}

/// A tensor of one value that claims more elements than can be counted.
fn endless(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::ones(vec![1; dims.len()], dtype, &device()).unwrap().broadcast_as(dims).unwrap()
}

#[test]
fn shapes_that_no_memory_could_hold_are_errors() {
    const MANY: usize = 1 << 33;
    let samples = [0];
    for dtype in [DType::F32, DType::BF16] {
        let x = endless(&[MANY, MANY, 4], dtype);
        let w = numbers(&[3, 4], dtype);
        assert!(linear(&x, &w).is_err());
        assert!(linear_backward_input(&x, &numbers(&[4, 3], dtype), None).is_err());
        assert!(linear_backward_weight(&x, &x, &numbers(&[4, 4], dtype), true).is_err());
        assert!(rms_norm(&x, &numbers(&[4], dtype), 1e-6).is_err());
        assert!(feed_forward_activation(&x, None, Activation::Relu, None).is_err());
        assert!(dropout(&x, Some(&mask(&samples))).is_err());
        let a = Attention { mask: Mask::CAUSAL, ..Attention::new(2, &[1]) };
        assert!(attention(&x, &x, &x, &a).is_err());
        let empty = Tensor::zeros((0, 1 << 62, 4), dtype, &device()).unwrap();
        let nobody = Attention { key_lengths: &[], ..a };
        assert!(attention(&empty, &empty, &empty, &nobody).is_err());
        assert!(embedding(&numbers(&[2, 2], DType::U32), &endless(&[MANY, MANY], dtype), dtype).is_err());
        assert!(linear_cross_entropy(&w, &endless(&[MANY, 4 * MANY], dtype), &[0, 0, 0], &SCALES).is_err());
    }
    let r = RelativePosition { buckets: 8, max_distance: 20, bidirectional: true };
    let table = numbers(&[8, 2], DType::F32);
    for (queries, keys, first) in [(usize::MAX, 2, 0), (1 << 62, 1 << 62, 0), (1, 1, usize::MAX), (0, 1, 0), (1, 0, 0)]
    {
        assert!(relative_bias(&table, &r, queries, keys, first).is_err(), "{queries} {keys} {first}");
    }
}

#[test]
fn numbers_out_of_range_are_errors_and_change_nothing() -> Result<()> {
    let table = numbers(&[5, 6], DType::F32);
    for id in [5u32, 1 << 20, u32::MAX] {
        if !device().is_cpu() {
            // Ids on a card are not checked: the caller checks them before it uploads them.
            continue;
        }
        let ids = Tensor::new(&[[0, id, 4]], &device())?;
        assert!(embedding(&ids, &table, DType::F32).is_err());
        let to = Accumulator::new(&[5, 6], DType::F32);
        assert!(embedding_backward(&ids, &numbers(&[1, 3, 6], DType::F32), &to.part).is_err());
        assert!(to.result().iter().all(|&bits| bits == 0));
    }
    assert!(embedding(&Tensor::new(&[[0i64]], &device())?, &table, DType::F32).is_err());

    let x = numbers(&[3, 6], DType::F32);
    for labels in [&[0, 1, 5][..], &[0, 1], &[0, 1, 2, 3], &[0, u32::MAX - 1, 2], &[]] {
        assert!(linear_cross_entropy(&x, &table, labels, &SCALES).is_err(), "{labels:?}");
        assert!(linear_cross_entropy_backward(&x, &table, labels, &SCALES, None).is_err(), "{labels:?}");
    }
    assert!(linear_cross_entropy(&x, &table, &[0, 1, 2], &CrossEntropy { chunk_rows: 0, ..SCALES }).is_err());

    let q = numbers(&[2, 3, 4], DType::F32);
    let a = Attention::new(2, &[3, 3]);
    let all = attention(&q, &q, &q, &a)?.0;
    // Lengths beyond the keys are all keys.
    assert_eq!(bits(&attention(&q, &q, &q, &Attention { key_lengths: &[usize::MAX, 4], ..a })?.0), bits(&all));
    for wrong in [
        Attention { heads: 0, ..a },
        Attention { heads: 3, ..a },
        Attention { key_lengths: &[3], ..a },
        Attention { key_lengths: &[3; 3], ..a },
        Attention { bias: Some(&numbers(&[2, 4], DType::F32)), ..a },
        Attention { dropout: Some(mask(&[1])), ..a },
        Attention { dropout: Some(Dropout { probability: 1.0, ..mask(&[1, 2]) }), ..a },
        Attention { dropout: Some(Dropout { probability: f32::NAN, ..mask(&[1, 2]) }), ..a },
    ] {
        assert!(attention(&q, &q, &q, &wrong).is_err(), "{wrong:?}");
    }
    assert!(attention(&q, &numbers(&[2, 3, 6], DType::F32), &q, &a).is_err());
    assert!(dropout_add(&q, &numbers(&[2, 3, 5], DType::F32), None).is_err());
    Ok(())
}

#[test]
fn sizes_of_zero_are_errors_or_empty_results() -> Result<()> {
    let none = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device()).unwrap();
    assert_eq!(linear(&none(&[0, 4]), &numbers(&[3, 4], DType::F32))?.dims(), [0, 3]);
    assert_eq!(values(&linear(&none(&[2, 0]), &none(&[3, 0]))?), [0.0; 6]);
    assert_eq!(linear(&none(&[2, 4]), &none(&[0, 4]))?.dims(), [2, 0]);
    assert_eq!(values(&linear_backward_input(&none(&[2, 0]), &none(&[0, 3]), None)?), [0.0; 6]);
    let to = Accumulator::new(&[3, 4], DType::F32);
    linear_backward_weight(&none(&[0, 3]), &none(&[0, 4]), &to.part, true)?;
    assert!(to.result().iter().all(|&bits| bits == 0));
    let (y, inv_rms) = rms_norm(&none(&[2, 0, 4]), &none(&[4]), 1e-6)?;
    assert_eq!((y.dims(), inv_rms.dims()), (&[2, 0, 4][..], &[0][..]));
    let _ = rms_norm(&none(&[2, 0]), &none(&[0]), 1e-6);

    let nobody = Tensor::zeros((0, 3), DType::U32, &device())?;
    assert_eq!(embedding(&nobody, &none(&[5, 6]), DType::F32)?.dims(), [0, 3, 6]);
    embedding_backward(&nobody, &none(&[0, 3, 6]), &none(&[5, 6]))?;
    let ids = Tensor::zeros((1, 2), DType::U32, &device())?;
    assert!(!device().is_cpu() || embedding(&ids, &none(&[0, 6]), DType::F32).is_err());
    assert_eq!(embedding(&ids, &none(&[5, 0]), DType::F32)?.dims(), [1, 2, 0]);
    // On the CPU candle refuses a table without columns, as if its rows overlapped. On a card candle is not called.
    let without_columns = embedding_backward(&ids, &none(&[1, 2, 0]), &none(&[5, 0]));
    assert_eq!(without_columns.is_err(), device().is_cpu());

    let ignored = [IGNORED_LABEL; 2];
    for (vocabulary, width) in [(5, 4), (0, 4), (5, 0), (0, 0)] {
        let (x, w) = (none(&[2, width]), none(&[vocabulary, width]));
        assert_eq!(linear_cross_entropy(&x, &w, &ignored, &SCALES)?, 0.0);
        for accumulates in [true, false] {
            let (loss, dx) = linear_cross_entropy_backward(&x, &w, &ignored, &SCALES, Some((&w, accumulates)))?;
            assert_eq!((loss, dx.dims()), (LossSums::default(), x.dims()));
        }
        for path in [Path::Cpu, Path::Reference] {
            linear_cross_entropy_needs(path, 0, (vocabulary, width), [DType::F32; 2], &SCALES);
            linear_cross_entropy_backward_needs(path, 0, (vocabulary, width), [DType::F32; 2], &SCALES, true);
        }
    }
    assert!(linear_cross_entropy(&none(&[2, 4]), &none(&[0, 4]), &[0, IGNORED_LABEL], &SCALES).is_err());
    // Without a width every logit is zero.
    let loss = linear_cross_entropy(&none(&[1, 0]), &none(&[5, 0]), &[3], &SCALES)?;
    assert!((loss - 5f64.ln()).abs() < 1e-6, "{loss}");

    let a = Attention::new(1, &[2]);
    for shape in [[1, 0, 4], [1, 2, 0]] {
        assert!(attention(&none(&shape), &none(&shape), &none(&shape), &a).is_err(), "{shape:?}");
    }
    let nobody = Attention { key_lengths: &[], ..a };
    let of = [(); 3].map(|()| none(&[0, 2, 4]));
    let (out, lse) = attention(&of[0], &of[1], &of[2], &nobody)?;
    let of = Attended { q: &of[0], k: &of[1], v: &of[2], out: &out, lse: &lse };
    assert_eq!(attention_backward(&of, &out, &nobody, None)?.0.dims(), [0, 2, 4]);
    // A sequence without keys gives zeros.
    let q = numbers(&[1, 2, 4], DType::F32);
    assert_eq!(values(&attention(&q, &q, &q, &Attention { key_lengths: &[0], ..a })?.0), [0.0; 8]);
    zero(&none(&[0, 4]))?;
    zero(&none(&[4, 0]))?;
    Ok(())
}

#[test]
fn an_accumulator_that_is_no_whole_block_of_memory_or_an_operand_too_is_an_error() -> Result<()> {
    let (x, square) = (numbers(&[4, 4], DType::F32), numbers(&[4, 4], DType::F32));
    let spread = numbers(&[4, 1], DType::F32).broadcast_as((4, 4))?;
    for to in [&square.t()?, &spread, &square.narrow(1, 0, 4)?.t()?] {
        assert!(linear_backward_weight(&x, &x, to, true).is_err());
        let ids = Tensor::new(&[[0u32, 1]], &device())?;
        assert!(embedding_backward(&ids, &numbers(&[1, 2, 4], DType::F32), to).is_err());
        assert!(linear_cross_entropy_backward(&x, &square, &[0; 4], &SCALES, Some((to, true))).is_err());
    }
    assert!(linear_backward_weight(&x, &x, &x, true).is_err());
    assert!(linear_cross_entropy_backward(&x, &square, &[0; 4], &SCALES, Some((&square, true))).is_err());
    let ones = numbers(&[4], DType::F32);
    let (_, inv_rms) = rms_norm(&x, &ones, 1e-6)?;
    assert!(rms_norm_backward(&x, &ones, &inv_rms, x.clone(), None, None).is_err());

    let hyper = AdafactorHyper { learning_rate: 0.1, beta2: 0.5, ..AdafactorHyper::default() };
    let moments = |n: usize| numbers(&[n], DType::F32);
    let state = moments(4);
    let shared = SecondMoment::Factored { row: state.clone(), col: state };
    assert!(adafactor(&square, &x, &shared, None, &hyper).is_err());
    let factored = |rows, cols| SecondMoment::Factored { row: moments(rows), col: moments(cols) };
    assert!(adafactor(&square, &square, &factored(4, 4), None, &hyper).is_err());
    assert!(adafactor(&square, &x, &factored(4, 3), None, &hyper).is_err());
    assert!(adafactor(&square.t()?, &x, &factored(4, 4), None, &hyper).is_err());
    // Sums of another gradient.
    for shape in [&[4, 5][..], &[3, 4], &[16]] {
        let sums = SquareSums::compute(&numbers(shape, DType::F32))?;
        assert!(adafactor_with_sums(&square, &x, &sums, &factored(4, 4), None, &hyper).is_err(), "{shape:?}");
    }
    adafactor(&square, &x, &factored(4, 4), None, &hyper)
}

#[test]
fn operands_and_results_may_begin_at_any_element() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let results = [numbers, behind_one].map(|make| -> Result<Vec<Vec<u32>>> {
            let (x, weight, bias) = (make(&[2, 3, 8], dtype), make(&[8], dtype), make(&[2, 22], DType::F32));
            let ids = Tensor::new(&[[0u32, 4, 0]], &device())?;
            let sums = make(&[5, 8], DType::F32);
            embedding_backward(&ids, &make(&[1, 3, 8], dtype), &sums)?;
            let (y, inv_rms) = rms_norm(&x, &weight, 1e-6)?;
            let to = make(&[8], DType::F32);
            let dx = rms_norm_backward(&x, &weight, &inv_rms, make(&[2, 3, 8], dtype), Some(&x), Some(&to))?;
            let mask = mask(&[0, 1]);
            let h = feed_forward_activation(&x, Some(&make(&[2, 3, 8], dtype)), Activation::Gelu, Some(&mask))?;
            let [gate, up, dh] = [(); 3].map(|()| make(&[2, 3, 8], dtype));
            let (h_again, dgate, dup) =
                feed_forward_activation_backward(gate, Some(up), Activation::Gelu, Some(&mask), dh)?;
            let sum = dropout_add(&x, &make(&[2, 3, 8], dtype), Some(&mask))?;
            let mut all = vec![sums, y, to, dx, h, h_again, dgate, dup.unwrap(), sum];
            all.push(embedding(&ids, &make(&[5, 8], dtype), dtype)?);
            all.push(linear(&x, &make(&[16, 8], dtype))?);
            // With heads of 32 elements, tensor cores multiply bf16. Few queries have a kernel of their own.
            for queries in [2, 12] {
                let bias = bias.narrow(1, 0, queries + 10)?;
                let a = Attention { bias: Some(&bias), ..Attention::new(2, &[11, 5]) };
                let [q, k, v] = [queries, 11, 11].map(|rows| make(&[2, rows, 64], dtype));
                let (out, lse) = attention(&q, &k, &v, &a)?;
                let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
                let (dq, dk, dv) = attention_backward(&of, &make(&[2, queries, 64], dtype), &a, None)?;
                all.extend([out, lse, dq, dk, dv]);
            }
            Ok(all.iter().map(bits).collect())
        });
        let [whole, behind] = results.map(|bits| bits.unwrap());
        for (at, (whole, behind)) in whole.iter().zip(&behind).enumerate() {
            assert_eq!(whole, behind, "{dtype:?}, result {at}");
        }
    }
    Ok(())
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn views_count_like_copies_of_them_in_products_norms_and_activations(
        (batch, rows, k, n) in (1usize..4, 1usize..40, 1usize..70, 1usize..70),
        dtype in dtypes(),
    ) {
        let [x, w, gate] = [&[batch, rows, k][..], &[n, k], &[batch, rows, n]].map(|shape| (view(shape, dtype), numbers(shape, dtype)));
        prop_assert_eq!(bits(&linear(&x.0, &w.0)?), bits(&linear(&x.1, &w.1)?));
        prop_assert_eq!(bits(&linear_backward_input(&gate.0, &w.0, None)?), bits(&linear_backward_input(&gate.1, &w.1, None)?));
        let to = [(); 2].map(|()| Accumulator::new(&[n, k], DType::F32));
        linear_backward_weight(&gate.0, &x.0, &to[0].part, true)?;
        linear_backward_weight(&gate.1, &x.1, &to[1].part, true)?;
        prop_assert_eq!(to[0].result(), to[1].result());

        let weight = numbers(&[k], dtype);
        let norms = [&x.0, &x.1].map(|x| rms_norm(x, &weight, 1e-6).unwrap());
        prop_assert_eq!(bits(&norms[0].0), bits(&norms[1].0));
        let to = [(); 2].map(|()| Accumulator::new(&[k], DType::F32));
        let dx = [&x.0, &x.1].map(|x| x).into_iter().zip(&to).map(|(x, to)| {
            let dy = view(&[batch, rows, k], dtype);
            rms_norm_backward(x, &weight, &norms[0].1, dy, Some(&view(&[batch, rows, k], dtype)), Some(&to.part)).unwrap()
        }).collect::<Vec<_>>();
        prop_assert_eq!(bits(&dx[0]), bits(&dx[1]));
        prop_assert_eq!(to[0].result(), to[1].result());

        let samples: Vec<u32> = (0..batch as u32).collect();
        for a in [Activation::Relu, Activation::GeluNew, Activation::Gelu, Activation::Silu] {
            let of = |x: &Tensor| feed_forward_activation(x, Some(&view(&[batch, rows, n], dtype)), a, Some(&mask(&samples)));
            prop_assert_eq!(bits(&of(&gate.0)?), bits(&of(&gate.1)?));
        }
        let of = |x: &Tensor| dropout_add(&view(&[batch, rows, k], dtype), x, Some(&mask(&samples)));
        prop_assert_eq!(bits(&of(&x.0)?), bits(&of(&x.1)?));
    }

    #[test]
    fn views_count_like_copies_of_them_in_attention(
        (batch, heads, queries, keys) in (1usize..3, 1usize..4, 1usize..70, 1usize..70),
        (size, causal) in (prop_oneof![Just(1usize), Just(7), Just(32), Just(64)], any::<bool>()),
        dtype in dtypes(),
        lengths in proptest::collection::vec(0usize..100, 3),
    ) {
        let (of_queries, of_keys) = ([batch, queries, heads * size], [batch, keys, heads * size]);
        let samples: Vec<u32> = (0..batch as u32).collect();
        let bias = [view(&[heads, queries + keys - 1], DType::F32), numbers(&[heads, queries + keys - 1], DType::F32)];
        let results = [view, numbers].iter().zip(&bias).map(|(make, bias)| {
            let a = Attention { bias: Some(bias), mask: Mask::causal_if(causal), dropout: Some(mask(&samples)), ..Attention::new(heads, &lengths[..batch]) };
            let (q, k, v) = (make(&of_queries, dtype), make(&of_keys, dtype), make(&of_keys, dtype));
            let (out, lse) = attention(&q, &k, &v, &a).unwrap();
            let to = Accumulator::new(&[heads, queries + keys - 1], DType::F32);
            let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
            let (dq, dk, dv) = attention_backward(&of, &make(&of_queries, dtype), &a, Some(&to.part)).unwrap();
            ([&out, &lse, &dq, &dk, &dv].map(bits), to.result())
        }).collect::<Vec<_>>();
        prop_assert!(results[0] == results[1]);
    }

    #[test]
    fn views_count_like_copies_of_them_in_the_loss_and_the_embedding(
        (rows, vocabulary, width, chunk_rows) in (1usize..40, 1usize..300, 1usize..40, 1usize..50),
        dtype in dtypes(),
        seed in any::<u32>(),
    ) {
        let labels: Vec<u32> = (0..rows as u32).map(|row| {
            let label = seed.wrapping_mul(row.wrapping_add(77)) % (vocabulary as u32 + 1);
            if label == vocabulary as u32 { IGNORED_LABEL } else { label }
        }).collect();
        let c = CrossEntropy { chunk_rows, ..SCALES };
        let results = [view, numbers].map(|make| {
            let (x, w) = (make(&[rows, width], dtype), make(&[vocabulary, width], dtype));
            let to = Accumulator::new(&[vocabulary, width], DType::F32);
            let (loss, dx) = linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&to.part, true))).unwrap();
            (loss.cross_entropy.to_bits(), bits(&dx), to.result(), linear_cross_entropy(&x, &w, &labels, &c).unwrap().to_bits())
        });
        prop_assert!(results[0] == results[1]);

        let ids: Vec<u32> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0 } else { label }).collect();
        let ids = Tensor::from_vec(ids, (1, rows), &device())?;
        let results = [view, numbers].map(|make| {
            let y = embedding(&ids, &make(&[vocabulary, width], dtype), dtype).unwrap();
            let to = Accumulator::new(&[vocabulary, width], DType::F32);
            embedding_backward(&ids, &make(&[1, rows, width], dtype), &to.part).unwrap();
            (bits(&y), to.result())
        });
        prop_assert!(results[0] == results[1]);
    }
}
