//! Attention with its norm, projections and residual: `y = x + dropout(o(attention(q(n), k(m), v(m))))`,
//! where `n = norm(x)` and `m` is `n` (self attention) or the encoder's output (cross attention).
//!
//! Kept for backward: x, q, k, v, the attention output and its log-sum-exp, and the narrow products of adapters. Probabilities
//! are recomputed from the log-sum-exp inside `t5_ops`, `n` from x.

use t5_ops::Mask;

use super::Weights;
use super::linear::{Linear, OutputGradient, try_map_narrow};
use super::norm::Norm;
use crate::config::Config;
use crate::context::{LayerContext, Noise, Place, adapter_site, site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::{Attended, AttentionSettings, Ops, Position};
use crate::reach::Keep;

#[derive(Clone, Debug)]
pub(crate) struct Attention<T> {
    pub norm: Norm<T>,
    pub q: Linear<T>,
    pub k: Linear<T>,
    pub v: Linear<T>,
    pub o: Linear<T>,
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

/// Attention output before its projection: weighted values (B,T,HK) and the log-sum-exp of scores (B,H,T).
#[derive(Clone, Debug)]
pub(crate) struct Heads<T> {
    pub out: T,
    pub lse: T,
}

impl<T> Heads<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        [&self.out, &self.lse].into_iter()
    }

    /// Applies `f` to each tensor, in the order of [`Heads::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<Heads<U>> {
        Ok(Heads { out: f(self.out)?, lse: f(self.lse)? })
    }
}

/// Saved for backward: x (B,T,D), q (B,T,HK), k and v (B,S,HK), the attention output, and the narrow products of the adapters of q, k,
/// v and o.
#[derive(Clone, Debug)]
pub(crate) struct AttentionSaved<T> {
    pub x: T,
    q: T,
    k: T,
    v: T,
    heads: Heads<T>,
    narrow: [Option<T>; 4],
}

impl<T> AttentionSaved<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        let tensors = [&self.x, &self.q, &self.k, &self.v].into_iter().chain(self.heads.tensors());
        tensors.chain(self.narrow.iter().flatten())
    }

    /// Applies `f` to each tensor, in the order of [`AttentionSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<AttentionSaved<U>> {
        let AttentionSaved { x, q, k, v, heads, narrow } = self;
        let (x, q, k, v, heads) = (f(x)?, f(q)?, f(k)?, f(v)?, heads.try_map(f)?);
        Ok(AttentionSaved { x, q, k, v, heads, narrow: try_map_narrow(narrow, f)? })
    }
}

/// Saved activations of attention.
#[derive(Debug)]
pub(crate) enum AttentionKept<T> {
    Nothing,
    Heads(Heads<T>),
    Everything(AttentionSaved<T>),
}

/// Gradients that go elsewhere than to the layer below.
pub(crate) struct SideGradients<'a, T> {
    /// Accumulator of the stack's position bias, (H, 2T-1); `None` when its table is frozen.
    pub bias: Option<&'a T>,
    /// Gradient of the encoder's output so far, if it is wanted.
    pub source: &'a mut SourceGradient<T>,
}

/// The gradient of the encoder's output. Every cross attention adds to it.
#[derive(Debug)]
pub(crate) enum SourceGradient<T> {
    /// Nothing below the encoder's output is trained.
    NotWanted,
    /// Wanted; `None` before the first contribution.
    Wanted(Option<T>),
}

