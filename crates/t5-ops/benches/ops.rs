//! Times each operation at the shapes of one T5 layer and prints the median, the best, and GFLOP/s at both.
//!
//! ```text
//! cargo bench -p t5-ops --bench ops                     # t5-small, 8 x 256 tokens, f32 and bf16
//! cargo bench -p t5-ops --bench ops -- base linear      # t5-base's widths, operations with `linear` in the name
//! cargo bench -p t5-ops --bench ops -- long attention   # t5-small, 4 x 512 tokens
//! cargo bench -p t5-ops --bench ops -- bf16 attention   # one dtype
//! cargo bench -p t5-ops --bench ops -- gemma            # a layer's attention of T5Gemma 2 270M, 1,024 to 8,192 tokens
//! LOW_MEM_T5_ISA=avx2 cargo bench -p t5-ops --bench ops
//! ```
//!
//! Elementwise operations count no floating-point operations; their rate is the rate of the bytes of operands and results. On a busy
//! machine only the best time is meaningful. With one thread on Linux (`RAYON_NUM_THREADS=1`) the mean processor time is printed, too,
//! which other processes disturb less.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use t5_ops::{
    Activation, AdafactorHyper, Attended, Attention, CrossEntropy, Dropout, Mask, Rope, SecondMoment, SquareSums,
    adafactor, attention, attention_backward, dropout_add, embedding, embedding_backward, feed_forward_activation,
    feed_forward_activation_backward, linear, linear_backward_input, linear_backward_weight, linear_cross_entropy,
    linear_cross_entropy_backward, rms_norm, rms_norm_backward,
};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// The sizes of a layer and of a micro-batch.
struct Layer {
    name: &'static str,
    batch: usize,
    length: usize,
    width: usize,
    heads: usize,
    feed_forward: usize,
    vocabulary: usize,
}

const SMALL: Layer =
    Layer { name: "small", batch: 8, length: 256, width: 512, heads: 8, feed_forward: 2048, vocabulary: 32128 };
const BASE: Layer =
    Layer { name: "base", batch: 4, length: 256, width: 768, heads: 12, feed_forward: 3072, vocabulary: 32128 };

const LONG: Layer = Layer { name: "long", batch: 4, length: 512, ..SMALL };

/// The name of [`Bench::gemma`].
const GEMMA: &str = "gemma";

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

struct Bench<'a> {
    filters: &'a [String],
    dtype: DType,
}

