//! Attention with its norm, projections and residual: `y = x + dropout(o(attention(q(n), k(m), v(m))))`,
//! where `n = norm(x)` and `m` is `n` (self attention) or the encoder's output (cross attention).
//!
//! Kept for backward: x, q, k, v, the heads' output and its log-sum-exp. Probabilities are recomputed from
//! the last inside `t5_ops`, `n` from x.

use candle_core::Tensor;
use t5_ops::{Attended, Attention as Settings};

use super::norm::Norm;
use super::{Weights, add_weight_gradient, dropout_backward};
use crate::config::Config;
use crate::context::{LayerContext, Place, site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::parameters::Weight;
use crate::reach::Keep;

#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub norm: Norm,
    pub q: Weight,
    pub k: Weight,
    pub v: Weight,
    pub o: Weight,
    heads: usize,
    kind: Kind,
    probabilities: u32,
    residual: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Keys and values from the same positions; `causal` in the decoder.
    Own { causal: bool },
    /// Keys and values from the encoder's output; no position bias.
    Cross,
}

/// What the heads put out: their weighted values (B,T,HK) and log-sum-exp (B,H,T).
#[derive(Clone, Debug)]
pub(crate) struct Heads<T = Tensor> {
    pub out: T,
    pub lse: T,
}

impl<T> Heads<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        [&self.out, &self.lse].into_iter()
    }

    /// The same with `f` of each tensor, in the order of [`Heads::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<Heads<U>> {
        Ok(Heads { out: f(self.out)?, lse: f(self.lse)? })
    }
}

/// What attention keeps: x (B,T,D), q (B,T,HK), k and v (B,S,HK), and what the heads put out.
#[derive(Clone, Debug)]
pub(crate) struct AttentionSaved<T = Tensor> {
    pub x: T,
    q: T,
    k: T,
    v: T,
    heads: Heads<T>,
}

impl<T> AttentionSaved<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        [&self.x, &self.q, &self.k, &self.v].into_iter().chain(self.heads.tensors())
    }

    /// The same with `f` of each tensor, in the order of [`AttentionSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<AttentionSaved<U>> {
        let AttentionSaved { x, q, k, v, heads } = self;
        Ok(AttentionSaved { x: f(x)?, q: f(q)?, k: f(k)?, v: f(v)?, heads: heads.try_map(f)? })
    }
}

/// What is left of a forward pass of attention.
#[derive(Debug)]
pub(crate) enum AttentionKept {
    Nothing,
    Heads(Heads),
    Everything(AttentionSaved),
}

/// What backward gives to others than the layer below.
pub(crate) struct SideGradients<'a> {
    /// Accumulator of the stack's position bias, (H, 2T-1); `None` when its table is frozen.
    pub bias: Option<&'a Tensor>,
    /// Gradient of the encoder's output so far, where it is wanted.
    pub source: &'a mut SourceGradient,
}

/// The gradient of the encoder's output, which every cross attention adds to.
#[derive(Debug)]
pub(crate) enum SourceGradient {
    /// Nothing trained lies below it.
    NotWanted,
    /// Wanted; `None` before the first contribution.
    Wanted(Option<Tensor>),
}

impl Attention {
    /// The attention at layer `layer` ("encoder.block.3.layer.0") of block `block`.
    pub fn new(weights: &Weights, config: &Config, layer: &str, decoder: bool, cross: bool, block: usize) -> Attention {
        let name = if cross { "EncDecAttention" } else { "SelfAttention" };
        let weight = |w: &str| weights.get(format!("{layer}.{name}.{w}.weight"));
        let (probabilities, residual) = match cross {
            false => (Place::SelfProbabilities, Place::SelfResidual),
            true => (Place::CrossProbabilities, Place::CrossResidual),
        };
        Attention {
            norm: Norm {
                weight: weights.get(format!("{layer}.layer_norm.weight")),
                epsilon: config.layer_norm_epsilon,
            },
            q: weight("q"),
            k: weight("k"),
            v: weight("v"),
            o: weight("o"),
            heads: config.num_heads,
            kind: if cross { Kind::Cross } else { Kind::Own { causal: decoder } },
            probabilities: site(decoder, Some(block), probabilities),
            residual: site(decoder, Some(block), residual),
        }
    }

    pub fn is_trained(&self, grads: &Gradients) -> bool {
        self.norm.is_trained(grads) || self.matrices().any(|w| grads.trains(w))
    }

