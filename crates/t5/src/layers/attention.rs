//! Attention with its norms, projections and residual: `y = x + dropout(o(attention(q(n), k(m), v(m))))`,
//! where `n = norm(x)` and `m` is `n`, the encoder's output, or both. Some models have norms of heads, rotary positions, or a norm of the
//! layer's output ([`AttentionDescription`]).
//!
//! Kept for backward: x, q, k, v, the attention output and its log-sum-exp, and the narrow products of adapters. Probabilities
//! are recomputed from the log-sum-exp inside `t5_ops`, `n` from x. With norms of heads, q and k are kept as they are before the norms, and
//! normed and rotated again; without, they are kept rotated.

use t5_ops::{Mask, Rope};

use super::Weights;
use super::linear::{Linear, OutputGradient, try_map_narrow};
use super::norm::Norm;
use super::residual::Residual;
use crate::context::{DropoutSite, LayerContext, Noise, adapter_site, site};
use crate::description::{AttentionDescription, Keys, LinearDescription, Positions};
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
    /// The norms of heads of queries and of keys.
    head_norms: Option<[Norm<T>; 2]>,
    residual: Residual<T>,
    heads: usize,
    key_heads: usize,
    scale: f64,
    soft_cap: Option<f64>,
    has_bias: bool,
    /// Base and factor of rotary positions.
    rotary: Option<(f64, f64)>,
    mask: Mask,
    keys: Keys,
    /// The number of the dropout place of probabilities.
    probabilities: Option<u32>,
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

/// Keys and values, (B, S, KH K) each.
#[derive(Clone, Debug)]
pub(crate) struct KeysValues<T> {
    pub k: T,
    pub v: T,
}

/// Queries (B, T, HK), keys and values of their own positions or of a source, and those of the source beside them.
#[derive(Clone, Debug)]
struct Products<T> {
    q: T,
    k: T,
    v: T,
    of_source: Option<KeysValues<T>>,
}

impl<T> Products<T> {
    fn tensors(&self) -> impl Iterator<Item = &T> {
        [&self.q, &self.k, &self.v].into_iter().chain(self.of_source.iter().flat_map(|of| [&of.k, &of.v]))
    }

    fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<Products<U>> {
        let (q, k, v) = (f(self.q)?, f(self.k)?, f(self.v)?);
        let of_source = self.of_source.map(|of| Ok::<_, crate::Error>(KeysValues { k: f(of.k)?, v: f(of.v)? }));
        Ok(Products { q, k, v, of_source: of_source.transpose()? })
    }
}

/// Saved for backward: x (B,T,D), the products, the attention output, the output before the norm after the layer, and the narrow products of
/// the adapters of q, k, v and o.
#[derive(Clone, Debug)]
pub(crate) struct AttentionSaved<T> {
    pub x: T,
    products: Products<T>,
    heads: Heads<T>,
    projected: Option<T>,
    narrow: [Option<T>; 4],
}

impl<T> AttentionSaved<T> {
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        let tensors = [&self.x].into_iter().chain(self.products.tensors()).chain(self.heads.tensors());
        tensors.chain(&self.projected).chain(self.narrow.iter().flatten())
    }

    /// Applies `f` to each tensor, in the order of [`AttentionSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<AttentionSaved<U>> {
        let AttentionSaved { x, products, heads, projected, narrow } = self;
        let (x, products, heads) = (f(x)?, products.try_map(f)?, heads.try_map(f)?);
        let projected = projected.map(&mut *f).transpose()?;
        Ok(AttentionSaved { x, products, heads, projected, narrow: try_map_narrow(narrow, f)? })
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

/// The gradient of the encoder's output. Every attention to it adds to it.
#[derive(Debug)]
pub(crate) enum SourceGradient<T> {
    /// Nothing below the encoder's output is trained.
    NotWanted,
    /// Wanted; `None` before the first contribution.
    Wanted(Option<T>),
}

