//! The bytes that an operation holds on a card are the bytes that it states: counted by the pool that tensors come from. Runs on a card, or
//! on the emulated one.
#![cfg(feature = "cuda")]

#[path = "support/tensors.rs"]
mod tensors;

use candle_core::{DType, Device, Result, Tensor};
use t5_ops::{
    Activation, AdafactorHyper, AdafactorUpdate, AdamwHyper, AdamwUpdate, AddedProduct, Attended, Attention,
    CrossEntropy, Dropout, MAX_HEAD_ON_DEVICE, Mask, Needs, Path, Precision, Quantisation, Quantised, Rounding,
    SecondMoment, SquareSums, adafactor_needs, adafactor_of_each, adamw_needs, adamw_of_each, adapted_row_norms,
    adapted_row_norms_needs, attention, attention_backward, attention_backward_needs, attention_needs, dropout,
    dropout_add, dropout_add_needs, dropout_needs, embedding, embedding_backward, embedding_backward_needs,
    embedding_needs, feed_forward_activation, feed_forward_activation_backward, feed_forward_activation_backward_needs,
    feed_forward_activation_needs, linear, linear_backward_input, linear_backward_input_needs,
    linear_backward_input_scaled, linear_backward_weight, linear_backward_weight_needs, linear_cross_entropy,
    linear_cross_entropy_backward, linear_cross_entropy_backward_needs, linear_cross_entropy_needs, linear_needs,
    linear_plus_product, linear_scaled, narrow_each, narrow_each_needs, rms_norm, rms_norm_backward,
    rms_norm_backward_needs, rms_norm_needs, square_sums_needs,
};

use self::tensors::{is_emulated, test_alone};

const F32: DType = DType::F32;
const BF16: DType = DType::BF16;
const CARD: Path = Path::Device;
/// Batch, positions, width, heads; rows.
const SIZES: (usize, usize, usize, usize) = (2, 70, 64, 2);
const ROWS: usize = SIZES.0 * SIZES.1;
const VOCABULARY: usize = 700;
const SHAPES_OF_COPIES: [[usize; 2]; 2] = [[96, 64], [700, 64]];
/// Lists of numbers, statistics of a row, and units of 512 bytes.
const SMALL: u64 = 12 << 10;

/// A variable of the emulated card (`cuda-kernels/emulation`).
const CAPABILITY: &str = "LOW_MEM_T5_EMULATED_CAPABILITY";

struct Card(Device);

impl Card {
    fn tensor(&self, shape: &[usize], dtype: DType) -> Tensor {
        let count = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..count).map(|i| ((i * 7919 + 13) % 1009) as f32 / 1009.0 - 0.5).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        tensor.to_device(&self.0).unwrap()
    }

    /// Compares the statement with the bytes that `call` holds at its peak, besides those that stay allocated after it.
    #[track_caller]
    fn check<R>(&self, name: &str, needs: Needs, call: impl Fn() -> Result<R>) {
        // The first call creates lists that are kept.
        drop(call().unwrap());
        cuda_device::release_unused_of_device(&self.0).unwrap();
        let results = call().unwrap();
        let bytes = cuda_device::device_bytes(&self.0).expect("it counts");
        drop(results);
        let (held, stated) = (bytes.tensors_peak - bytes.tensors, needs.transient);
        assert!(held <= stated + SMALL && stated <= held + held / 20 + SMALL, "{name} holds {held}, states {stated}");
        assert_eq!(needs.on_host, 0, "{name}: the processor makes nothing");
    }
}

