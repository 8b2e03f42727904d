//! The loss of a student beside its teacher's logits (Hinton et al., 2015, arXiv 1503.02531), for logits that exist whole.
//!
//! With the student's logits l and the teacher's k of a row, its label y, p = softmax(k / T) and q = softmax(l / T):
//!
//! ```text
//! cross-entropy = log-sum-exp(l) - l[y]
//! objective     = α T² Σ p (log p - log q) + (1 - α) cross-entropy
//! gradient      = α T (q - p) + (1 - α) (softmax(l) - one-hot(y))
//! ```
//!
//! Shapes: logits and teacher (.., V); a label for each row. With a soft cap c the student's logits are `c tanh(l / c)` first; the teacher's
//! are capped already.

mod cpu;
mod reference;
#[cfg(test)]
mod tests;
mod top;

use candle_core::{DType, Result, Tensor, bail};

pub use top::{TopLogits, top_distillation_backward};

use super::cross_entropy::IGNORED_LABEL;
use super::token_loss::LossSums;
use crate::dispatch::{Path, rows_and_width};
use crate::needs::{Needs, copies};

/// The numbers of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distillation {
    /// α, the share of the teacher, from 0 to 1.
    pub alpha: f64,
    /// T, above 0.
    pub temperature: f64,
}

/// The sums of the losses, and `gradient_scale` times the gradient of the objective in the memory of the logits: no other handle to them may
/// be read afterwards. Rows with [`IGNORED_LABEL`] add nothing.
///
/// # Errors
/// Shapes or labels that do not fit; on a device there is no kernel.
pub fn distillation_backward(
    logits: Tensor,
    teacher: &Tensor,
    labels: &[u32],
    gradient_scale: f64,
    of: Distillation,
    soft_cap: Option<f64>,
) -> Result<(LossSums, Tensor)> {
    let (rows, width) = rows_and_width("distillation", "logits", &logits)?;
    if teacher.dims() != logits.dims() || labels.len() != rows {
        bail!(
            "distillation: expected a teacher's logits {:?} and {rows} labels, got {:?} and {}",
            logits.dims(),
            teacher.dims(),
            labels.len()
        )
    }
    check_labels(labels, width)?;
    if let Some(cap) = soft_cap {
        let capped = crate::soft_cap(logits.copy()?, cap)?;
        let (loss, gradient) = distillation_backward(capped, teacher, labels, gradient_scale, of, None)?;
        return Ok((loss, crate::soft_cap_backward(&logits, gradient, cap)?));
    }
    match Path::choose(&[&logits, teacher]).provided(logits.is_contiguous() && logits.dtype() == teacher.dtype()) {
        Path::Cpu => cpu::gradient(logits, teacher, labels, gradient_scale, of),
        Path::Reference => reference::distillation_backward(&logits, teacher, labels, gradient_scale, of),
        Path::Device => bail!("distillation: there is no kernel for a device"),
    }
}

fn check_labels(labels: &[u32], width: usize) -> Result<()> {
    match labels.iter().find(|&&label| label != IGNORED_LABEL && label as usize >= width) {
        Some(label) => bail!("distillation: expected labels below {width}, got {label}"),
        None => Ok(()),
    }
}

/// The needs of [`distillation_backward`] for so many logits of the student.
pub fn distillation_needs(path: Path, elements: u64, dtype: DType, soft_cap: Option<f64>) -> Needs {
    let capped = match soft_cap {
        Some(_) => elements * dtype.size_in_bytes() as u64 + crate::soft_cap_needs(path, elements, dtype).transient,
        None => 0,
    };
    match path {
        Path::Cpu | Path::Device => Needs::bytes(capped),
        Path::Reference => Needs::bytes(capped + copies(8, elements, dtype)),
    }
}
