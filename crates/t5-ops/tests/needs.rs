//! The bytes that an operation states are the bytes that it holds: counted by the allocator, on every path.
//!
//! The host alone: its allocator counts. `needs_of_a_device` is the same on a card.

use candle_core::{DType, Device, Result, Tensor};
use heap::Allocator;
use t5_ops::{
    Activation, AddedProduct, Attended, Attention, CrossEntropy, Dropout, Mask, Needs, Path, Precision, Quantised,
    attention, attention_backward, attention_backward_needs, attention_needs, dropout, dropout_add, dropout_add_needs,
    dropout_needs, embedding, embedding_backward, embedding_backward_needs, embedding_needs, feed_forward_activation,
    feed_forward_activation_backward, feed_forward_activation_backward_needs, feed_forward_activation_needs, linear,
    linear_backward_input, linear_backward_input_needs, linear_backward_input_plus_product, linear_backward_weight,
    linear_backward_weight_needs, linear_cross_entropy, linear_cross_entropy_backward,
    linear_cross_entropy_backward_needs, linear_cross_entropy_needs, linear_needs, linear_plus_product, rms_norm,
    rms_norm_backward, rms_norm_backward_needs, rms_norm_needs,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Batch, positions, width, heads; rows.
const SIZES: (usize, usize, usize, usize) = (4, 256, 256, 4);
const ROWS: usize = SIZES.0 * SIZES.1;
const VOCABULARY: usize = 3000;

fn tensor(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Bytes that `call` holds at its peak, besides those that stay allocated after it.
fn held<R>(call: impl Fn() -> Result<R>) -> u64 {
    // The first call makes the buffers that threads keep.
    drop(call().unwrap());
    heap::release_unused();
    let results = call().unwrap();
    let held = heap::held();
    drop(results);
    (held.peak_live - held.live) as u64
}

/// Each operation: its name, the bytes that it holds and the bytes that it states.
fn operations(path: Path, dtype: DType, drops: bool) -> Vec<(&'static str, u64, Needs)> {
    let (b, t, d, heads) = SIZES;
    let [x, y] = [0, 1].map(|_| tensor(&[b, t, d], dtype));
    // Weights of bf16 activations are f32.
    let other = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let [w, dw, table, dtable] =
        [[512, d], [512, d], [VOCABULARY, d], [VOCABULARY, d]].map(|shape| tensor(&shape, other));
    let [scale, dscale] = [0, 1].map(|_| tensor(&[d], other));
    let [a_of_adapter, b_of_adapter] = [[16, d], [512, 16]].map(|shape| tensor(&shape, other));
    let u = tensor(&[b, t, 16], dtype);
    let nf4 = Quantised::quantise(&w, Precision::Nf4).unwrap();
    let dy = tensor(&[b, t, 512], dtype);
    let ids = Tensor::ones((b, t), DType::U32, &Device::Cpu).unwrap();
    let labels = vec![3; ROWS];
    let samples: Vec<u32> = (0..b as u32).collect();
    let always = Dropout { probability: 0.1, seed: 1, step: 1, site: 1, samples: &samples };
    let drop = drops.then_some(always);
    let loss = CrossEntropy { logit_scale: 1.0, gradient_scale: 1.0, chunk_rows: 300, ..CrossEntropy::default() };
    let lengths = vec![t; b];
    let settings = Attention { dropout: drop, ..Attention::new(heads, &lengths) };
    let sizes = settings.sizes_of((b, t, d), t);
    let (out, lse) = attention(&x, &y, &x, &settings).unwrap();
    let of = Attended { q: &x, k: &y, v: &x, out: &out, lse: &lse };
    let rows = x.reshape((ROWS, d)).unwrap();
    let inv_rms = rms_norm(&x, &scale, 1e-6).unwrap().1;
    let (elements, weight, head) = ((ROWS * d) as u64, (512, d), (VOCABULARY, d));
    let gelu = Activation::GeluNew;
    // A call that takes a tensor by value gets a copy, an operand that stays allocated.
    vec![
        ("embedding", held(|| embedding(&ids, &table, dtype)), embedding_needs(path, ROWS, d, [other, dtype])),
        (
            "embedding_backward",
            held(|| embedding_backward(&ids, &x, &dtable)),
            embedding_backward_needs(path, ROWS, head, [dtype, other]),
        ),
        ("linear", held(|| linear(&x, &w)), linear_needs(path, ROWS, weight, [dtype, other], 0)),
        ("linear, quantised", held(|| linear(&x, &nf4)), linear_needs(path, ROWS, weight, [dtype, DType::U8], 0)),
        (
            "linear_backward_input, quantised",
            held(|| linear_backward_input(&dy, &nf4, None)),
            linear_backward_input_needs(path, ROWS, weight, [dtype, DType::U8], 0, false),
        ),
        (
            "linear_backward_input",
            held(|| linear_backward_input(&dy, &w, None)),
            linear_backward_input_needs(path, ROWS, weight, [dtype, other], 0, false),
        ),
        (
            "linear_backward_input, summed",
            held(|| linear_backward_input(&dy, &w, Some(x.clone()))),
            linear_backward_input_needs(path, ROWS, weight, [dtype, other], 0, true),
        ),
        (
            "linear_plus_product",
            held(|| linear_plus_product(&x, &w, Some(AddedProduct { x: &u, w: &b_of_adapter }))),
            linear_needs(path, ROWS, weight, [dtype, other], 16),
        ),
        (
            "linear_backward_input_plus_product",
            held(|| linear_backward_input_plus_product(&dy, &w, Some(AddedProduct { x: &u, w: &a_of_adapter }), None)),
            linear_backward_input_needs(path, ROWS, weight, [dtype, other], 16, false),
        ),
        (
            "linear_backward_weight",
            held(|| linear_backward_weight(&dy, &x, &dw, true)),
            linear_backward_weight_needs(path, ROWS, weight, [dtype, other]),
        ),
        ("rms_norm", held(|| rms_norm(&x, &scale, 1e-6)), rms_norm_needs(path, elements, dtype)),
        (
            "rms_norm_backward",
            held(|| rms_norm_backward(&x, &scale, &inv_rms, y.clone(), Some(&x), Some(&dscale))),
            rms_norm_backward_needs(path, (ROWS as u64, d as u64), dtype, true),
        ),
        ("attention", held(|| attention(&x, &y, &x, &settings)), attention_needs(path, &sizes, dtype, drops)),
        (
            "attention_backward",
            held(|| attention_backward(&of, &y, &settings, None)),
            attention_backward_needs(path, &sizes, dtype, drops, true),
        ),
        (
            "feed_forward_activation",
            held(|| feed_forward_activation(&x, Some(&y), gelu, drop.as_ref())),
            feed_forward_activation_needs(path, elements, dtype),
        ),
        (
            "feed_forward_activation_backward",
            held(|| feed_forward_activation_backward(x.clone(), Some(y.clone()), gelu, drop.as_ref(), out.clone())),
            feed_forward_activation_backward_needs(path, elements, dtype),
        ),
        ("dropout", held(|| dropout(&x, Some(&always))), dropout_needs(path, elements, dtype)),
        ("dropout_add", held(|| dropout_add(&x, &y, Some(&always))), dropout_add_needs(path, elements, dtype)),
        (
            "linear_cross_entropy",
            held(|| linear_cross_entropy(&rows, &table, &labels, &loss)),
            linear_cross_entropy_needs(path, ROWS, head, [dtype, other], &loss),
        ),
        (
            "linear_cross_entropy_backward",
            held(|| linear_cross_entropy_backward(&rows, &table, &labels, &loss, Some((&dtable, true)))),
            linear_cross_entropy_backward_needs(path, ROWS, head, [dtype, other], &loss, true),
        ),
    ]
}

/// On the CPU the memory that a thread works in is left out.
const OF_A_THREAD: u64 = 1 << 20;

#[test]
fn an_operation_holds_no_more_than_it_states_and_at_least_half() {
    for dtype in [DType::F32, DType::BF16, DType::F64, DType::F16] {
        let path = Path::on_cpu(dtype);
        let left_out = if path == Path::Cpu { OF_A_THREAD * t5_ops::threads() as u64 } else { 4096 * 16 };
        for drops in [false, true] {
            for (name, held, needs) in operations(path, dtype, drops) {
                let stated = needs.transient;
                // On a busy machine one thread may do all of the work, with the only buffer for strips of attention.
                let workers = if name.starts_with("attention") { t5_ops::threads() as u64 } else { 1 };
                let is_so = held <= stated + left_out && stated <= 2 * workers * held;
                assert!(is_so, "{dtype:?}, dropout {drops}: {name} holds {held} bytes and states {stated}");
            }
        }
    }
    // Bytes are counted for the whole process: one test after the other.
    check_grouped_heads_and_windows();
}

/// Attention of T5Gemma 2, and with a cap.
fn check_grouped_heads_and_windows() {
    let (b, t, heads, size) = (1, 1500, 4, 256);
    let lengths = [t];
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let path = Path::on_cpu(dtype);
        let (q, dout) = (tensor(&[b, t, heads * size], dtype), tensor(&[b, t, heads * size], dtype));
        let (k, v) = (tensor(&[b, t, size], dtype), tensor(&[b, t, size], dtype));
        for (mask, soft_cap) in
            [(Mask::causal_window(200), None), (Mask::window_around(200), Some(50.0)), (Mask::ALL, None)]
        {
            let a = Attention { key_heads: 1, scale: 0.0625, mask, soft_cap, ..Attention::new(heads, &lengths) };
            let sizes = a.sizes_of((b, t, heads * size), t);
            let (out, lse) = attention(&q, &k, &v, &a).unwrap();
            let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
            let forward = (held(|| attention(&q, &k, &v, &a)), attention_needs(path, &sizes, dtype, false));
            let backward = (
                held(|| attention_backward(&of, &dout, &a, None)),
                attention_backward_needs(path, &sizes, dtype, false, false),
            );
            for (name, (held, needs)) in [("forward", forward), ("backward", backward)] {
                let (stated, workers) = (needs.transient, t5_ops::threads() as u64);
                let is_so = held <= stated + OF_A_THREAD * 2 * workers && stated <= 2 * workers * held;
                assert!(is_so, "{dtype:?} {mask:?} {soft_cap:?} {name} holds {held} bytes and states {stated}");
            }
        }
    }
}
