//! For a given number of threads the same inputs give the same bits, however the threads are scheduled.

use candle_core::{DType, Device, Result, Tensor};
use t5_ops::{
    AdafactorHyper, Attended, Attention, CrossEntropy, Dropout, SecondMoment, SquareSums, adafactor, attention,
    attention_backward, linear_backward_weight, linear_cross_entropy_backward, rms_norm, rms_norm_backward,
};

/// A reproducible tensor of numbers in [-1, 1).
fn numbers(shape: &[usize], dtype: DType) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> =
        (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Every operation that sums over rows, with its results as bits.
fn run(dtype: DType) -> Result<Vec<u32>> {
    let (b, t, d, v) = (3, 70, 64, 500);
    let x = numbers(&[b, t, d], dtype)?;
    let weight = numbers(&[d], DType::F32)?;
    let dweight = numbers(&[d], DType::F32)?;
    let (y, inv_rms) = rms_norm(&x, &weight, 1e-6)?;
    let dx = rms_norm_backward(&x, &weight, &inv_rms, y.copy()?, Some(&x), Some(&dweight))?;

    let samples = [0, 1, 2];
    let bias = numbers(&[4, 2 * t - 1], DType::F32)?;
    let dbias = bias.zeros_like()?;
    let a = Attention {
        heads: 4,
        bias: Some(&bias),
        key_lengths: &[t, 5, 40],
        causal: true,
        dropout: Some(Dropout { probability: 0.1, seed: 1, step: 2, site: 3, samples: &samples }),
    };
    let (out, lse) = attention(&x, &y, &dx, &a)?;
    let of = Attended { q: &x, k: &y, v: &dx, out: &out, lse: &lse };
    let (dq, dk, dv) = attention_backward(&of, &y, &a, Some(&dbias))?;

    let w = numbers(&[v, d], DType::F32)?;
    let dw = w.zeros_like()?;
    let labels: Vec<u32> = (0..(b * t) as u32).map(|row| row * 7 % v as u32).collect();
    let c = CrossEntropy { logit_scale: 1.0, gradient_scale: 0.01, chunk_rows: 64 };
    let (loss, dh) = linear_cross_entropy_backward(&dq.reshape((b * t, d))?, &w, &labels, &c, Some((&dw, true)))?;
    let dsquare = numbers(&[d, d], DType::F32)?;
    linear_backward_weight(&dk, &dv, &dsquare, true)?;

    let second = SecondMoment::Factored { row: Tensor::zeros(v, DType::F32, w.device())?, col: dweight.zeros_like()? };
    let h = AdafactorHyper {
        learning_rate: 1e-3,
        beta2: 0.5,
        eps1: 1e-30,
        eps2: 1e-3,
        clip_threshold: 1.0,
        scale_parameter: true,
        beta1: None,
        weight_decay: 0.0,
        gradient_scale: 1.0 / SquareSums::of(&dw)?.total().sqrt(),
        rounding: t5_ops::Rounding::Nearest,
    };
    adafactor(&w, &dw, &second, None, &h)?;

    let mut bits = vec![loss.to_bits() as u32, (loss.to_bits() >> 32) as u32];
    for tensor in [dx, dweight, out, lse, dq, dk, dv, dbias, dh, dw, dsquare, w] {
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

#[test]
fn the_same_inputs_give_the_same_bits() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
            let expected = pool.install(|| run(dtype))?;
            for _ in 0..5 {
                assert!(pool.install(|| run(dtype))? == expected, "{dtype:?} on {threads} threads");
            }
        }
    }
    Ok(())
}
