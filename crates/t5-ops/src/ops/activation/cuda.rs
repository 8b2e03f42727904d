//! The activation on a card.

use candle_core::{Error, Result, Tensor, bail};
use cuda_device::launch::{Kernel, Module, overlap, suffix, unwritten};

use super::Activation;
use crate::ops::dropout::Dropout;
use crate::ops::dropout::cuda::{Mask, launch_on_rows, rows, samples};

/// The number of the activation in the kernels.
fn number(a: Activation) -> i32 {
    match a {
        Activation::Relu => 0,
        Activation::GeluNew => 1,
        Activation::Gelu => 2,
        Activation::Silu => 3,
    }
}

pub(super) fn feed_forward_activation(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
) -> Result<Tensor> {
    let (gate, up) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?);
    let h = unwritten(gate.shape(), gate.dtype(), gate.device())?;
    let rows = rows(&gate)?;
    let samples = samples(d, gate.device())?;
    let kernel = Kernel::new(gate.device(), Module::Dropout, format!("activation_{}", suffix(gate.dtype())))?;
    let kernel = kernel.value(number(a)).value(Mask::new(d)).tensor_or_null(samples.as_ref())?;
    let kernel = kernel.tensor(&gate)?.tensor_or_null(up.as_ref())?.tensor(&h)?;
    // SAFETY: tensors of one shape, and a sample for each sequence.
    unsafe { launch_on_rows(kernel, rows)? };
    Ok(h)
}

/// In place, as on the CPU: the forward's result goes to the memory of `gate`, the gradient of `gate` to the memory of `dh`, and the
/// gradient of `up` to its own.
pub(super) fn feed_forward_activation_backward(
    gate: Tensor,
    up: Option<Tensor>,
    a: Activation,
    d: Option<&Dropout>,
    dh: Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    const OP: &str = "feed_forward_activation_backward";
    let (gate, up, dh) = (gate.contiguous()?, up.map(|up| up.contiguous()).transpose()?, dh.contiguous()?);
    let of_up = |up: &Tensor| Ok::<_, Error>(overlap(up, &dh)? || overlap(up, &gate)?);
    let others_overlap = up.as_ref().map_or(Ok(false), of_up)?;
    if overlap(&gate, &dh)? || others_overlap {
        bail!("{OP}: expected gate, up and dh in separate memory")
    }
    let rows = rows(&gate)?;
    let samples = samples(d, gate.device())?;
    let kernel = Kernel::new(gate.device(), Module::Dropout, format!("activation_backward_{}", suffix(gate.dtype())))?;
    let kernel = kernel.value(number(a)).value(Mask::new(d)).tensor_or_null(samples.as_ref())?;
    let kernel = kernel.tensor(&gate)?.tensor_or_null(up.as_ref())?.tensor(&dh)?;
    // SAFETY: tensors of one shape, and a sample for each sequence.
    unsafe { launch_on_rows(kernel, rows)? };
    Ok((gate, dh, up))
}