impl<T: Ops> Attention<T> {
    /// The attention at layer `layer` ("encoder.block.3.layer.0") of block `block`.
    pub fn new(weights: &Weights<T>, config: &Config, layer: &str, decoder: bool, cross: bool, block: usize) -> Self {
        let name = if cross { "EncDecAttention" } else { "SelfAttention" };
        let first = if cross { 4 } else { 0 };
        let linear = |w: &str, number: u32| {
            weights.linear(&format!("{layer}.{name}.{w}"), adapter_site(decoder, Some(block), first + number))
        };
        let (probabilities, residual) = match cross {
            false => (Place::SelfProbabilities, Place::SelfResidual),
            true => (Place::CrossProbabilities, Place::CrossResidual),
        };
        Attention {
            norm: Norm {
                weight: weights.get(format!("{layer}.layer_norm.weight")),
                epsilon: config.layer_norm_epsilon,
            },
            q: linear("q", 0),
            k: linear("k", 1),
            v: linear("v", 2),
            o: linear("o", 3),
            heads: config.num_heads,
            kind: if cross { Kind::Cross } else { Kind::Own { causal: decoder } },
            probabilities: site(decoder, Some(block), probabilities),
            residual: site(decoder, Some(block), residual),
        }
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        self.norm.is_trained(grads) || self.linears().any(|linear| linear.is_trained(grads))
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear<T>> {
        [&self.q, &self.k, &self.v, &self.o].into_iter()
    }

    /// The layer's output. `x` is (B, T, D).
    pub fn forward(&self, x: T, cx: &LayerContext<T>, keep: Keep) -> Result<(T, AttentionKept<T>)> {
        if keep == Keep::Everything {
            let (y, saved) = self.recompute(x, cx, None)?;
            return Ok((y, AttentionKept::Everything(saved)));
        }
        let [q, k, v] = self.products(&x, cx)?.map(|(product, _)| product);
        let heads = self.heads(&q, &k, &v, cx)?;
        drop((q, k, v));
        let kept = if keep == Keep::Heads { AttentionKept::Heads(heads.clone()) } else { AttentionKept::Nothing };
        Ok((self.finish(&x, heads, cx)?.0, kept))
    }

    /// Runs forward again and keeps everything. The attention output is computed unless it is given.
    pub fn recompute(&self, x: T, cx: &LayerContext<T>, given: Option<Heads<T>>) -> Result<(T, AttentionSaved<T>)> {
        let [(q, of_q), (k, of_k), (v, of_v)] = self.products(&x, cx)?;
        let heads = given.map_or_else(|| self.heads(&q, &k, &v, cx), Ok)?;
        let (y, of_o) = self.finish(&x, heads.clone(), cx)?;
        Ok((y, AttentionSaved { x, q, k, v, heads, narrow: [of_q, of_k, of_v, of_o] }))
    }

    /// Queries (B, T, HK), keys and values (B, S, HK), each with the narrow product of its adapter.
    fn products(&self, x: &T, cx: &LayerContext<T>) -> Result<[(T, Option<T>); 3]> {
        let (n, _) = self.norm.forward(x)?;
        let q = self.q.forward_keeping(&n, &cx.noise)?;
        let m = self.keys_from(&n, cx);
        Ok([q, self.k.forward_keeping(m, &cx.noise)?, self.v.forward_keeping(m, &cx.noise)?])
    }

    fn heads(&self, q: &T, k: &T, v: &T, cx: &LayerContext<T>) -> Result<Heads<T>> {
        let (out, lse) = T::attention(q, k, v, &self.settings(cx))?;
        Ok(Heads { out, lse })
    }

    /// The output projection and the residual, (B, T, D), and the narrow product of its adapter.
    fn finish(&self, x: &T, heads: Heads<T>, cx: &LayerContext<T>) -> Result<(T, Option<T>)> {
        let (projected, narrow) = self.o.forward_keeping(&heads.out, &cx.noise)?;
        drop(heads);
        Ok((T::dropout_add(x, &projected, cx.dropout(self.residual).as_ref())?, narrow))
    }

    /// Adds the weights' gradients. Returns the gradient of `x` where `wanted`.
    pub fn backward(
        &self,
        saved: AttentionSaved<T>,
        dy: T,
        cx: &LayerContext<T>,
        side: &mut SideGradients<T>,
        wanted: bool,
        grads: &mut Gradients<T>,
    ) -> Result<Option<T>> {
        let AttentionSaved { x, q, k, v, heads: Heads { out, lse }, narrow: [of_q, of_k, of_v, of_o] } = saved;
        let dprojected = self.o.backward(T::dropout(&dy, cx.dropout(self.residual).as_ref())?)?;
        self.o.backward_weight(&dprojected, (&out, of_o), &cx.noise, grads)?;
        let dbias = side.bias.filter(|_| self.kind != Kind::Cross);
        let through_input = wanted || self.norm.is_trained(grads);
        let to_source = self.kind == Kind::Cross && matches!(side.source, SourceGradient::Wanted(_));
        let has_trained = [&self.q, &self.k, &self.v].into_iter().any(|linear| linear.is_trained(grads));
        if !(through_input || to_source || has_trained || dbias.is_some()) {
            return Ok(None);
        }
        let dout = self.o.backward_input(&dprojected, None, &cx.noise)?;
        drop(dprojected);
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (dq, dk, dv) = T::attention_backward(&of, &dout, &self.settings(cx), dbias)?;
        drop((q, k, v, out, lse, dout));

        let (dq, dk, dv) = (self.q.backward(dq)?, self.k.backward(dk)?, self.v.backward(dv)?);
        let (n, inv_rms) = self.norm.forward(&x)?;
        self.q.backward_weight(&dq, (&n, of_q), &cx.noise, grads)?;
        let m = self.keys_from(&n, cx);
        self.k.backward_weight(&dk, (m, of_k), &cx.noise, grads)?;
        self.v.backward_weight(&dv, (m, of_v), &cx.noise, grads)?;
        drop(n);
        let dn = match self.kind {
            Kind::Own { .. } if through_input => {
                let dn = self.q.backward_input(&dq, None, &cx.noise)?;
                drop(dq);
                Some(self.keys_backward(dk, dv, Some(dn), &cx.noise)?)
            }
            Kind::Own { .. } => None,
            Kind::Cross => {
                if let SourceGradient::Wanted(dm) = side.source {
                    *dm = Some(self.keys_backward(dk, dv, dm.take(), &cx.noise)?);
                }
                through_input.then(move || self.q.backward_input(&dq, None, &cx.noise)).transpose()?
            }
        };
        let Some(dn) = dn else { return Ok(None) };
        let dx = self.norm.backward(&x, &inv_rms, dn, Some(&dy), grads)?;
        Ok(wanted.then_some(dx))
    }

    /// `sum + dk Wk + dv Wv`.
    fn keys_backward(&self, dk: OutputGradient<T>, dv: OutputGradient<T>, sum: Option<T>, noise: &Noise) -> Result<T> {
        let sum = self.k.backward_input(&dk, sum, noise)?;
        drop(dk);
        self.v.backward_input(&dv, Some(sum), noise)
    }

    fn keys_from<'a>(&self, n: &'a T, cx: &LayerContext<'a, T>) -> &'a T {
        match self.kind {
            Kind::Own { .. } => n,
            Kind::Cross => cx.source().0,
        }
    }

    fn settings<'a>(&self, cx: &LayerContext<'a, T>) -> AttentionSettings<'a, T> {
        let (heads, dropout) = (self.heads, cx.dropout(self.probabilities));
        match self.kind {
            Kind::Own { causal } => {
                let (bias, mask) = (Some(cx.bias), Mask::causal_if(causal));
                AttentionSettings { bias, mask, dropout, ..AttentionSettings::new(heads, cx.lengths) }
            }
            Kind::Cross => AttentionSettings { dropout, ..AttentionSettings::new(heads, cx.source().1) },
        }
    }

    /// One position of generation: the heads of queries `q` (B, T, HK) over the keys and values of a source (B, S, HK).
    pub fn attend(&self, q: &T, k: &T, v: &T, lengths: &[usize]) -> Result<T> {
        Ok(T::attention(q, k, v, &AttentionSettings::new(self.heads, lengths))?.0)
    }

    /// As [`Attention::attend`], for queries (B, 1, HK) over the keys and values of the tokens so far (B, C, HK). `bias` is that of all
    /// positions, (H, 2C-1).
    pub fn attend_at(&self, q: &T, caches: [&T; 2], bias: &T, position: Position<T>) -> Result<T> {
        let settings = AttentionSettings { bias: Some(bias), ..AttentionSettings::new(self.heads, &[]) };
        Ok(T::attention_at(q, caches, &settings, position)?.0)
    }

    /// Projects the result of [`Attention::attend`] and adds it to `x`.
    pub fn add_to(&self, x: &T, heads: &T) -> Result<T> {
        T::dropout_add(x, &self.o.forward(heads, &Noise::NONE)?, None)
    }
}
