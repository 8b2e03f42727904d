//! A soft cap: `y = c tanh(x / c)`, as on the scores and logits of Gemma 2.

mod cpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub(crate) use cpu::{apply, apply_slope};

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{Path, check_shape};
use crate::needs::{Needs, copies};

/// Caps each element of `x`. The caller gives up `x`: its memory may be overwritten with the result.
///
/// # Errors
/// A cap that is not above 0.
pub fn soft_cap(x: Tensor, cap: f64) -> Result<Tensor> {
    check("soft_cap", cap)?;
    match Path::choose(&[&x]).provided(x.is_contiguous()) {
        Path::Cpu => cpu::soft_cap(x, cap),
        Path::Reference | Path::Device => reference::soft_cap(&x, cap),
    }
}

/// The gradient of the argument `x` of [`soft_cap`] from that of the result. The caller gives up `dy`.
///
/// # Errors
/// A cap that is not above 0; other shapes or dtypes.
pub fn soft_cap_backward(x: &Tensor, dy: Tensor, cap: f64) -> Result<Tensor> {
    check("soft_cap_backward", cap)?;
    check_shape("soft_cap_backward", "dy", &dy, x.dims())?;
    let takes = dy.is_contiguous() && x.is_contiguous() && x.dtype() == dy.dtype();
    match Path::choose(&[x, &dy]).provided(takes) {
        Path::Cpu => cpu::soft_cap_backward(x, dy, cap),
        Path::Reference | Path::Device => reference::soft_cap_backward(x, &dy, cap),
    }
}

/// Returns the needs of either function for this many elements, besides its operands. Where the result has memory of its own, this is part
/// of them.
pub fn soft_cap_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference | Path::Device => Needs::bytes(copies(3, elements, dtype)),
    }
}

fn check(op: &str, cap: f64) -> Result<()> {
    if !(cap.is_finite() && cap > 0.0) {
        bail!("{op}: expected a cap above 0, got {cap}")
    }
    Ok(())
}
