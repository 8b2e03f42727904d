//! Feed-forward with its norm and residual: `y = x + dropout(wo(dropout(act(wi_0(n)) * wi_1(n))))`,
//! `n = norm(x)`; without a gate `act(wi(n))`. Some models have a norm of the layer's output ([`super::residual`]).
//!
//! Kept for backward: x, the products before the activation, the output before such a norm, and narrow products of adapters. `n` and the activation are recomputed.

use t5_ops::Activation;

use super::Weights;
use super::linear::{Linear, try_map_narrow};
use super::norm::Norm;
use super::residual::Residual;
use crate::context::{DropoutSite, LayerContext, Noise, adapter_site, site};
use crate::description::{FeedForwardDescription, LinearDescription};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;

#[derive(Clone, Debug)]
pub(crate) struct FeedForward<T> {
    norm: Norm<T>,
    /// `wi`, or `wi_0`: the activation is applied to its product.
    gate: Linear<T>,
    /// `wi_1`, in gated layers.
    up: Option<Linear<T>>,
    wo: Linear<T>,
    activation: Activation,
    inner: u32,
    residual: Residual<T>,
}

/// Saved activations of feed-forward: x (B,T,D), gate and, in gated layers, up (B,T,F), the output before the norm after the
/// layer, and the narrow products of the adapters of gate, up and wo.
#[derive(Clone, Debug)]
pub(crate) struct FeedForwardSaved<T> {
    x: T,
    gate: T,
    up: Option<T>,
    projected: Option<T>,
    narrow: [Option<T>; 3],
}

/// The products before the activation.
struct Products<T> {
    gate: T,
    up: Option<T>,
    /// The narrow products of the adapters of gate and up.
    narrow: [Option<T>; 2],
}

impl<T> FeedForwardSaved<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        let tensors = [&self.x, &self.gate].into_iter().chain(&self.up).chain(&self.projected);
        tensors.chain(self.narrow.iter().flatten())
    }

    /// Applies `f` to each tensor, in the order of [`FeedForwardSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<FeedForwardSaved<U>> {
        let FeedForwardSaved { x, gate, up, projected, narrow } = self;
        let (x, gate, up) = (f(x)?, f(gate)?, up.map(&mut *f).transpose()?);
        let projected = projected.map(&mut *f).transpose()?;
        Ok(FeedForwardSaved { x, gate, up, projected, narrow: try_map_narrow(narrow, f)? })
    }
}