fn operations(card: &Card, dtype: DType, of_weight: DType, drops: bool) {
    let (b, t, d, heads) = SIZES;
    let [x, y] = [0, 1].map(|_| card.tensor(&[b, t, d], dtype));
    let [w, table] = [[96, d], [VOCABULARY, d]].map(|shape| card.tensor(&shape, of_weight));
    let [dw, dtable] = [[96, d], [VOCABULARY, d]].map(|shape| card.tensor(&shape, F32));
    let (scale, dscale) = (card.tensor(&[d], of_weight), card.tensor(&[d], F32));
    let dy = card.tensor(&[b, t, 96], dtype);
    let ids = Tensor::ones((b, t), DType::U32, &card.0).unwrap();
    let labels = vec![3; ROWS];
    let samples: Vec<u32> = (0..b as u32).collect();
    let always = Dropout { probability: 0.1, seed: 1, step: 1, site: 1, samples: &samples };
    let drop = drops.then_some(always);
    let bias = card.tensor(&[heads, 2 * t - 1], F32);
    let lengths = vec![t; b];
    let settings = Attention { bias: Some(&bias), dropout: drop, ..Attention::new(heads, &lengths) };
    let sizes = settings.sizes_of((b, t, d), t);
    let (out, lse) = attention(&x, &y, &x, &settings).unwrap();
    let of = Attended { q: &x, k: &y, v: &x, out: &out, lse: &lse };
    let rows = x.reshape((ROWS, d)).unwrap();
    let inv_rms = rms_norm(&x, &scale, 1e-6).unwrap().1;
    let (elements, weight, head, both) = ((ROWS * d) as u64, (96, d), (VOCABULARY, d), [dtype, of_weight]);
    let gelu = Activation::GeluNew;
    card.check("embedding", embedding_needs(CARD, ROWS, d, [of_weight, dtype]), || embedding(&ids, &table, dtype));
    card.check("embedding_backward", embedding_backward_needs(CARD, ROWS, head, [dtype, F32]), || {
        embedding_backward(&ids, &x, &dtable)
    });
    card.check("linear", linear_needs(CARD, ROWS, weight, both, 0), || linear(&x, &w));
    card.check("linear_scaled", linear_needs(CARD, ROWS, weight, both, 0), || linear_scaled(&x, &w, 0.3));
    let of_input = linear_backward_input_needs(CARD, ROWS, weight, both, 0, false);
    card.check("linear_backward_input_scaled", of_input, || linear_backward_input_scaled(&dy, &w, 0.3));
    let (narrow, up) = (card.tensor(&[b, t, 8], dtype), card.tensor(&[96, 8], of_weight));
    card.check("linear_plus_product", linear_needs(CARD, ROWS, weight, both, 8), || {
        linear_plus_product(&x, &w, Some(AddedProduct { x: &narrow, w: &up }))
    });
    for accumulates in [false, true] {
        card.check(
            "linear_backward_input",
            linear_backward_input_needs(CARD, ROWS, weight, both, 0, accumulates),
            || linear_backward_input(&dy, &w, accumulates.then(|| x.clone())),
        );
    }
    card.check("linear_backward_weight", linear_backward_weight_needs(CARD, ROWS, weight, [dtype, F32]), || {
        linear_backward_weight(&dy, &x, &dw, true)
    });
    card.check("rms_norm", rms_norm_needs(CARD, elements, dtype), || rms_norm(&x, &scale, 1e-6));
    card.check("rms_norm_backward", rms_norm_backward_needs(CARD, (ROWS as u64, d as u64), dtype, true), || {
        rms_norm_backward(&x, &scale, &inv_rms, y.clone(), Some(&x), Some(&dscale))
    });
    card.check("attention", attention_needs(CARD, &sizes, dtype, drops), || attention(&x, &y, &x, &settings));
    let dbias = card.tensor(&[heads, 2 * t - 1], F32);
    let [delta, partial] = [t, t.div_ceil(32) * (t + 31)].map(|each| (b * heads * each * 4) as u64);
    let needs = attention_backward_needs(CARD, &sizes, dtype, drops, true);
    assert_eq!(needs.transient, delta + partial);
    // Blocks of tensor cores have twice the keys, and half the sums.
    if dtype == F32 {
        card.check("attention_backward", needs, || attention_backward(&of, &y, &settings, Some(&dbias)));
    }
    card.check("feed_forward_activation", feed_forward_activation_needs(CARD, elements, dtype), || {
        feed_forward_activation(&x, Some(&y), gelu, drop.as_ref())
    });
    card.check(
        "feed_forward_activation_backward",
        feed_forward_activation_backward_needs(CARD, elements, dtype),
        || feed_forward_activation_backward(x.clone(), Some(y.clone()), gelu, drop.as_ref(), out.clone()),
    );
    card.check("dropout", dropout_needs(CARD, elements, dtype), || dropout(&x, Some(&always)));
    card.check("dropout_add", dropout_add_needs(CARD, elements, dtype), || dropout_add(&x, &y, Some(&always)));
    for chunk_rows in [50, ROWS] {
        let loss = CrossEntropy { logit_scale: 1.0, gradient_scale: 1.0, chunk_rows, ..CrossEntropy::default() };
        card.check("linear_cross_entropy", linear_cross_entropy_needs(CARD, ROWS, head, both, &loss), || {
            linear_cross_entropy(&rows, &table, &labels, &loss)
        });
        let needs = linear_cross_entropy_backward_needs(CARD, ROWS, head, both, &loss, true);
        card.check("linear_cross_entropy_backward", needs, || {
            linear_cross_entropy_backward(&rows, &table, &labels, &loss, Some((&dtable, true)))
        });
    }
}

