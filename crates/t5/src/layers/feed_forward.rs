//! Feed-forward with its norm and residual: `y = x + dropout(wo(dropout(act(wi_0(n)) * wi_1(n))))`,
//! `n = norm(x)`; without a gate `act(wi(n))`.
//!
//! Kept for backward: x and the products before the activation. `n` and the activation are recomputed.

use candle_core::Tensor;
use t5_ops::Activation;

use super::norm::Norm;
use super::{Weights, add_weight_gradient, dropout_backward};
use crate::config::Config;
use crate::context::{LayerContext, Place, site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct FeedForward {
    norm: Norm,
    /// `wi`, or `wi_0`: what the activation is applied to.
    gate: Weight,
    /// `wi_1`, in gated layers.
    up: Option<Weight>,
    wo: Weight,
    activation: Activation,
    inner: u32,
    residual: u32,
}

/// What feed-forward keeps: x (B,T,D), gate and, in gated layers, up (B,T,F).
#[derive(Clone, Debug)]
pub(crate) struct FeedForwardSaved<T = Tensor> {
    x: T,
    gate: T,
    up: Option<T>,
}

impl<T> FeedForwardSaved<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        [&self.x, &self.gate].into_iter().chain(&self.up)
    }

    /// The same with `f` of each tensor, in the order of [`FeedForwardSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<FeedForwardSaved<U>> {
        let FeedForwardSaved { x, gate, up } = self;
        Ok(FeedForwardSaved { x: f(x)?, gate: f(gate)?, up: up.map(f).transpose()? })
    }
}

impl FeedForward {
    pub fn new(weights: &Weights, config: &Config, layer: &str, decoder: bool, block: usize) -> Result<FeedForward> {
        let weight = |w: &str| weights.get(format!("{layer}.DenseReluDense.{w}.weight"));
        let gated = config.is_gated_act;
        Ok(FeedForward {
            norm: Norm {
                weight: weights.get(format!("{layer}.layer_norm.weight")),
                epsilon: config.layer_norm_epsilon,
            },
            gate: weight(if gated { "wi_0" } else { "wi" }),
            up: gated.then(|| weight("wi_1")),
            wo: weight("wo"),
            activation: config.activation()?,
            inner: site(decoder, Some(block), Place::FeedForwardInner),
            residual: site(decoder, Some(block), Place::FeedForwardResidual),
        })
    }

    /// The weights of its products.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        [&self.gate, &self.wo].into_iter().chain(&self.up)
    }

    /// Gate and up, (B, T, F).
    fn products(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let (n, _) = self.norm.forward(x)?;
        let gate = t5_ops::linear(&n, &self.gate.tensor)?;
        let up = self.up.as_ref().map(|up| t5_ops::linear(&n, &up.tensor)).transpose()?;
        Ok((gate, up))
    }

    /// What forward would have kept, without computing the output.
    pub fn recompute(&self, x: Tensor) -> Result<FeedForwardSaved> {
        let (gate, up) = self.products(&x)?;
        Ok(FeedForwardSaved { x, gate, up })
    }

    /// `x` is (B, T, D).
    pub fn forward(&self, x: Tensor, cx: &LayerContext, keep: bool) -> Result<(Tensor, Option<FeedForwardSaved>)> {
        let (gate, up) = self.products(&x)?;
        let inner = cx.dropout(self.inner);
        let h = t5_ops::feed_forward_activation(&gate, up.as_ref(), self.activation, inner.as_ref())?;
        let saved = keep.then(|| FeedForwardSaved { x: x.clone(), gate, up });
        let projected = t5_ops::linear(&h, &self.wo.tensor)?; // (B, T, D)
        drop(h);
        let y = t5_ops::dropout_add(&x, &projected, cx.dropout(self.residual).as_ref())?;
        Ok((y, saved))
    }

    /// Adds the weights' gradients. Returns the gradient of `x` where `wanted`.
    pub fn backward(
        &self,
        saved: FeedForwardSaved,
        dy: Tensor,
        cx: &LayerContext,
        wanted: bool,
        grads: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let FeedForwardSaved { x, gate, up } = saved;
        let inner = cx.dropout(self.inner);
        let dprojected = dropout_backward(&dy, cx.dropout(self.residual).as_ref())?;
        let dh = t5_ops::linear_backward_input(&dprojected, &self.wo.tensor, None)?;
        let (h, dgate, dup) = t5_ops::feed_forward_activation_backward(gate, up, self.activation, inner.as_ref(), dh)?;
        add_weight_gradient(grads, &self.wo, &dprojected, &h)?;
        drop((h, dprojected));

        let (n, inv_rms) = self.norm.forward(&x)?;
        add_weight_gradient(grads, &self.gate, &dgate, &n)?;
        if let (Some(up), Some(dup)) = (&self.up, &dup) {
            add_weight_gradient(grads, up, dup, &n)?;
        }
        drop(n);
        if !wanted && !self.norm.is_trained(grads) {
            return Ok(None);
        }
        let mut dn = t5_ops::linear_backward_input(&dgate, &self.gate.tensor, None)?;
        drop(dgate);
        if let (Some(up), Some(dup)) = (&self.up, dup) {
            dn = t5_ops::linear_backward_input(&dup, &up.tensor, Some(dn))?;
        }
        let dx = self.norm.backward(&x, &inv_rms, dn, Some(&dy), grads)?;
        Ok(wanted.then_some(dx))
    }

    /// Forward without dropout, for generation.
    pub fn infer(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up) = self.products(x)?;
        let h = t5_ops::feed_forward_activation(&gate, up.as_ref(), self.activation, None)?;
        Ok(t5_ops::dropout_add(x, &t5_ops::linear(&h, &self.wo.tensor)?, None)?)
    }
}
