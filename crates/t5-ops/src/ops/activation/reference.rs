//! The activation in plain candle operations.

use std::f64::consts::PI;

use candle_core::{DType, Result, Tensor};

use super::Activation;
use crate::dispatch::wide;
use crate::needs::{Needs, copies, widened};
use crate::ops::dropout::Dropout;
use crate::ops::dropout::reference::dropout;

/// See [`crate::feed_forward_activation`].
pub fn feed_forward_activation(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
) -> Result<Tensor> {
    let activated = activate(&wide(gate)?, a)?;
    let h = match up {
        Some(up) => (activated * wide(up)?)?,
        None => activated,
    };
    dropout(&h, d)?.to_dtype(gate.dtype())
}

/// Two intermediate tensors of the function, or of the mask.
pub(super) fn forward_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(2, elements, dtype) + widened(elements, dtype))
}

/// Intermediate tensors of the slope, besides the gradient that is passed in.
pub(super) fn backward_needs(elements: u64, dtype: DType) -> Needs {
    Needs::bytes(copies(4, elements, dtype) + widened(elements, dtype))
}

/// See [`crate::feed_forward_activation_backward`].
pub fn feed_forward_activation_backward(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
    dh: &Tensor,
) -> Result<(Tensor, Option<Tensor>)> {
    let dh = dropout(&wide(dh)?, d)?;
    let wide_gate = wide(gate)?;
    let slope = slope(&wide_gate, a)?;
    match up {
        None => Ok(((dh * slope)?.to_dtype(gate.dtype())?, None)),
        Some(up) => {
            let dgate = ((&dh * wide(up)?)? * slope)?;
            let dup = (dh * activate(&wide_gate, a)?)?;
            Ok((dgate.to_dtype(gate.dtype())?, Some(dup.to_dtype(up.dtype())?)))
        }
    }
}

fn activate(x: &Tensor, a: Activation) -> Result<Tensor> {
    match a {
        Activation::Relu => x.relu(),
        Activation::GeluNew => x * ((tanh_argument(x)?.tanh()? + 1.0)? * 0.5)?,
        Activation::Gelu => x * normal_cdf(x)?,
        Activation::Silu => x * sigmoid(x)?,
    }
}

/// The derivative of the activation at `x`.
fn slope(x: &Tensor, a: Activation) -> Result<Tensor> {
    match a {
        Activation::Relu => x.gt(0.0)?.to_dtype(x.dtype()),
        Activation::GeluNew => {
            // With t = tanh(u(x)): (1 + t) / 2 + x (1 - t²) u'(x) / 2.
            let t = tanh_argument(x)?.tanh()?;
            let du = ((x.sqr()? * (3.0 * 0.044715))? + 1.0)?.affine((2.0 / PI).sqrt(), 0.0)?;
            let curved = ((x * t.sqr()?.affine(-1.0, 1.0)?)? * du)?;
            ((t + 1.0)? + curved)? * 0.5
        }
        Activation::Gelu => {
            let density = (x.sqr()? * -0.5)?.exp()?.affine((2.0 * PI).sqrt().recip(), 0.0)?;
            normal_cdf(x)? + (x * density)?
        }
        Activation::Silu => {
            let s = sigmoid(x)?;
            &s * ((x * s.affine(-1.0, 1.0)?)? + 1.0)?
        }
    }
}

fn tanh_argument(x: &Tensor) -> Result<Tensor> {
    (x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / PI).sqrt()
}

fn normal_cdf(x: &Tensor) -> Result<Tensor> {
    ((x * 0.5f64.sqrt())?.erf()? + 1.0)? * 0.5
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}
