//! The three products of a linear layer, alone: y = x Wᵀ, dx = dy W, dW += dyᵀ x, in GFLOP/s, a JSON object a line.
//!
//! ```text
//! cargo bench -p t5-ops --bench products                     # f32 and bf16 activations, f32 weights
//! RAYON_NUM_THREADS=1 cargo bench -p t5-ops --bench products -- bf16
//! LOW_MEM_T5_ISA=avx2 cargo bench -p t5-ops --bench products
//! ```
//!
//! `scripts/compare_products.py` runs this and PyTorch in turn. Weights are f32 in both precisions, as in training with f32 masters: bf16
//! products round them as they pack them, and that is timed, too. With `frozen` the weights are not trained: in f32, bf16, f16, int8 and
//! NF4, in turn. With `adapters` they belong to an adapter of rank 16.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use t5_ops::{Precision, Quantised, Weight, linear, linear_backward_input, linear_backward_weight};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// (rows, K, N)
const SHAPES: [(usize, usize, usize); 10] = [
    (2048, 512, 512),
    (2048, 512, 2048),
    (2048, 2048, 512),
    (2048, 768, 3072),
    (2048, 3072, 768),
    (2048, 3072, 3072),
    (512, 512, 2048),
    (256, 768, 3072),
    (512, 768, 768),
    (512, 3072, 768),
];

/// GFLOP/s at the median time of `f`, which does `flops` operations.
fn rate(flops: f64, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..3 {
        f()?;
    }
    let start = Instant::now();
    while times.len() < 9 || (start.elapsed().as_millis() < 200 && times.len() < 60) {
        let start = Instant::now();
        f()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(flops / times[times.len() / 2] / 1e9)
}

fn main() -> Result<()> {
    t5_ops::join_threads(None);
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    if filter.as_deref() == Some("frozen") {
        return frozen();
    }
    if filter.as_deref() == Some("adapters") {
        return adapters();
    }
    for dtype in [DType::F32, DType::BF16] {
        if filter.as_ref().is_some_and(|filter| filter != dtype.as_str()) {
            continue;
        }
        println!("{{\"dtype\":\"{}\",\"peak\":{:.0}}}", dtype.as_str(), t5_ops::peak_gflops(dtype)?);
        for (rows, k, n) in SHAPES {
            let random = |shape: (usize, usize), dtype| Tensor::randn(0f32, 1f32, shape, &Device::Cpu)?.to_dtype(dtype);
            let (x, dy) = (random((rows, k), dtype)?, random((rows, n), dtype)?);
            let (w, dw) = (random((n, k), DType::F32)?, random((n, k), DType::F32)?);
            let flops = (2 * rows * k * n) as f64;
            let forward = rate(flops, || linear(&x, &w).map(drop))?;
            let dx = rate(flops, || linear_backward_input(&dy, &w, None).map(drop))?;
            let dw = rate(flops, || linear_backward_weight(&dy, &x, &dw, true))?;
            let dtype = dtype.as_str();
            println!(
                "{{\"dtype\":\"{dtype}\",\"rows\":{rows},\"k\":{k},\"n\":{n},\"forward\":{forward:.0},\"dx\":{dx:.0},\"dw\":{dw:.0}}}"
            );
        }
    }
    Ok(())
}

/// (rows, K, N) of products with frozen weights: of many rows, of a batch's rows, and of one generated row.
const FROZEN: [(usize, usize, usize); 4] = [(2048, 768, 3072), (512, 3072, 768), (256, 768, 768), (8, 768, 3072)];

/// Forward and dx with weights as they are stored.
fn frozen() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, k, n) in FROZEN {
            let x = Tensor::randn(0f32, 1.0, (rows, k), &Device::Cpu)?.to_dtype(dtype)?;
            let dy = Tensor::randn(0f32, 1.0, (rows, n), &Device::Cpu)?.to_dtype(dtype)?;
            let w = Tensor::randn(0f32, 1.0, (n, k), &Device::Cpu)?;
            let dense = [DType::BF16, DType::F16].map(|dtype| w.to_dtype(dtype));
            let [bf16, f16] = dense;
            let (bf16, f16) = (bf16?, f16?);
            let (int8, nf4) = (Quantised::quantise(&w, Precision::Int8)?, Quantised::quantise(&w, Precision::Nf4)?);
            let weights: [(&str, Weight); 5] = [
                ("f32", (&w).into()),
                ("bf16", (&bf16).into()),
                ("f16", (&f16).into()),
                ("int8", (&int8).into()),
                ("nf4", (&nf4).into()),
            ];
            for (name, w) in weights {
                let flops = (2 * rows * k * n) as f64;
                let forward = rate(flops, || linear(&x, w).map(drop))?;
                let dx = rate(flops, || linear_backward_input(&dy, w, None).map(drop))?;
                let dtype = dtype.as_str();
                println!(
                    "{{\"dtype\":\"{dtype}\",\"weight\":\"{name}\",\"rows\":{rows},\"k\":{k},\"n\":{n},\"forward\":{forward:.0},\"dx\":{dx:.0}}}"
                );
            }
        }
    }
    Ok(())
}

/// The rank of the adapters that are timed.
const RANK: usize = 16;

/// The narrow products of an adapter, in microseconds: the input times A, the gradient of the output times B, and the gradient of A.
fn adapters() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, k) in [(256, 768), (256, 3072), (1024, 768), (1024, 3072), (2048, 512)] {
            let random = |shape: (usize, usize)| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
            let x = random((rows, k))?.to_dtype(dtype)?;
            let (a, b, da, du) =
                (random((RANK, k))?, random((k, RANK))?, random((RANK, k))?, random((rows, RANK))?.to_dtype(dtype)?);
            let microseconds = |f: &mut dyn FnMut() -> Result<()>| Ok::<_, candle_core::Error>(1e-3 / rate(1.0, f)?);
            let down = microseconds(&mut || linear(&x, &a).map(drop))?;
            let back = microseconds(&mut || linear_backward_input(&x, &b, None).map(drop))?;
            let weight = microseconds(&mut || linear_backward_weight(&du, &x, &da, true))?;
            let dtype = dtype.as_str();
            println!(
                "{{\"dtype\":\"{dtype}\",\"rows\":{rows},\"k\":{k},\"down\":{down:.1},\"back\":{back:.1},\"weight\":{weight:.1}}}"
            );
        }
    }
    Ok(())
}
