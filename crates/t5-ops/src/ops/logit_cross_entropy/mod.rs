//! The cross-entropy of logits that exist whole, such as those of a head with an adapter. With a soft cap c the logits are
//! `c tanh(l / c)` first.
//!
//! Shapes: logits (.., V); a label for each row.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use super::cross_entropy::IGNORED_LABEL;
use super::token_loss::{LossSums, TokenLoss};
use crate::dispatch::{Path, rows_and_width};
use crate::needs::{Needs, copies};

/// The sum over rows of `log-sum-exp(logits) - logits[label]`; rows with [`crate::IGNORED_LABEL`] add nothing.
pub fn logit_cross_entropy(logits: &Tensor, labels: &[u32], soft_cap: Option<f64>) -> Result<f64> {
    check(logits, labels)?;
    if let Some(cap) = soft_cap {
        return logit_cross_entropy(&crate::soft_cap(logits.copy()?, cap)?, labels, None);
    }
    match Path::choose(&[logits]) {
        Path::Cpu => cpu::loss(logits, labels),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([logits]) && logits.is_contiguous() => {
            Ok(cuda::loss(logits, labels, None, TokenLoss::default())?.cross_entropy)
        }
        Path::Reference | Path::Device => reference::logit_cross_entropy(logits, labels),
    }
}

/// The sums of the losses, and `gradient_scale` times the gradient of the objective in the memory of the logits: no other handle to them may
/// be read afterwards.
pub fn logit_cross_entropy_backward(
    logits: Tensor,
    labels: &[u32],
    gradient_scale: f64,
    loss: TokenLoss,
    soft_cap: Option<f64>,
) -> Result<(LossSums, Tensor)> {
    check(&logits, labels)?;
    if let Some(cap) = soft_cap {
        let capped = crate::soft_cap(logits.copy()?, cap)?;
        let (loss, gradient) = logit_cross_entropy_backward(capped, labels, gradient_scale, loss, None)?;
        return Ok((loss, crate::soft_cap_backward(&logits, gradient, cap)?));
    }
    match Path::choose(&[&logits]).provided(logits.is_contiguous()) {
        Path::Cpu => cpu::gradient(logits, labels, gradient_scale, loss),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes([&logits]) && logits.is_contiguous() => {
            Ok((cuda::loss(&logits, labels, Some(gradient_scale), loss)?, logits))
        }
        Path::Reference | Path::Device => {
            reference::logit_cross_entropy_backward(&logits, labels, gradient_scale, loss)
        }
    }
}

/// Returns the needs of either function for this many logits. With a soft cap a copy of the logits is capped.
pub fn logit_cross_entropy_needs(path: Path, elements: u64, dtype: DType, soft_cap: Option<f64>) -> Needs {
    let capped = match soft_cap {
        Some(_) => elements * dtype.size_in_bytes() as u64 + crate::soft_cap_needs(path, elements, dtype).transient,
        None => 0,
    };
    match path {
        Path::Cpu | Path::Device => Needs::bytes(capped),
        Path::Reference => Needs::bytes(capped + copies(4, elements, dtype)),
    }
}

fn check(logits: &Tensor, labels: &[u32]) -> Result<()> {
    let (rows, width) = rows_and_width("logit_cross_entropy", "logits", logits)?;
    if rows != labels.len() {
        bail!("logit_cross_entropy: expected a label for each of {rows} rows, got {}", labels.len())
    }
    match labels.iter().find(|&&label| label != IGNORED_LABEL && label as usize >= width) {
        Some(label) => bail!("logit_cross_entropy: expected labels below {width}, got {label}"),
        None => Ok(()),
    }
}