impl<T: Ops> Attention<T> {
    /// An attention of block `block`.
    pub fn new(weights: &Weights<T>, description: &AttentionDescription, decoder: bool, block: usize) -> Self {
        let is_cross = description.keys == Keys::Source;
        let first = if is_cross { 4 } else { 0 };
        let linear = |linear: &LinearDescription, number: u32| {
            weights.linear(&linear.name, adapter_site(decoder, Some(block), first + number))
        };
        let (probabilities, residual) = match is_cross {
            false => (DropoutSite::SelfProbabilities, DropoutSite::SelfResidual),
            true => (DropoutSite::CrossProbabilities, DropoutSite::CrossResidual),
        };
        let site = |place| site(decoder, Some(block), place);
        let kind = description.kind;
        let norm = |name: &str| Norm::new(weights, name, kind);
        Attention {
            norm: norm(&description.norm),
            q: linear(&description.q, 0),
            k: linear(&description.k, 1),
            v: linear(&description.v, 2),
            o: linear(&description.o, 3),
            head_norms: description.head_norms.as_ref().map(|names| names.each_ref().map(|name| norm(name))),
            residual: Residual::new(weights, description.norm_after.as_deref(), kind, site(residual)),
            heads: description.heads,
            key_heads: description.key_heads,
            scale: description.scale,
            soft_cap: description.soft_cap,
            has_bias: matches!(description.positions, Positions::Bias { .. }),
            rotary: match description.positions {
                Positions::Rotary { base, factor } => Some((base, factor)),
                _ => None,
            },
            mask: description.mask,
            keys: description.keys,
            probabilities: description.drops_probabilities.then(|| site(probabilities)),
        }
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        let mut norms = [&self.norm].into_iter().chain(self.head_norms.iter().flatten());
        norms.any(|norm| norm.is_trained(grads))
            || self.residual.is_trained(grads)
            || self.linears().any(|linear| linear.is_trained(grads))
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear<T>> {
        [&self.q, &self.k, &self.v, &self.o].into_iter()
    }

    /// Whether some keys are the encoder's.
    pub fn sees_source(&self) -> bool {
        self.keys != Keys::Own
    }

    /// The layer's output. `x` is (B, T, D).
    pub fn forward(&self, x: T, cx: &LayerContext<T>, keep: Keep) -> Result<(T, AttentionKept<T>)> {
        if keep == Keep::Everything {
            let (y, saved) = self.recompute(x, cx, None)?;
            return Ok((y, AttentionKept::Everything(saved)));
        }
        let used = self.used(self.products(&x, cx)?.0)?;
        let heads = self.heads(&used, cx)?;
        drop(used);
        let kept = if keep == Keep::Heads { AttentionKept::Heads(heads.clone()) } else { AttentionKept::Nothing };
        Ok((self.finish(&x, heads, cx)?.0, kept))
    }

    /// Runs forward again and keeps everything. The attention output is computed unless it is given.
    pub fn recompute(&self, x: T, cx: &LayerContext<T>, given: Option<Heads<T>>) -> Result<(T, AttentionSaved<T>)> {
        let (products, [of_q, of_k, of_v]) = self.products(&x, cx)?;
        let (products, heads) = match (given, &self.head_norms) {
            (Some(heads), Some(_)) => (products, heads),
            (given, _) => {
                let (kept, used) = self.kept_and_used(products)?;
                (kept, given.map_or_else(|| self.heads(&used, cx), Ok)?)
            }
        };
        let (y, projected, of_o) = self.finish(&x, heads.clone(), cx)?;
        Ok((y, AttentionSaved { x, products, heads, projected, narrow: [of_q, of_k, of_v, of_o] }))
    }

    /// Queries, keys and values, and the narrow products of the adapters of q, k and v.
    fn products(&self, x: &T, cx: &LayerContext<T>) -> Result<(Products<T>, [Option<T>; 3])> {
        let (n, _) = self.norm.forward(x)?;
        let (q, of_q) = self.q.forward_keeping(&n, &cx.noise)?;
        let m = self.keys_from(&n, cx);
        let ((k, of_k), (v, of_v)) = (self.k.forward_keeping(m, &cx.noise)?, self.v.forward_keeping(m, &cx.noise)?);
        let of_source = match self.keys {
            Keys::Merged => {
                let source = cx.source().0;
                Some(KeysValues { k: self.k.forward(source, &cx.noise)?, v: self.v.forward(source, &cx.noise)? })
            }
            Keys::Own | Keys::Source => None,
        };
        Ok((Products { q, k, v, of_source }, [of_q, of_k, of_v]))
    }

    /// Products as backward keeps them, and as attention uses them.
    fn kept_and_used(&self, products: Products<T>) -> Result<(Products<T>, Products<T>)> {
        match self.head_norms {
            Some(_) => Ok((products.clone(), self.used(products)?)),
            None => {
                let used = self.used(products)?;
                Ok((used.clone(), used))
            }
        }
    }

    /// Products as attention uses them: normed and rotated.
    fn used(&self, products: Products<T>) -> Result<Products<T>> {
        let Products { q, k, v, of_source } = products;
        let (q, k) = (self.queries(q, 0)?, self.own_keys(k, 0)?);
        let of_source =
            of_source.map(|KeysValues { k, v }| Ok::<_, crate::Error>(KeysValues { k: self.source_keys(k)?, v }));
        Ok(Products { q, k, v, of_source: of_source.transpose()? })
    }

    /// Queries of positions from `first` on, normed and rotated. The caller gives up `q`.
    fn queries(&self, q: T, first: usize) -> Result<T> {
        let q = self.head_norms.as_ref().map_or(Ok(q.clone()), |[norm, _]| norm.of_heads(&q))?;
        self.rotated(q, self.heads, first)
    }

    /// Keys of positions from `first` on, normed and rotated; those of a source alone are not. The caller gives up `k`.
    fn own_keys(&self, k: T, first: usize) -> Result<T> {
        let k = self.source_keys(k)?;
        self.rotated(k, self.key_heads, first)
    }

    /// Keys of the encoder's output, normed.
    fn source_keys(&self, k: T) -> Result<T> {
        self.head_norms.as_ref().map_or(Ok(k.clone()), |[_, norm]| norm.of_heads(&k))
    }

    fn rotated(&self, x: T, heads: usize, first_position: usize) -> Result<T> {
        self.rope(first_position).map_or(Ok(x.clone()), |rope| x.rope(heads, &rope))
    }

    fn rope(&self, first_position: usize) -> Option<Rope> {
        self.rotary.map(|(base, factor)| Rope { base, factor, first_position })
    }

    fn heads(&self, used: &Products<T>, cx: &LayerContext<T>) -> Result<Heads<T>> {
        let Products { q, k, v, of_source } = used;
        let (out, lse) = T::attention(q, k, v, &self.settings(cx))?;
        let Some(of_source) = of_source else { return Ok(Heads { out, lse }) };
        let (to_source, lse_of_source) = T::attention(q, &of_source.k, &of_source.v, &self.of_source(cx.source().1))?;
        let (out, lse) = T::merge_attention((out, lse), (&to_source, &lse_of_source), self.heads)?;
        Ok(Heads { out, lse })
    }

    /// The output projection and the residual, (B, T, D), the projection where backward needs it, and the narrow product of its adapter.
    fn finish(&self, x: &T, heads: Heads<T>, cx: &LayerContext<T>) -> Result<(T, Option<T>, Option<T>)> {
        let (projected, narrow) = self.o.forward_keeping(&heads.out, &cx.noise)?;
        drop(heads);
        let (y, projected) = self.residual.forward(x, projected, cx)?;
        Ok((y, projected, narrow))
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
        let AttentionSaved { x, products, heads: Heads { out, lse }, projected, narrow: [of_q, of_k, of_v, of_o] } =
            saved;
        let dprojected = self.o.backward(self.residual.backward(projected, &dy, cx, grads)?)?;
        self.o.backward_weight(&dprojected, (&out, of_o), &cx.noise, grads)?;
        let dbias = side.bias.filter(|_| self.has_bias);
        let through_input = wanted || self.norm.is_trained(grads);
        let to_source = self.sees_source() && matches!(side.source, SourceGradient::Wanted(_));
        let has_trained = [&self.q, &self.k, &self.v].into_iter().any(|linear| linear.is_trained(grads))
            || self.head_norms.iter().flatten().any(|norm| norm.is_trained(grads));
        if !(through_input || to_source || has_trained || dbias.is_some()) {
            return Ok(None);
        }
        let dout = self.o.backward_input(&dprojected, None, &cx.noise)?;
        drop(dprojected);
        let (kept, used) = match self.head_norms {
            Some(_) => self.kept_and_used(products).map(|(kept, used)| (Some(kept), used))?,
            None => (None, products),
        };
        let Products { q, k, v, of_source } = used;
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (dq, dk, dv) = T::attention_backward(&of, &dout, &self.settings(cx), dbias)?;
        drop((k, v));
        let dsource = match &of_source {
            None => None,
            Some(KeysValues { k, v }) => {
                let of = Attended { q: &q, k, v, out: &out, lse: &lse };
                let (more, k, v) = T::attention_backward(&of, &dout, &self.of_source(cx.source().1), None)?;
                dq.add_in_place(&more)?;
                Some(KeysValues { k, v })
            }
        };
        drop((q, of_source, out, lse, dout));
        let kept = kept.as_ref();
        let dq = self.unrotated(dq, self.heads)?;
        let dq = self.unnormed(0, kept.map(|kept| &kept.q), dq, grads)?;
        let dk = self.unrotated(dk, self.key_heads)?;
        let dk = self.unnormed(1, kept.map(|kept| &kept.k), dk, grads)?;
        let dsource = match dsource {
            None => None,
            Some(KeysValues { k, v }) => {
                let of_source = kept.and_then(|kept| kept.of_source.as_ref());
                Some(KeysValues { k: self.unnormed(1, of_source.map(|of| &of.k), k, grads)?, v })
            }
        };
        let gradients = Products { q: dq, k: dk, v: dv, of_source: dsource };
        let input = self.products_backward(&x, gradients, [of_q, of_k, of_v], (cx, through_input), side, grads)?;
        let Some((dn, inv_rms)) = input else { return Ok(None) };
        let dx = self.norm.backward(&x, &inv_rms, dn, Some(&dy), grads)?;
        Ok(wanted.then_some(dx))
    }

    /// From the gradients of queries, keys and values to that of the norm's output, if it is `wanted`. Returns the norm's statistics with it.
    fn products_backward(
        &self,
        x: &T,
        Products { q: dq, k: dk, v: dv, of_source: dsource }: Products<T>,
        [of_q, of_k, of_v]: [Option<T>; 3],
        (cx, wanted): (&LayerContext<T>, bool),
        side: &mut SideGradients<T>,
        grads: &mut Gradients<T>,
    ) -> Result<Option<(T, T)>> {
        let (dq, dk, dv) = (self.q.backward(dq)?, self.k.backward(dk)?, self.v.backward(dv)?);
        let (n, inv_rms) = self.norm.forward(x)?;
        self.q.backward_weight(&dq, (&n, of_q), &cx.noise, grads)?;
        let m = self.keys_from(&n, cx);
        self.k.backward_weight(&dk, (m, of_k), &cx.noise, grads)?;
        self.v.backward_weight(&dv, (m, of_v), &cx.noise, grads)?;
        drop(n);
        let dsource = match dsource {
            None => None,
            Some(KeysValues { k, v }) => {
                let (source, dk, dv) = (cx.source().0, self.k.backward(k)?, self.v.backward(v)?);
                self.k.backward_weight(&dk, (source, None), &cx.noise, grads)?;
                self.v.backward_weight(&dv, (source, None), &cx.noise, grads)?;
                Some((dk, dv))
            }
        };
        let dn = match self.keys {
            Keys::Own | Keys::Merged => {
                if let (SourceGradient::Wanted(dm), Some((dk, dv))) = (&mut *side.source, dsource) {
                    *dm = Some(self.keys_backward(dk, dv, dm.take(), &cx.noise)?);
                }
                if !wanted {
                    return Ok(None);
                }
                let dn = self.q.backward_input(&dq, None, &cx.noise)?;
                drop(dq);
                Some(self.keys_backward(dk, dv, Some(dn), &cx.noise)?)
            }
            Keys::Source => {
                if let SourceGradient::Wanted(dm) = side.source {
                    *dm = Some(self.keys_backward(dk, dv, dm.take(), &cx.noise)?);
                }
                wanted.then(move || self.q.backward_input(&dq, None, &cx.noise)).transpose()?
            }
        };
        Ok(dn.map(|dn| (dn, inv_rms)))
    }

    /// The gradient of what was rotated.
    fn unrotated(&self, dx: T, heads: usize) -> Result<T> {
        self.rope(0).map_or(Ok(dx.clone()), |rope| dx.rope_backward(heads, &rope))
    }

    /// The gradient of heads `x` before the norm of queries (0) or keys (1), where there is one. Adds the gradient of its weight.
    fn unnormed(&self, which: usize, x: Option<&T>, dy: T, grads: &mut Gradients<T>) -> Result<T> {
        match (&self.head_norms, x) {
            (Some(norms), Some(x)) => norms[which].heads_backward(x, dy, grads),
            _ => Ok(dy),
        }
    }

    /// `sum + dk Wk + dv Wv`.
    fn keys_backward(&self, dk: OutputGradient<T>, dv: OutputGradient<T>, sum: Option<T>, noise: &Noise) -> Result<T> {
        let sum = self.k.backward_input(&dk, sum, noise)?;
        drop(dk);
        self.v.backward_input(&dv, Some(sum), noise)
    }

    fn keys_from<'a>(&self, n: &'a T, cx: &LayerContext<'a, T>) -> &'a T {
        match self.keys {
            Keys::Own | Keys::Merged => n,
            Keys::Source => cx.source().0,
        }
    }

    /// The settings of attention to the queries' own positions, or to a source alone.
    fn settings<'a>(&self, cx: &LayerContext<'a, T>) -> AttentionSettings<'a, T> {
        let dropout = self.probabilities.and_then(|site| cx.dropout(site));
        match self.keys {
            Keys::Own | Keys::Merged => {
                let bias = cx.bias.filter(|_| self.has_bias);
                AttentionSettings { bias, mask: self.mask, dropout, ..self.of_source(cx.lengths) }
            }
            Keys::Source => AttentionSettings { dropout, ..self.of_source(cx.source().1) },
        }
    }

    /// The settings of attention to all keys of a source.
    fn of_source<'a>(&self, lengths: &'a [usize]) -> AttentionSettings<'a, T> {
        let &Attention { heads, key_heads, scale, soft_cap, .. } = self;
        AttentionSettings { key_heads, scale, soft_cap, ..AttentionSettings::new(heads, lengths) }
    }

    /// The keys and values of a source, as generation caches them.
    pub fn cached_source(&self, encoded: &T) -> Result<KeysValues<T>> {
        let k = self.source_keys(self.k.forward(encoded, &Noise::NONE)?)?;
        Ok(KeysValues { k, v: self.v.forward(encoded, &Noise::NONE)? })
    }

    /// Queries (B, 1, HK) of the token at a position, normed and rotated. The caller gives up `q`.
    pub fn queries_at(&self, q: T, position: usize) -> Result<T> {
        self.queries(q, position)
    }

    /// Keys (B, 1, KH K) of the token at a position, normed and rotated. The caller gives up `k`.
    pub fn keys_at(&self, k: T, position: usize) -> Result<T> {
        self.own_keys(k, position)
    }

    /// The most tokens whose keys and values generation needs.
    pub fn most_cached(&self) -> usize {
        self.mask.before.saturating_add(1)
    }

    /// One position of generation: the heads of queries `q` (B, T, HK) over the keys and values of a source (B, S, KH K).
    pub fn attend(&self, q: &T, of: &KeysValues<T>, lengths: &[usize]) -> Result<Heads<T>> {
        let (out, lse) = T::attention(q, &of.k, &of.v, &self.of_source(lengths))?;
        Ok(Heads { out, lse })
    }

    /// As [`Attention::attend`], for queries (B, 1, HK) over the keys and values of the tokens so far (B, C, KH K). `bias` is that of all
    /// positions, (H, 2C-1).
    pub fn attend_at(&self, q: &T, own: &KeysValues<T>, bias: Option<&T>, position: Position<T>) -> Result<Heads<T>> {
        let settings = AttentionSettings { bias: bias.filter(|_| self.has_bias), ..self.of_source(&[]) };
        let (out, lse) = T::attention_at(q, [&own.k, &own.v], &settings, position)?;
        Ok(Heads { out, lse })
    }

    /// The result of one softmax over the keys of both, (B, T, HK).
    pub fn merged(&self, own: Heads<T>, of_source: &Heads<T>) -> Result<T> {
        Ok(T::merge_attention((own.out, own.lse), (&of_source.out, &of_source.lse), self.heads)?.0)
    }

    /// Whether the softmax is over the queries' own positions and the source.
    pub fn is_merged(&self) -> bool {
        self.keys == Keys::Merged
    }

    /// Projects the result of [`Attention::attend`] and adds it to `x`.
    pub fn add_to(&self, x: &T, heads: &T) -> Result<T> {
        self.residual.infer(x, &self.o.forward(heads, &Noise::NONE)?)
    }
}
