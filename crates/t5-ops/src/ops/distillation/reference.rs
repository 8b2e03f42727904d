//! The loss in plain candle operations.

use candle_core::{DType, Result, Tensor};

use super::{Distillation, TopLogits};
use crate::dispatch::{wide, wide_dtype};
use crate::ops::cross_entropy::IGNORED_LABEL;
use crate::ops::token_loss::LossSums;

/// See [`crate::distillation_backward`].
pub fn distillation_backward(
    logits: &Tensor,
    teacher: &Tensor,
    labels: &[u32],
    gradient_scale: f64,
    Distillation { alpha, temperature }: Distillation,
) -> Result<(LossSums, Tensor)> {
    let width = logits.dims().last().copied().unwrap_or(1);
    let [l, k] = [logits, teacher].map(|logits| wide(logits)?.reshape(((), width)));
    let (l, k) = (l?, k?);
    let counts: Vec<f64> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0.0 } else { 1.0 }).collect();
    let chosen: Vec<u32> = labels.iter().map(|&label| if label == IGNORED_LABEL { 0 } else { label }).collect();
    let counts = Tensor::from_vec(counts, (labels.len(), 1), logits.device())?.to_dtype(wide_dtype(logits))?;
    let chosen = Tensor::from_vec(chosen, (labels.len(), 1), logits.device())?;
    let log_softmax = |x: &Tensor| -> Result<Tensor> {
        let x = x.broadcast_sub(&x.max_keepdim(1)?)?;
        x.broadcast_sub(&x.exp()?.sum_keepdim(1)?.log()?)
    };
    let [own, cooled, of_teacher] = [&l, &(&l / temperature)?, &(&k / temperature)?].map(log_softmax);
    let (own, cooled, of_teacher) = (own?, cooled?, of_teacher?);
    let sum = |x: Tensor| (x * &counts)?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>();
    let cross_entropy = sum(own.gather(&chosen, 1)?.neg()?)?;
    let p = of_teacher.exp()?;
    let divergence = sum((&p * (&of_teacher - &cooled)?)?.sum_keepdim(1)?)?;
    let ones = counts.affine(-1.0, 0.0)?;
    let of_label = own.exp()?.scatter_add(&chosen, &ones, 1)?.affine(1.0 - alpha, 0.0)?;
    let gradient = (of_label + (cooled.exp()? - p)?.affine(alpha * temperature, 0.0)?)?.broadcast_mul(&counts)?;
    let objective = alpha * temperature * temperature * divergence + (1.0 - alpha) * cross_entropy;
    let gradient = (gradient * gradient_scale)?.to_dtype(logits.dtype())?.reshape(logits.dims())?;
    Ok((LossSums { cross_entropy, objective }, gradient))
}

/// A teacher's largest logits among those of all entries, in the shape of `logits`. The others are so small that their exponentials are 0.
pub(super) fn whole(teacher: &TopLogits, logits: &Tensor) -> Result<Tensor> {
    const SMALL: f64 = -1e30;
    let width = logits.dims().last().copied().unwrap_or(1);
    let mut whole = vec![SMALL; logits.elem_count()];
    let values = teacher.values.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let entries = teacher.entries.iter().zip(values).enumerate();
    entries.for_each(|(i, (&entry, value))| whole[i / teacher.count() * width + entry as usize] = value);
    Tensor::from_vec(whole, logits.dims(), logits.device())?.to_dtype(wide_dtype(logits))
}