/// Attention of the largest heads that have kernels, forward and backward. Its samples are longer than a block's rows, and masked.
fn largest_heads(card: &Card) {
    let (b, t, heads, head_size) = (2, 40, 1, MAX_HEAD_ON_DEVICE);
    let [q, k, v, dout] = [0; 4].map(|_| card.tensor(&[b, t, heads * head_size], F32));
    let [bias, dbias] = [0; 2].map(|_| card.tensor(&[heads, 2 * t - 1], F32));
    let lengths = [t, 33];
    let settings = Attention { bias: Some(&bias), mask: Mask::CAUSAL, ..Attention::new(heads, &lengths) };
    let sizes = settings.sizes_of((b, t, heads * head_size), t);
    let (out, lse) = attention(&q, &k, &v, &settings).unwrap();
    let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    card.check("attention", attention_needs(CARD, &sizes, F32, false), || attention(&q, &k, &v, &settings));
    let needs = attention_backward_needs(CARD, &sizes, F32, false, true);
    card.check("attention_backward", needs, || attention_backward(&of, &dout, &settings, Some(&dbias)));
}

/// Parameters that are updated together. In the sums of squares the last one, which needs the most, is a group by itself: all results exist
/// by then.
const TOGETHER: [(usize, usize); 5] = [(1000, 100), (1, 64), (200, 300), (2, 700_000), (1, 1_500_000)];

/// A parameter's gradient, its moments, and the sums of its gradient.
struct Parameter {
    size: (usize, usize),
    gradient: Tensor,
    second: SecondMoment,
    moments: [Tensor; 2],
    sums: SquareSums,
}

fn updates(card: &Card) {
    let positive = |shape: &[usize]| card.tensor(shape, F32).sqr().unwrap();
    let parameter = |&(n, k): &(usize, usize)| {
        let gradient = card.tensor(&[n, k], F32);
        let second = SecondMoment::Factored { row: positive(&[n]), col: positive(&[k]) };
        let sums = SquareSums::compute(&gradient).unwrap();
        Parameter { size: (n, k), gradient, second, moments: [positive(&[n, k]), positive(&[n, k])], sums }
    };
    let parameters: Vec<Parameter> = TOGETHER.iter().map(parameter).collect();
    for parameters in [&parameters[..1], &parameters[..]] {
        updates_of(card, parameters);
    }
}

fn updates_of(card: &Card, parameters: &[Parameter]) {
    let sizes: Vec<(usize, usize)> = parameters.iter().map(|of| of.size).collect();
    let gradients: Vec<&Tensor> = parameters.iter().map(|of| &of.gradient).collect();
    card.check("square sums", square_sums_needs(CARD, &sizes), || SquareSums::of_each(&gradients));
    for (dtype, rounding) in [(F32, Rounding::Nearest), (BF16, Rounding::Stochastic { key: 7 })] {
        let values: Vec<Tensor> = sizes.iter().map(|&(n, k)| card.tensor(&[n, k], dtype)).collect();
        let hyper = AdafactorHyper { rounding, ..AdafactorHyper::default() };
        let needs = adafactor_needs(CARD, &sizes.iter().map(|&size| (size, dtype)).collect::<Vec<_>>());
        let pairs = values.iter().zip(parameters);
        let update = pairs.clone().map(|(param, Parameter { gradient: grad, sums, second, .. })| AdafactorUpdate {
            param,
            grad,
            sums,
            second,
            first: None,
            hyper,
        });
        let updates: Vec<_> = update.collect();
        card.check("adafactor", needs, || adafactor_of_each(&updates));
        let hyper = AdamwHyper { rounding, ..AdamwHyper::default() };
        let update = pairs.map(|(param, Parameter { gradient: grad, moments: [first, second], .. })| AdamwUpdate {
            param,
            grad,
            first,
            second,
            hyper,
        });
        let updates: Vec<_> = update.collect();
        let elements: Vec<_> = sizes.iter().map(|&(n, k)| ((n * k) as u64, dtype)).collect();
        card.check("adamw", adamw_needs(CARD, &elements), || adamw_of_each(&updates));
    }
}

