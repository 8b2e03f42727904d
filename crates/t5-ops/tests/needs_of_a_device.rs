//! What an operation states for a device is what its composition of candle's operations holds: counted by the allocator in f32 on
//! the CPU, where the same composition makes the same tensors.

use candle_core::{DType, Device, Result, Tensor};
use heap::Allocator;
use t5_ops::{
    Activation, AdafactorHyper, AdamwHyper, Attended, Attention, AttentionSizes, CrossEntropy, Dropout, Needs, Path,
    Rounding, SecondMoment, adafactor_needs, adamw_needs, attention_backward_needs, attention_needs, dropout_add_needs,
    dropout_needs, embedding_backward_needs, embedding_needs, feed_forward_activation_backward_needs,
    feed_forward_activation_needs, linear_add_needs, linear_backward_input_needs, linear_backward_weight_needs,
    linear_cross_entropy_backward_needs, linear_cross_entropy_needs, linear_needs, reference, rms_norm_backward_needs,
    rms_norm_needs,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const F32: DType = DType::F32;
/// Batch, positions, width, heads; rows.
const SIZES: (usize, usize, usize, usize) = (4, 256, 256, 4);
const ROWS: usize = SIZES.0 * SIZES.1;
const VOCABULARY: usize = 3000;
const DEVICE: Path = Path::Device;
/// What a product on the CPU packs of a transposed operand, at most: less than any tensor here, and no part of a device's.
const PACKED: u64 = 700 << 10;

fn tensor(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap()
}

/// Bytes that `call` holds at its peak beside what it leaves alive.
fn held<R>(call: impl Fn() -> Result<R>) -> u64 {
    drop(call().unwrap());
    heap::release_unused();
    let results = call().unwrap();
    let held = heap::held();
    drop(results);
    (held.most_live - held.live) as u64
}

/// Holds the statement against what the composition holds, of which masks are the processor's.
#[track_caller]
fn check(name: &str, held: u64, needs: Needs) {
    let Needs { transient, on_host, .. } = needs;
    assert!(held <= transient + on_host + PACKED, "{name} holds {held}, states {transient} and {on_host}");
    assert!(transient as f64 <= 1.4 * held as f64, "{name} holds {held}, states {transient}");
}

fn operations(drops: bool) {
    let (b, t, d, heads) = SIZES;
    let [x, y] = [0, 1].map(|_| tensor(&[b, t, d]));
    let [w, dw, table, dtable] = [[512, d], [512, d], [VOCABULARY, d], [VOCABULARY, d]].map(|shape| tensor(&shape));
    let [scale, dscale] = [0, 1].map(|_| tensor(&[d]));
    let [dy, sum] = [0, 1].map(|_| tensor(&[b, t, 512]));
    let ids = Tensor::ones((b, t), DType::U32, &Device::Cpu).unwrap();
    let labels = vec![3; ROWS];
    let samples: Vec<u32> = (0..b as u32).collect();
    let always = Dropout { probability: 0.1, seed: 1, step: 1, site: 1, samples: &samples };
    let drop = drops.then_some(always);
    let lengths = vec![t; b];
    let settings = Attention { heads, bias: None, key_lengths: &lengths, causal: false, dropout: drop };
    let sizes = AttentionSizes { batch: b, queries: t, keys: t, heads, head_size: d / heads };
    let (out, lse) = reference::attention(&x, &y, &x, &settings).unwrap();
    let of = Attended { q: &x, k: &y, v: &x, out: &out, lse: &lse };
    let rows = x.reshape((ROWS, d)).unwrap();
    let inv_rms = reference::rms_norm(&x, &scale, 1e-6).unwrap().1;
    let (elements, weight, head, both) = (ROWS * d, (512, d), (VOCABULARY, d), [F32; 2]);
    let gelu = Activation::GeluNew;
    let nothing = |name: &str, held: u64, needs: Needs| {
        assert!(held < 1 << 16 && needs.transient == 0, "{name} holds {held}, states {}", needs.transient);
    };
    nothing("embedding", held(|| reference::embedding(&ids, &table, F32)), embedding_needs(DEVICE, ROWS, d, both));
    nothing("linear", held(|| reference::linear(&x, &w)), linear_needs(DEVICE, ROWS, weight, both));
    nothing(
        "linear_backward_input",
        held(|| reference::linear_backward_input(&dy, &w, None)),
        linear_backward_input_needs(DEVICE, ROWS, weight, both, false),
    );
    check("linear_add", held(|| reference::linear_add(&x, &w, &sum)), linear_add_needs(DEVICE, ROWS, weight, both));
    check(
        "linear_backward_input, summed",
        held(|| reference::linear_backward_input(&dy, &w, Some(x.clone()))),
        linear_backward_input_needs(DEVICE, ROWS, weight, both, true),
    );
    check(
        "linear_backward_weight",
        held(|| reference::linear_backward_weight(&dy, &x, &dw, true)),
        linear_backward_weight_needs(DEVICE, ROWS, weight, both),
    );
    check(
        "embedding_backward",
        held(|| reference::embedding_backward(&ids, &x, &dtable)),
        embedding_backward_needs(DEVICE, ROWS, head, both),
    );
    check("rms_norm", held(|| reference::rms_norm(&x, &scale, 1e-6)), rms_norm_needs(DEVICE, elements as u64, F32));
    check(
        "rms_norm_backward",
        held(|| reference::rms_norm_backward(&x, &scale, &inv_rms, &y, Some(&x), Some(&dscale))),
        rms_norm_backward_needs(DEVICE, elements as u64, F32),
    );
    check(
        "attention",
        held(|| reference::attention(&x, &y, &x, &settings)),
        attention_needs(DEVICE, &sizes, F32, drops),
    );
    check(
        "attention_backward",
        held(|| reference::attention_backward(&of, &y, &settings, None)),
        attention_backward_needs(DEVICE, &sizes, F32, drops),
    );
    check(
        "feed_forward_activation",
        held(|| reference::feed_forward_activation(&x, Some(&y), gelu, drop.as_ref())),
        feed_forward_activation_needs(DEVICE, elements as u64, F32, drops),
    );
    check(
        "feed_forward_activation_backward",
        held(|| reference::feed_forward_activation_backward(&x, Some(&y), gelu, drop.as_ref(), &out)),
        feed_forward_activation_backward_needs(DEVICE, elements as u64, F32, drops),
    );
    check("dropout", held(|| reference::dropout(&x, Some(&always))), dropout_needs(DEVICE, elements as u64, F32));
    check(
        "dropout_add",
        held(|| reference::dropout_add(&x, &y, Some(&always))),
        dropout_add_needs(DEVICE, elements as u64, F32),
    );
    for chunk_rows in [100, ROWS] {
        let loss = CrossEntropy { logit_scale: 1.0, gradient_scale: 1.0, chunk_rows };
        check(
            "linear_cross_entropy",
            held(|| reference::linear_cross_entropy(&rows, &table, &labels, &loss)),
            linear_cross_entropy_needs(DEVICE, ROWS, head, both, chunk_rows),
        );
        check(
            "linear_cross_entropy_backward",
            held(|| reference::linear_cross_entropy_backward(&rows, &table, &labels, &loss, Some((&dtable, true)))),
            linear_cross_entropy_backward_needs(DEVICE, ROWS, head, both, chunk_rows),
        );
    }
}

#[test]
fn an_operation_on_a_device_holds_what_it_states() {
    for drops in [false, true] {
        operations(drops);
    }
    // In the same test: others would allocate meanwhile.
    updates();
}

fn updates() {
    let (n, k) = (1000, 512);
    let gradient = tensor(&[n, k]);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, F32, &Device::Cpu).unwrap();
    let second = SecondMoment::Factored { row: zeros(&[n]), col: zeros(&[k]) };
    let moments = [zeros(&[n, k]), zeros(&[n, k])];
    for (dtype, rounding) in
        [(F32, Rounding::Nearest), (DType::BF16, Rounding::Nearest), (DType::BF16, Rounding::Stochastic { key: 7 })]
    {
        let parameter = tensor(&[n, k]).to_dtype(dtype).unwrap();
        let hyper = AdafactorHyper { rounding, ..AdafactorHyper::default() };
        check(
            "adafactor",
            held(|| reference::adafactor(&parameter, &gradient, &second, None, &hyper)),
            adafactor_needs(DEVICE, (n * k) as u64, dtype, rounding),
        );
        let hyper = AdamwHyper { rounding, ..AdamwHyper::default() };
        check(
            "adamw",
            held(|| reference::adamw(&parameter, &gradient, &moments[0], &moments[1], &hyper)),
            adamw_needs(DEVICE, (n * k) as u64, dtype, rounding),
        );
    }
}
