//! The loss on the CPU, a row at a time.

use candle_core::{Result, Tensor};

use super::IGNORED_LABEL;
use crate::dispatch::rows_and_width;
use crate::ops::token_loss::{LossSums, TokenLoss};
use crate::parallel::{Shared, for_each_rows};
use crate::storage::{Element, View, update, with_element};
use crate::vector::{exp, sum, vectorized};

pub(super) fn loss(logits: &Tensor, labels: &[u32]) -> Result<f64> {
    let (rows, width) = rows_and_width("logit_cross_entropy", "logits", logits)?;
    let logits = logits.contiguous()?;
    let view = View::new(&logits)?;
    let mut losses = vec![0f64; rows];
    let shared = Shared::new(&mut losses);
    with_element!(logits.dtype(), T, {
        let logits = view.slice::<T>()?;
        for_each_rows(rows, width, |rows| {
            for row in rows.filter(|&row| labels[row] != IGNORED_LABEL) {
                let logits = &logits[row * width..][..width];
                let (largest, total) = statistics(logits);
                // SAFETY: each row has its own element.
                let loss = unsafe { shared.slice(row, 1) };
                loss[0] = loss_of(logits[labels[row] as usize], largest, total);
            }
        });
    });
    Ok(losses.iter().sum())
}

pub(super) fn gradient(
    logits: Tensor,
    labels: &[u32],
    scale: f64,
    token_loss: TokenLoss,
) -> Result<(LossSums, Tensor)> {
    let (_, width) = rows_and_width("logit_cross_entropy", "logits", &logits)?;
    let (of_label, of_each) = (token_loss.of_label() as f32, token_loss.of_each(width) as f32);
    let losses = with_element!(logits.dtype(), T, {
        update::<T, _>("logit_cross_entropy_backward", &logits, &[], |data| {
            Ok(each_row(data, labels, |_, logits, label| {
                let (largest, total) = statistics(logits);
                let (logit, log_z) = (logits[label].to_f32(), f64::from(total).ln() + f64::from(largest));
                let mean = || sum(logits, |logit| logit.to_f32()) as f64 / width as f64;
                let loss = token_loss.of_row(log_z, f64::from(logit), mean);
                let of_softmax = token_loss.of_softmax(log_z) as f32;
                to_gradient(logits, largest, scale as f32 * of_softmax / total, of_each * scale as f32);
                let probability = exp(logit - largest) / total;
                logits[label] = T::from_f32((probability * of_softmax - of_each - of_label) * scale as f32);
                loss
            }))
        })?
    });
    Ok((losses, logits))
}

/// The sums of the losses of rows of logits, each with a label. `of_row` is given the index of a row, its logits and its label, and puts the
/// gradient in place of the logits. Rows with [`IGNORED_LABEL`] have no loss, and a gradient of 0.
pub(crate) fn each_row<T: Element>(
    logits: &mut [T],
    labels: &[u32],
    of_row: impl Fn(usize, &mut [T], usize) -> LossSums + Sync,
) -> LossSums {
    let (rows, width) = (labels.len(), logits.len() / labels.len().max(1));
    let mut losses = vec![LossSums::default(); rows];
    let (data, shared) = (Shared::new(logits), Shared::new(&mut losses));
    for_each_rows(rows, width, |rows| {
        for row in rows {
            // SAFETY: each row belongs to one part, and has its own element of the losses.
            let (logits, loss) = unsafe { (data.slice(row * width, width), shared.slice(row, 1)) };
            match labels[row] {
                IGNORED_LABEL => logits.fill(T::from_f32(0.0)),
                label => loss[0] = of_row(row, logits, label as usize),
            }
        }
    });
    losses.into_iter().sum()
}

fn loss_of<T: Element>(logit: T, largest: f32, total: f32) -> f64 {
    f64::from(total).ln() + f64::from(largest) - f64::from(logit.to_f32())
}

vectorized! {
    /// The largest logit, and the sum of the exponentials below it.
    fn statistics<T: Element>(logits: &[T]) -> (f32, f32) {
        let mut largest = f32::NEG_INFINITY;
        for logit in logits {
            let logit = logit.to_f32();
            // NaN stays, so that the loss is NaN.
            largest = if logit > largest || logit.is_nan() { logit } else { largest };
        }
        (largest, sum(logits, |logit| exp(logit.to_f32() - largest)))
    }

    fn to_gradient<T: Element>(logits: &mut [T], largest: f32, scale: f32, less: f32) {
        for logit in logits {
            *logit = T::from_f32(exp(logit.to_f32() - largest) * scale - less);
        }
    }
}