    /// The weights of its products.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        [&self.q, &self.k, &self.v, &self.o].into_iter()
    }

    /// `x` is (B, T, D).
    pub fn forward(&self, x: Tensor, cx: &LayerContext, keep: Keep) -> Result<(Tensor, AttentionKept)> {
        if keep == Keep::Everything {
            let (y, saved) = self.recompute(x, cx, None)?;
            return Ok((y, AttentionKept::Everything(saved)));
        }
        let [q, k, v] = self.products(&x, cx)?;
        let heads = self.heads(&q, &k, &v, cx)?;
        drop((q, k, v));
        let kept = if keep == Keep::Heads { AttentionKept::Heads(heads.clone()) } else { AttentionKept::Nothing };
        Ok((self.finish(&x, heads, cx)?, kept))
    }

    /// Forward that keeps everything; what the heads put out is computed where it is not given.
    pub fn recompute(&self, x: Tensor, cx: &LayerContext, given: Option<Heads>) -> Result<(Tensor, AttentionSaved)> {
        let [q, k, v] = self.products(&x, cx)?;
        let heads = given.map_or_else(|| self.heads(&q, &k, &v, cx), Ok)?;
        let y = self.finish(&x, heads.clone(), cx)?;
        Ok((y, AttentionSaved { x, q, k, v, heads }))
    }

    /// Queries (B, T, HK), keys and values (B, S, HK).
    fn products(&self, x: &Tensor, cx: &LayerContext) -> Result<[Tensor; 3]> {
        let (n, _) = self.norm.forward(x)?;
        let q = t5_ops::linear(&n, &self.q.tensor)?;
        let m = self.keys_from(&n, cx);
        Ok([q, t5_ops::linear(m, &self.k.tensor)?, t5_ops::linear(m, &self.v.tensor)?])
    }

    fn heads(&self, q: &Tensor, k: &Tensor, v: &Tensor, cx: &LayerContext) -> Result<Heads> {
        let (out, lse) = t5_ops::attention(q, k, v, &self.settings(cx))?;
        Ok(Heads { out, lse })
    }

    /// The output projection and the residual, (B, T, D).
    fn finish(&self, x: &Tensor, heads: Heads, cx: &LayerContext) -> Result<Tensor> {
        let projected = t5_ops::linear(&heads.out, &self.o.tensor)?;
        drop(heads);
        Ok(t5_ops::dropout_add(x, &projected, cx.dropout(self.residual).as_ref())?)
    }

    /// Adds the weights' gradients. Returns the gradient of `x` where `wanted`.
    pub fn backward(
        &self,
        saved: AttentionSaved,
        dy: Tensor,
        cx: &LayerContext,
        side: &mut SideGradients,
        wanted: bool,
        grads: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let AttentionSaved { x, q, k, v, heads: Heads { out, lse } } = saved;
        let dprojected = dropout_backward(&dy, cx.dropout(self.residual).as_ref())?;
        add_weight_gradient(grads, &self.o, &dprojected, &out)?;
        let dout = t5_ops::linear_backward_input(&dprojected, &self.o.tensor, None)?;
        drop(dprojected);
        let dbias = side.bias.filter(|_| self.kind != Kind::Cross);
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (dq, dk, dv) = t5_ops::attention_backward(&of, &dout, &self.settings(cx), dbias)?;
        drop((q, k, v, out, lse, dout));

        let (n, inv_rms) = self.norm.forward(&x)?;
        add_weight_gradient(grads, &self.q, &dq, &n)?;
        let m = self.keys_from(&n, cx);
        add_weight_gradient(grads, &self.k, &dk, m)?;
        add_weight_gradient(grads, &self.v, &dv, m)?;
        drop(n);
        let through_input = wanted || self.norm.is_trained(grads);
        let dn = match self.kind {
            Kind::Own { .. } if through_input => {
                let dn = t5_ops::linear_backward_input(&dq, &self.q.tensor, None)?;
                drop(dq);
                Some(self.keys_backward(dk, dv, Some(dn))?)
            }
            Kind::Own { .. } => None,
            Kind::Cross => {
                if let SourceGradient::Wanted(dm) = side.source {
                    *dm = Some(self.keys_backward(dk, dv, dm.take())?);
                }
                through_input.then(move || t5_ops::linear_backward_input(&dq, &self.q.tensor, None)).transpose()?
            }
        };
        let Some(dn) = dn else { return Ok(None) };
        let dx = self.norm.backward(&x, &inv_rms, dn, Some(&dy), grads)?;
        Ok(wanted.then_some(dx))
    }

    /// `sum + dk Wk + dv Wv`.
    fn keys_backward(&self, dk: Tensor, dv: Tensor, sum: Option<Tensor>) -> Result<Tensor> {
        let sum = t5_ops::linear_backward_input(&dk, &self.k.tensor, sum)?;
        drop(dk);
        Ok(t5_ops::linear_backward_input(&dv, &self.v.tensor, Some(sum))?)
    }

    fn keys_from<'a>(&self, n: &'a Tensor, cx: &LayerContext<'a>) -> &'a Tensor {
        match self.kind {
            Kind::Own { .. } => n,
            Kind::Cross => cx.source().0,
        }
    }

    fn settings<'a>(&self, cx: &LayerContext<'a>) -> Settings<'a> {
        let dropout = cx.dropout(self.probabilities);
        match self.kind {
            Kind::Own { causal } => {
                Settings { heads: self.heads, bias: Some(cx.bias), key_lengths: cx.lengths, causal, dropout }
            }
            Kind::Cross => {
                Settings { heads: self.heads, bias: None, key_lengths: cx.source().1, causal: false, dropout }
            }
        }
    }

    /// One position of generation: attention of `x` (B, 1, D) over given keys and values (B, S, HK).
    pub fn attend(
        &self,
        x: &Tensor,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        bias: Option<&Tensor>,
        lengths: &[usize],
    ) -> Result<Tensor> {
        let settings = Settings { heads: self.heads, bias, key_lengths: lengths, causal: false, dropout: None };
        let (out, _) = t5_ops::attention(q, k, v, &settings)?;
        Ok(t5_ops::dropout_add(x, &t5_ops::linear(&out, &self.o.tensor)?, None)?)
    }
}