impl Bench<'_> {
    /// Prints the median of the times of `f`, which does `flops` operations on `elements` elements.
    fn run(&self, name: &str, flops: usize, elements: usize, mut f: impl FnMut() -> Result<()>) -> Result<()> {
        if !self.filters.is_empty() && !self.filters.iter().any(|filter| name.contains(filter.as_str())) {
            return Ok(());
        }
        f()?;
        let mut times = Vec::new();
        let (start, processor) = (Instant::now(), processor_seconds());
        while times.len() < 5 || (start.elapsed().as_millis() < 300 && times.len() < 50) {
            let start = Instant::now();
            f()?;
            times.push(start.elapsed().as_secs_f64());
        }
        let processor = processor_seconds().zip(processor).map(|(end, start)| (end - start) / times.len() as f64);
        times.sort_by(f64::total_cmp);
        let (median, best) = (times[times.len() / 2], times[0]);
        let rate = |seconds: f64| match flops {
            0 => format!("{:>7.1} GB/s", (elements * self.dtype.size_in_bytes()) as f64 / seconds / 1e9),
            _ => format!("{:>7.1} GFLOP/s", flops as f64 / seconds / 1e9),
        };
        print!("{:<5}{name:<34}", self.dtype.as_str());
        print!("{:>9.3} ms {}; best {:>9.3} ms {}", median * 1e3, rate(median), best * 1e3, rate(best));
        println!("{}", processor.map_or(String::new(), |s| format!("; processor {:>9.3} ms {}", s * 1e3, rate(s))));
        Ok(())
    }

    fn random(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        (Tensor::randn(0f32, 1f32, shape, &Device::Cpu)? * 0.05)?.to_dtype(dtype)
    }

    fn layer(&self, l: &Layer) -> Result<()> {
        let (b, t, d, f, v) = (l.batch, l.length, l.width, l.feed_forward, l.vocabulary);
        let rows = b * t;
        let samples: Vec<u32> = (0..b as u32).collect();
        let dropout = Dropout { probability: 0.1, seed: 1, step: 1, site: 1, samples: &samples };
        println!("{}: batch {b}, length {t}, width {d}, feed-forward {f}, {} heads", l.name, l.heads);

        for (n, k) in [(d, d), (f, d), (d, f)] {
            let x = self.random(&[b, t, k], self.dtype)?;
            let dy = self.random(&[b, t, n], self.dtype)?;
            let (w, dw) = (self.random(&[n, k], DType::F32)?, self.random(&[n, k], DType::F32)?);
            let (flops, elements) = (2 * rows * n * k, rows * (n + k) + n * k);
            self.run(&format!("linear {n} x {k}"), flops, elements, || linear(&x, &w).map(drop))?;
            self.run(&format!("linear_backward_input {n} x {k}"), flops, elements, || {
                linear_backward_input(&dy, &w, None).map(drop)
            })?;
            self.run(&format!("linear_backward_weight {n} x {k}"), flops, elements, || {
                linear_backward_weight(&dy, &x, &dw, true)
            })?;
        }

        let [q, k, v_, dout] = [0; 4].map(|_| self.random(&[b, t, d], self.dtype));
        let (q, k, v_, dout) = (q?, k?, v_?, dout?);
        let bias = self.random(&[l.heads, 2 * t - 1], DType::F32)?;
        let dbias = bias.zeros_like()?;
        let lengths = vec![t; b];
        let flops = 4 * b * t * t * d;
        for causal in [false, true] {
            let kind = if causal { "causal" } else { "whole" };
            let a = Attention {
                bias: Some(&bias),
                mask: Mask::causal_if(causal),
                dropout: Some(dropout),
                ..Attention::new(l.heads, &lengths)
            };
            self.run(&format!("attention {kind}"), flops, 4 * rows * d, || attention(&q, &k, &v_, &a).map(drop))?;
            let (out, lse) = attention(&q, &k, &v_, &a)?;
            self.run(&format!("attention_backward {kind}"), 5 * flops / 2, 8 * rows * d, || {
                let of = Attended { q: &q, k: &k, v: &v_, out: &out, lse: &lse };
                attention_backward(&of, &dout, &a, Some(&dbias)).map(drop)
            })?;
        }

        let weight = self.random(&[d], DType::F32)?;
        let dweight = weight.zeros_like()?;
        let (_, inv_rms) = rms_norm(&q, &weight, 1e-6)?;
        self.run("rms_norm", 0, 2 * rows * d, || rms_norm(&q, &weight, 1e-6).map(drop))?;
        self.run("rms_norm_backward + residual + copy", 0, 6 * rows * d, || {
            rms_norm_backward(&q, &weight, &inv_rms, dout.copy()?, Some(&k), Some(&dweight)).map(drop)
        })?;
        self.run("dropout_add", 0, 3 * rows * d, || dropout_add(&q, &k, Some(&dropout)).map(drop))?;
        let [gate, up, dh] = [0; 3].map(|_| self.random(&[b, t, f], self.dtype));
        let (gate, up, dh) = (gate?, up?, dh?);
        for (name, up, a) in [("relu", None, Activation::Relu), ("gated-gelu", Some(&up), Activation::GeluNew)] {
            let inputs = if up.is_some() { 2 } else { 1 };
            self.run(&format!("activation {name}"), 0, (inputs + 1) * rows * f, || {
                feed_forward_activation(&gate, up, a, Some(&dropout)).map(drop)
            })?;
            self.run(&format!("activation_backward {name} + copies"), 0, (4 * inputs + 4) * rows * f, || {
                // The operation works in place, on copies, and making the copies is timed, too.
                let (gate, up, dh) = (gate.copy()?, up.map(Tensor::copy).transpose()?, dh.copy()?);
                feed_forward_activation_backward(gate, up, a, Some(&dropout), dh).map(drop)
            })?;
        }

        let (table, dtable) = (self.random(&[v, d], DType::F32)?, self.random(&[v, d], DType::F32)?);
        let ids: Vec<u32> = (0..rows).map(|row| (row * 7919 % v) as u32).collect();
        let labels = ids.clone();
        let ids = Tensor::from_vec(ids, (b, t), &Device::Cpu)?;
        self.run("embedding", 0, 2 * rows * d, || embedding(&ids, &table, self.dtype).map(drop))?;
        self.run("embedding_backward", 0, 3 * rows * d, || embedding_backward(&ids, &dout, &dtable))?;
        let x = q.reshape((rows, d))?;
        for chunk_rows in [256, 1024] {
            let c = CrossEntropy { logit_scale: 1.0, gradient_scale: 1e-3, chunk_rows, ..CrossEntropy::default() };
            self.run(&format!("cross_entropy by {chunk_rows}"), 2 * rows * d * v, rows * v, || {
                linear_cross_entropy(&x, &table, &labels, &c).map(drop)
            })?;
            self.run(&format!("cross_entropy_backward by {chunk_rows}"), 6 * rows * d * v, rows * v, || {
                linear_cross_entropy_backward(&x, &table, &labels, &c, Some((&dtable, false))).map(drop)
            })?;
        }
        Ok(())
    }

    /// Attention of T5Gemma 2 270M to a sequence's own keys, in a window of 512 and without one.
    fn gemma(&self) -> Result<()> {
        let (heads, size) = (4, 256);
        println!("gemma: {heads} heads of {size} that share one head of keys");
        for length in [1024, 2048, 4096, 8192] {
            let [q, dout] = [0; 2].map(|_| self.random(&[1, length, heads * size], self.dtype));
            let [k, v] = [0; 2].map(|_| self.random(&[1, length, size], self.dtype));
            let (q, k, v, dout) = (q?, k?, v?, dout?);
            let lengths = [length];
            let plain = Attention { key_heads: 1, scale: 1.0 / 16.0, ..Attention::new(heads, &lengths) };
            let rope = Rope { base: 10_000.0, factor: 1.0, first_position: 0 };
            let rows = length * heads * size;
            self.run(&format!("rope {length}"), 0, 2 * rows, || t5_ops::rope(q.copy()?, heads, &rope).map(drop))?;
            for (kind, mask) in
                [("window", Mask::window_around(512)), ("causal", Mask::causal_window(512)), ("all", Mask::ALL)]
            {
                let a = Attention { mask, ..plain };
                let seen = if kind == "all" { length } else { length.min(512) };
                let flops = 4 * length * seen * heads * size;
                self.run(&format!("attention {kind} {length}"), flops, rows, || attention(&q, &k, &v, &a).map(drop))?;
                let (out, lse) = attention(&q, &k, &v, &a)?;
                self.run(&format!("attention_backward {kind} {length}"), 5 * flops / 2, rows, || {
                    let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
                    attention_backward(&of, &dout, &a, None).map(drop)
                })?;
            }
        }
        Ok(())
    }

    fn optimizer(&self, l: &Layer) -> Result<()> {
        let (n, k) = (l.vocabulary, l.width);
        let param = self.random(&[n, k], DType::F32)?;
        let grad = self.random(&[n, k], DType::F32)?;
        let second = SecondMoment::Factored {
            row: Tensor::zeros(n, DType::F32, &Device::Cpu)?,
            col: Tensor::zeros(k, DType::F32, &Device::Cpu)?,
        };
        let h = AdafactorHyper { beta2: 0.5, ..AdafactorHyper::default() };
        self.run("adafactor", 0, 6 * n * k, || adafactor(&param, &grad, &second, None, &h))?;
        self.run("square_sums", 0, n * k, || SquareSums::compute(&grad).map(drop))
    }
}