/// Copies of weights in bf16.
fn copies(card: &Card) {
    let wide = SHAPES_OF_COPIES.map(|shape| card.tensor(&shape, F32));
    let narrow = SHAPES_OF_COPIES.map(|shape| card.tensor(&shape, BF16));
    let pairs: Vec<_> = wide.iter().zip(&narrow).collect();
    card.check("copies", narrow_each_needs(CARD, pairs.len()), || narrow_each(&pairs));
}

/// Products with a weight in codes, whole and in parts; lengths of adapted rows.
fn codes(card: &Card, dtype: DType) {
    let precisions = [Precision::Int8, Precision::Nf4];
    // Few rows are multiplied with the codes directly, more rows with numbers.
    [1, 17].into_iter().for_each(|rows| codes_of(card, dtype, rows, (600, 500), &precisions));
    // A weight of several parts takes seconds on the emulated card: each precision once.
    codes_of(card, dtype, 17, (2_056, 4_104), &precisions[usize::from(dtype == F32)..][..1]);
}

fn codes_of(card: &Card, dtype: DType, rows: usize, (n, k): (usize, usize), precisions: &[Precision]) {
    let (x, dy) = (card.tensor(&[rows, k], dtype), card.tensor(&[rows, n], dtype));
    let (a, b) = (card.tensor(&[4, k], F32), card.tensor(&[n, 4], F32));
    let dense = card.tensor(&[n, k], dtype);
    card.check("lengths", adapted_row_norms_needs(CARD, (n, k), 4), || adapted_row_norms(&dense, &a, &b, 0.5));
    for &precision in precisions {
        let quantisation = Quantisation::new(precision, (n, k)).unwrap();
        let bytes = Tensor::ones(quantisation.bytes(), DType::U8, &card.0).unwrap();
        let w = Quantised::new(quantisation, bytes).unwrap();
        let dtypes = [dtype, DType::U8];
        card.check(precision.name(), linear_needs(CARD, rows, (n, k), dtypes, 0), || linear(&x, &w));
        let needs = linear_backward_input_needs(CARD, rows, (n, k), dtypes, 0, false);
        card.check(precision.name(), needs, || linear_backward_input(&dy, &w, None));
        let beside = Some(AddedProduct { x: &card.tensor(&[rows, 4], dtype), w: &b });
        let needs = linear_needs(CARD, rows, (n, k), dtypes, 4);
        card.check(precision.name(), needs, || linear_plus_product(&x, &w, beside));
        let needs = adapted_row_norms_needs(CARD, (n, k), 4);
        card.check(precision.name(), needs, || adapted_row_norms(&w, &a, &b, 0.5));
    }
}

/// One test: memory of other tests would count.
#[test]
fn an_operation_on_a_card_holds_what_it_states() {
    let card = Card(cuda_device::open_card(0).expect("a card, or the emulated one"));
    largest_heads(&card);
    if std::env::var_os(CAPABILITY).is_some() {
        return;
    }
    for (dtype, of_weight) in [(F32, F32), (BF16, F32), (BF16, BF16)] {
        for drops in [false, true] {
            operations(&card, dtype, of_weight, drops);
        }
    }
    [F32, BF16].into_iter().for_each(|dtype| codes(&card, dtype));
    updates(&card);
    copies(&card);
}

#[test]
fn attention_holds_the_same_on_cards_with_less_shared_memory() {
    // The capability of a real card is fixed.
    if !is_emulated(&cuda_device::open_card(0).expect("a card, or the emulated one")) {
        return;
    }
    for capability in ["61", "75"] {
        let ran = test_alone("an_operation_on_a_card_holds_what_it_states", &[(CAPABILITY, capability)]);
        assert!(ran.status.success(), "{capability}: {}", String::from_utf8_lossy(&ran.stdout));
    }
}