impl<T: Ops> FeedForward<T> {
    pub fn new(
        weights: &Weights<T>,
        description: &FeedForwardDescription,
        decoder: bool,
        block: usize,
    ) -> Result<Self> {
        let linear = |linear: &LinearDescription, number: u32| {
            weights.linear(&linear.name, adapter_site(decoder, Some(block), number))
        };
        let (kind, site) = (description.kind, |place| site(decoder, Some(block), place));
        let residual = site(DropoutSite::FeedForwardResidual);
        Ok(FeedForward {
            norm: Norm::new(weights, &description.norm, kind),
            gate: linear(&description.gate, 8),
            up: description.up.as_ref().map(|up| linear(up, 9)),
            wo: linear(&description.down, 10),
            activation: weights.config.activation()?,
            inner: site(DropoutSite::FeedForwardInner),
            residual: Residual::new(weights, description.norm_after.as_deref(), kind, residual),
        })
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear<T>> {
        [&self.gate, &self.wo].into_iter().chain(&self.up)
    }

    /// Gate and up, (B, T, F).
    fn products(&self, x: &T, noise: &Noise) -> Result<Products<T>> {
        let (n, _) = self.norm.forward(x)?;
        let (gate, of_gate) = self.gate.forward_keeping(&n, noise)?;
        let up = self.up.as_ref().map(|up| up.forward_keeping(&n, noise)).transpose()?;
        let (up, of_up) = up.map_or((None, None), |(up, of_up)| (Some(up), of_up));
        Ok(Products { gate, up, narrow: [of_gate, of_up] })
    }

    /// The tensors that forward would have kept, without the output and, where no norm is after the layer, without `wo`'s narrow product.
    pub fn recompute(&self, x: T, cx: &LayerContext<T>) -> Result<FeedForwardSaved<T>> {
        let Products { gate, up, narrow: [of_gate, of_up] } = self.products(&x, &cx.noise)?;
        let (projected, of_wo) = match self.residual.needs_projected() {
            true => {
                let inner = cx.dropout(self.inner);
                let h = T::activation(&gate, up.as_ref(), self.activation, inner.as_ref())?;
                let (projected, of_wo) = self.wo.forward_keeping(&h, &cx.noise)?;
                (Some(projected), of_wo)
            }
            false => (None, None),
        };
        Ok(FeedForwardSaved { x, gate, up, projected, narrow: [of_gate, of_up, of_wo] })
    }

    /// The layer's output. `x` is (B, T, D).
    pub fn forward(&self, x: T, cx: &LayerContext<T>, keep: bool) -> Result<(T, Option<FeedForwardSaved<T>>)> {
        let Products { gate, up, narrow: [of_gate, of_up] } = self.products(&x, &cx.noise)?;
        let inner = cx.dropout(self.inner);
        let h = T::activation(&gate, up.as_ref(), self.activation, inner.as_ref())?;
        let kept = keep.then_some((gate, up, of_gate, of_up));
        let (projected, of_wo) = self.wo.forward_keeping(&h, &cx.noise)?; // (B, T, D)
        drop(h);
        let (y, projected) = self.residual.forward(&x, projected, cx)?;
        let saved = kept.map(|(gate, up, of_gate, of_up)| FeedForwardSaved {
            x,
            gate,
            up,
            projected,
            narrow: [of_gate, of_up, of_wo],
        });
        Ok((y, saved))
    }

    /// Adds the weights' gradients. Returns the gradient of `x` where `wanted`.
    pub fn backward(
        &self,
        saved: FeedForwardSaved<T>,
        dy: T,
        cx: &LayerContext<T>,
        wanted: bool,
        grads: &mut Gradients<T>,
    ) -> Result<Option<T>> {
        let FeedForwardSaved { x, gate, up, projected, narrow: [of_gate, of_up, of_wo] } = saved;
        let inner = cx.dropout(self.inner);
        let dprojected = self.wo.backward(self.residual.backward(projected, &dy, cx, grads)?)?;
        let dh = self.wo.backward_input(&dprojected, None, &cx.noise)?;
        let (h, dgate, dup) = T::activation_backward(gate, up, self.activation, inner.as_ref(), dh)?;
        self.wo.backward_weight(&dprojected, (&h, of_wo), &cx.noise, grads)?;
        drop((h, dprojected));

        let dgate = self.gate.backward(dgate)?;
        let dup = match (&self.up, dup) {
            (Some(up), Some(dup)) => Some((up, up.backward(dup)?)),
            _ => None,
        };
        let (n, inv_rms) = self.norm.forward(&x)?;
        self.gate.backward_weight(&dgate, (&n, of_gate), &cx.noise, grads)?;
        if let Some((up, dup)) = &dup {
            up.backward_weight(dup, (&n, of_up), &cx.noise, grads)?;
        }
        drop(n);
        if !wanted && !self.norm.is_trained(grads) {
            return Ok(None);
        }
        let mut dn = self.gate.backward_input(&dgate, None, &cx.noise)?;
        drop(dgate);
        if let Some((up, dup)) = dup {
            dn = up.backward_input(&dup, Some(dn), &cx.noise)?;
        }
        let dx = self.norm.backward(&x, &inv_rms, dn, Some(&dy), grads)?;
        Ok(wanted.then_some(dx))
    }

    /// Forward without dropout, for generation.
    pub fn infer(&self, x: &T) -> Result<T> {
        let Products { gate, up, narrow: _ } = self.products(x, &Noise::NONE)?;
        let h = T::activation(&gate, up.as_ref(), self.activation, None)?;
        self.residual.infer(x, &self.wo.forward(&h, &Noise::NONE)?)
    }
}