/// The time that this thread has run, if it is the only one that works and the system reports it.
fn processor_seconds() -> Option<f64> {
    if rayon::current_num_threads() > 1 {
        return None;
    }
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split_whitespace().next()?.parse::<f64>().ok().map(|nanoseconds| nanoseconds / 1e9)
}

fn main() -> Result<()> {
    t5_ops::join_threads(None);
    // `cargo bench` passes flags of its own.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let (sizes, filters): (Vec<String>, Vec<String>) =
        words.into_iter().partition(|word| [SMALL.name, BASE.name, LONG.name, GEMMA].contains(&word.as_str()));
    let (types, filters): (Vec<String>, Vec<String>) =
        filters.into_iter().partition(|word| DTYPES.iter().any(|dtype| dtype.as_str() == word));
    let mut dtypes = DTYPES.to_vec();
    dtypes.retain(|dtype| types.is_empty() || types.iter().any(|word| dtype.as_str() == word));
    if sizes.iter().any(|size| size == GEMMA) {
        dtypes.iter().try_for_each(|&dtype| Bench { filters: &filters, dtype }.gemma())?;
    }
    for layer in [SMALL, BASE, LONG] {
        if !(sizes.iter().any(|size| size == layer.name) || sizes.is_empty() && layer.name == SMALL.name) {
            continue;
        }
        for &dtype in &dtypes {
            Bench { filters: &filters, dtype }.layer(&layer)?;
        }
        if dtypes.contains(&DType::F32) {
            Bench { filters: &filters, dtype: DType::F32 }.optimizer(&layer)?;
        }
    }
    Ok(())
}
