//! Linear + cross-entropy on a card: some rows of logits at a time, in f32 for any operands. Losses are added on the card and read once.

use candle_core::{DType, Device, Result, Tensor};
use cuda_device::launch::{Factor, Kernel, Module, check_apart, multiplies, multiply, set_to_zero, suffix, unwritten};

use super::{CrossEntropy, LossSums, TokenLoss};
use crate::ops::embedding::cuda::{gathered, scatter};

/// Threads of the block that works on a row of logits.
const THREADS: u32 = 512;

/// Whether there is a product into this gradient's dtype and device.
pub(super) fn takes_gradient(x: &Tensor, dw: &Tensor) -> bool {
    cuda_device::launch::takes([x, dw]) && multiplies(x.dtype(), dw.dtype())
}

/// Returns the sums of the losses of `rows`. With `dx` (R, D), writes their rows of it, and with `dw` the gradient of the weight.
pub(super) fn chunks(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    rows: &[u32],
    c: &CrossEntropy,
    dx: Option<&Tensor>,
    dw: Option<(&Tensor, bool)>,
) -> Result<LossSums> {
    let (device, dtype) = (x.device(), x.dtype());
    let (vocabulary, width) = w.dims2()?;
    if let Some((dw, _)) = dw.filter(|_| !rows.is_empty()) {
        check_apart("linear_cross_entropy_backward", dw, [x, w])?;
    }
    let (x, w) = (x.contiguous()?, w.to_dtype(dtype)?.contiguous()?);
    let totals = zero_totals(device)?;
    let mut accumulates = dw.is_some_and(|(_, accumulates)| accumulates);
    if let Some((dw, false)) = dw.filter(|_| rows.is_empty()) {
        set_to_zero(dw)?;
    }
    let most = c.chunk_rows.min(rows.len());
    let logits = unwritten((most, vocabulary), DType::F32, device)?;
    // In f32 gradients overwrite logits.
    let gradients = match (dx.is_some() || dw.is_some(), dtype) {
        (false, _) => None,
        (true, DType::F32) => Some(logits.clone()),
        (true, _) => Some(unwritten((most, vocabulary), dtype, device)?),
    };
    for rows in rows.chunks(c.chunk_rows) {
        let count = rows.len();
        let labels: Vec<u32> = rows.iter().map(|&row| labels[row as usize]).collect();
        let (labels, numbers) = (Tensor::from_vec(labels, count, device)?, Tensor::new(rows, device)?);
        let of_chunk = gathered(&numbers, &x, dtype)?;
        let sizes = (count, width, vocabulary);
        multiply(Factor::plain(&of_chunk), Factor::transposed(&w), &logits, sizes, c.logit_scale as f32, 0.0)?;
        let losses = unwritten((2, count), DType::F64, device)?;
        rows_of_logits(
            &logits,
            &labels,
            &losses,
            gradients.as_ref(),
            (c.gradient_scale * c.logit_scale) as f32,
            c.token_loss,
            count,
        )?;
        add_totals(&losses, &totals)?;
        let Some(gradients) = &gradients else { continue };
        if let Some(dx) = dx {
            let of_rows = unwritten((count, width), dtype, device)?;
            multiply(Factor::plain(gradients), Factor::plain(&w), &of_rows, (count, vocabulary, width), 1.0, 0.0)?;
            scatter(&numbers, &of_rows, dx)?;
        }
        if let Some((dw, _)) = dw {
            let beta = if accumulates { 1.0 } else { 0.0 };
            multiply(
                Factor::transposed(gradients),
                Factor::plain(&of_chunk),
                dw,
                (vocabulary, count, width),
                1.0,
                beta,
            )?;
            accumulates = true;
        }
    }
    read_totals(&totals)
}

/// Totals on a device, both zero.
pub(crate) fn zero_totals(device: &Device) -> Result<Tensor> {
    Tensor::zeros(2, DType::F64, device)
}

/// Reads the totals, which waits for the card.
pub(crate) fn read_totals(totals: &Tensor) -> Result<LossSums> {
    let totals: Vec<f64> = totals.to_vec1()?;
    Ok(LossSums { cross_entropy: totals[0], objective: totals[1] })
}

/// The losses (2, C) of the first `count` rows of logits: their cross-entropies and objectives. If there is room for gradients, also writes `scale` times the gradients of these
/// logits.
pub(crate) fn rows_of_logits(
    logits: &Tensor,
    labels: &Tensor,
    losses: &Tensor,
    gradients: Option<&Tensor>,
    scale: f32,
    loss: TokenLoss,
    count: usize,
) -> Result<()> {
    let width = logits.dim(candle_core::D::Minus1)?;
    let to = gradients.map_or(logits.dtype(), Tensor::dtype);
    let name = format!("cross_entropy_{}_{}", suffix(logits.dtype()), suffix(to));
    let kernel = Kernel::new(logits.device(), Module::CrossEntropy, name)?;
    let kernel = kernel.tensor(logits)?.tensor(labels)?.tensor(losses)?.tensor_or_null(gradients)?;
    // SAFETY: labels are within the vocabulary, and there are at least as many rows of logits and gradients, and losses, as labels.
    unsafe {
        kernel.value(scale).value(loss.of_log_z()).value(loss.z_loss).value(loss.label_smoothing).size(width)?.launch(
            [count, 1, 1],
            THREADS,
            32 * size_of::<f32>(),
        )
    }
}

/// Adds losses (2, C) to their totals, in a fixed order.
pub(crate) fn add_totals(losses: &Tensor, totals: &Tensor) -> Result<()> {
    let kernel = Kernel::new(losses.device(), Module::CrossEntropy, "add_totals")?;
    let kernel = kernel.tensor(losses)?.tensor(totals)?.size(losses.dim(1)?)?;
    // SAFETY: each of two blocks adds all values of a row to one element.
    unsafe { kernel.launch([2, 1, 1], THREADS, 32 * size_of::<f64>()) }
}

/// The gradient of `x`: zero in rows that do not count.
pub(super) fn gradients(
    x: &Tensor,
    w: &Tensor,
    labels: &[u32],
    rows: &[u32],
    c: &CrossEntropy,
    dw: Option<(&Tensor, bool)>,
) -> Result<(LossSums, Tensor)> {
    let dx = x.zeros_like()?;
    let loss = chunks(x, w, labels, rows, c, Some(&dx), dw)?;
    Ok((loss, dx))
}
