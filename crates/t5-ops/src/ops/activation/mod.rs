//! The feed-forward's activation with its gate and dropout: `h = dropout(act(gate) * up)`.
//!
//! T5 v1.1 is gated (`up` is the second projection); v1.0 is not (`up` is `None`, `h = dropout(act(gate))`).
//!
//! Shapes: gate, up, h, dh (B, T, F).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::dispatch::{Path, check_shape};
use crate::needs::Needs;
use crate::ops::dropout::{Dropout, active, batch_rows_width};

/// The activation functions that T5 configurations name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`: T5 v1.0.
    Relu,
    /// The tanh form of GELU, transformers' `gelu_new` (Hendrycks and Gimpel 2016): T5 v1.1.
    GeluNew,
    /// GELU with the error function.
    Gelu,
    /// `x * sigmoid(x)`.
    Silu,
}

/// `dropout(act(gate) * up)` in the dtype of `gate`.
pub fn feed_forward_activation(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("feed_forward_activation").entered();
    let d = check("feed_forward_activation", gate, up, d)?;
    match Path::choose(&[gate]).provided(same_dtype(gate, up)) {
        Path::Cpu => cpu::feed_forward_activation(gate, up, a, d),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes_alike([gate].into_iter().chain(up)) => {
            cuda::feed_forward_activation(gate, up, a, d)
        }
        Path::Reference | Path::Device => reference::feed_forward_activation(gate, up, a, d),
    }
}

/// Returns the needs of [`feed_forward_activation`] for this many elements of `gate`.
pub fn feed_forward_activation_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Device => Needs::launches(1),
        Path::Reference => reference::forward_needs(elements, dtype),
    }
}

/// Recomputes the forward's result, and returns it with the gradients with respect to `gate` and `up`. `d` as in the forward.
///
/// The caller gives up `gate`, `up` and `dh`: the three results may lie in their memory, so no other handle to them may be read afterwards.
pub fn feed_forward_activation_backward(
    gate: Tensor,
    up: Option<Tensor>,
    a: Activation,
    d: Option<&Dropout>,
    dh: Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let _span = tracing::debug_span!("feed_forward_activation_backward").entered();
    let d = check("feed_forward_activation_backward", &gate, up.as_ref(), d)?;
    check_shape("feed_forward_activation_backward", "dh", &dh, gate.dims())?;
    let same = same_dtype(&gate, up.as_ref()) && same_dtype(&gate, Some(&dh));
    match Path::choose(&[&gate]).provided(same) {
        Path::Cpu => cpu::feed_forward_activation_backward(gate, up, a, d, dh),
        #[cfg(feature = "cuda")]
        Path::Device if cuda_device::launch::takes_alike([&gate, &dh].into_iter().chain(&up)) => {
            cuda::feed_forward_activation_backward(gate, up, a, d, dh)
        }
        Path::Reference | Path::Device => {
            let h = reference::feed_forward_activation(&gate, up.as_ref(), a, d)?;
            let (dgate, dup) = reference::feed_forward_activation_backward(&gate, up.as_ref(), a, d, &dh)?;
            Ok((h, dgate, dup))
        }
    }
}

/// Returns the needs of [`feed_forward_activation_backward`] for this many elements of `gate`.
pub fn feed_forward_activation_backward_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Device => Needs::launches(1),
        Path::Reference => reference::backward_needs(elements, dtype),
    }
}

fn same_dtype(gate: &Tensor, other: Option<&Tensor>) -> bool {
    other.is_none_or(|other| other.dtype() == gate.dtype() && other.device().is_cpu())
}

fn check<'a>(
    op: &str,
    gate: &Tensor,
    up: Option<&Tensor>,
    d: Option<&'a Dropout<'a>>,
) -> Result<Option<&'a Dropout<'a>>> {
    if let Some(up) = up {
        check_shape(op, "up", up, gate.dims())?;
    }
    match d {
        None => Ok(None),
        Some(d) => active(op, Some(d), batch_rows_width(op, gate)?.0),
    }
}
