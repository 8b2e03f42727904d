//! The same inputs give the same bits, on any number of threads and however the threads are scheduled.
//!
//! The host alone: its threads. `device` makes each operation twice on a card.

#[path = "support/tensors.rs"]
mod tensors;

use candle_core::{DType, Device, Result, Tensor};
use t5_ops::{
    Activation, AdafactorHyper, Attended, Attention, CrossEntropy, Dropout, Mask, SecondMoment, SquareSums, TokenLoss,
    adafactor, attention, attention_backward, dropout_add, embedding, embedding_backward, feed_forward_activation,
    feed_forward_activation_backward, linear, linear_backward_input, linear_backward_weight, linear_cross_entropy,
    linear_cross_entropy_backward, rms_norm, rms_norm_backward,
};

use self::tensors::bits;

/// A reproducible tensor of numbers in [-1, 1).
fn numbers(shape: &[usize], dtype: DType) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> =
        (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Results of operations, by name.
type Results = Vec<(String, Tensor)>;

fn named<const N: usize>(results: [(&str, Tensor); N]) -> Results {
    results.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect()
}

fn norms(dtype: DType) -> Result<Results> {
    let x = numbers(&[3, 70, 96], dtype)?;
    let weight = numbers(&[96], DType::F32)?;
    let dweight = numbers(&[96], DType::F32)?;
    let (y, inv_rms) = rms_norm(&x, &weight, 1e-6)?;
    let dx = rms_norm_backward(&x, &weight, &inv_rms, y.copy()?, Some(&x), Some(&dweight))?;
    Ok(named([("y", y), ("inv_rms", inv_rms), ("dx", dx), ("dweight", dweight)]))
}

/// With few heads, whose queries are cut into parts, and with many heads.
fn attentions(dtype: DType) -> Result<Results> {
    let mut results = Results::new();
    for (b, t, heads, size) in [(1, 400, 2, 32), (2, 70, 12, 64)] {
        let samples: Vec<u32> = (0..b as u32).collect();
        let lengths: Vec<usize> = (0..b).map(|i| t - 30 * i).collect();
        let q = numbers(&[b, t, heads * size], dtype)?;
        let (k, v) = (q.affine(0.5, 0.1)?, q.affine(-0.25, 0.3)?);
        let bias = numbers(&[heads, 2 * t - 1], DType::F32)?;
        let dbias = bias.zeros_like()?;
        let a = Attention {
            bias: Some(&bias),
            mask: Mask::CAUSAL,
            dropout: Some(Dropout { probability: 0.1, seed: 1, step: 2, site: 3, samples: &samples }),
            ..Attention::new(heads, &lengths)
        };
        let (out, lse) = attention(&q, &k, &v, &a)?;
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (dq, dk, dv) = attention_backward(&of, &k, &a, Some(&dbias))?;
        results.extend(named([("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)]));
    }
    Ok(results)
}

/// With logits that are kept and logits that are computed again, for more rows than one chunk of either.
fn losses(dtype: DType) -> Result<Results> {
    let (d, v) = (64, 3000);
    let mut results = Results::new();
    for (rows, chunk_rows) in [(210, 64), (1100, 8), (1100, 1100)] {
        let x = numbers(&[rows, d], dtype)?;
        let w = numbers(&[v, d], DType::F32)?;
        let dw = numbers(&[v, d], DType::F32)?;
        let labels: Vec<u32> = (0..rows as u32).map(|row| row * 7 % v as u32).collect();
        let token_loss = TokenLoss { z_loss: 0.1, label_smoothing: 0.2, is_logit: false };
        let c = CrossEntropy { gradient_scale: 0.01, chunk_rows, token_loss, ..CrossEntropy::default() };
        let alone = linear_cross_entropy(&x, &w, &labels, &c)?;
        let (loss, dx) = linear_cross_entropy_backward(&x, &w, &labels, &c, Some((&dw, true)))?;
        for loss in [alone, loss.cross_entropy, loss.objective] {
            let halves = [loss.to_bits() as u32, (loss.to_bits() >> 32) as u32].map(f32::from_bits);
            results.extend(named([("loss", Tensor::new(&halves, &Device::Cpu)?)]));
        }
        results.extend(named([("dx", dx), ("dw", dw)]));
    }
    Ok(results)
}

/// Products of sizes that fill blocks and do not, and that are cut along K.
fn products(dtype: DType) -> Result<Results> {
    let mut results = Results::new();
    for (rows, k, n) in [(37, 65, 129), (300, 512, 400), (3000, 96, 200)] {
        let x = numbers(&[rows, k], dtype)?;
        let w = numbers(&[n, k], DType::F32)?;
        let dw = numbers(&[n, k], DType::F32)?;
        let y = linear(&x, &w)?;
        let dx = linear_backward_input(&y, &w, None)?;
        linear_backward_weight(&y, &x, &dw, true)?;
        results.extend(named([("y", y), ("dx", dx), ("dw", dw)]));
    }
    Ok(results)
}

fn embeddings(dtype: DType) -> Result<Results> {
    let table = numbers(&[50, 192], DType::F32)?;
    let ids: Vec<u32> = (0..600).map(|i| i * i % 50).collect();
    let ids = Tensor::from_vec(ids, (6, 100), &Device::Cpu)?;
    let y = embedding(&ids, &table, dtype)?;
    let dtable = table.zeros_like()?;
    embedding_backward(&ids, &y, &dtable)?;
    Ok(named([("y", y), ("dtable", dtable)]))
}

fn activations(dtype: DType) -> Result<Results> {
    let (gate, up) = (numbers(&[2, 90, 200], dtype)?, numbers(&[2, 90, 200], dtype)?);
    let samples = [4, 9];
    let d = Dropout { probability: 0.1, seed: 1, step: 2, site: 3, samples: &samples };
    let h = feed_forward_activation(&gate, Some(&up), Activation::GeluNew, Some(&d))?;
    let sum = dropout_add(&up, &h, Some(&d))?;
    let (again, dgate, dup) =
        feed_forward_activation_backward(gate, Some(up), Activation::GeluNew, Some(&d), h.copy()?)?;
    Ok(named([("h", h), ("sum", sum), ("again", again), ("dgate", dgate), ("dup", dup.expect("up has a gradient"))]))
}

/// For a matrix and a vector; in bf16 the parameter is rounded stochastically.
fn updates(dtype: DType) -> Result<Results> {
    let mut results = Results::new();
    for shape in [&[300, 130][..], &[70_000]] {
        let (p, g) = (numbers(shape, dtype)?, numbers(shape, DType::F32)?);
        let zeros = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu);
        let second = match *shape {
            [rows, width] => SecondMoment::Factored { row: zeros(rows)?, col: zeros(width)? },
            _ => SecondMoment::Full(zeros(shape[0])?),
        };
        let sums = SquareSums::compute(&g)?;
        let rounding = t5_ops::Rounding::Stochastic { key: 7 };
        let gradient_scale = 1.0 / sums.total().unwrap().sqrt();
        let h = AdafactorHyper { beta2: 0.5, gradient_scale, rounding, ..AdafactorHyper::default() };
        adafactor(&p, &g, &second, None, &h)?;
        results.extend(named([("p", p)]));
        match second {
            SecondMoment::Factored { row, col } => results.extend(named([("row", row), ("col", col)])),
            SecondMoment::Full(v) => results.extend(named([("v", v)])),
        }
    }
    Ok(results)
}

#[track_caller]
fn check(name: &str, operation: impl Fn(DType) -> Result<Results> + Sync) {
    for dtype in [DType::F32, DType::BF16] {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
            let results = pool.install(|| operation(dtype)).expect("the operation");
            results.into_iter().map(|(what, tensor)| (what, bits(&tensor))).collect::<Vec<_>>()
        };
        let expected = on(1);
        for threads in [1, 2, 3, 3, 4, 7, 16] {
            for ((what, expected), (_, got)) in expected.iter().zip(on(threads)) {
                let differ = expected.iter().zip(&got).filter(|(a, b)| a != b).count();
                assert!(
                    *expected == got,
                    "{name}: {what} in {dtype:?}: {differ} of {} differ on {threads} threads",
                    got.len()
                );
            }
        }
    }
}

#[test]
fn no_operation_depends_on_the_number_of_threads() {
    check("norm", norms);
    check("attention", attentions);
    check("cross-entropy", losses);
    check("products", products);
    check("embedding", embeddings);
    check("activation", activations);
    check("adafactor", updates);
}
