//! A norm: RMS, a scale, no mean and no bias (Zhang and Sennrich 2019). The scale is the weight in T5, and 1 plus the weight in Gemma. Keeps
//! nothing: its input is kept by the layer it belongs to, and the inverse RMS is recomputed together with the normed rows.

use super::Weights;
use crate::description::NormKind;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::{NormWeight, Ops};
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct Norm<T> {
    weight: Weight<T>,
    kind: NormKind,
}

impl<T: Ops> Norm<T> {
    /// The norm whose weight has this name.
    pub fn new(weights: &Weights<T>, name: &str, kind: NormKind) -> Self {
        Norm { weight: weights.get(name.into()), kind }
    }

    /// The normed rows (.., D) and the inverse RMS of each row.
    pub fn forward(&self, x: &T) -> Result<(T, T)> {
        T::rms_norm(x, self.scale(), self.kind.epsilon)
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        grads.trains(&self.weight)
    }

    /// Gradient of the input, plus `residual`, which bypasses the norm. Adds the gradient of the weight.
    pub fn backward(&self, x: &T, inv_rms: &T, dy: T, residual: Option<&T>, grads: &mut Gradients<T>) -> Result<T> {
        let dweight = grads.accumulator(&self.weight)?;
        T::rms_norm_backward(x, self.scale(), inv_rms, dy, residual, dweight.as_ref())
    }

    /// Normed heads: each K values of `x` (B, T, H K), where K is the size of the weight, are a row.
    pub fn of_heads(&self, x: &T) -> Result<T> {
        self.forward(&self.heads(x)?)?.0.shaped(x.dims())
    }

    /// The gradient of the argument of [`Norm::of_heads`]. Adds the gradient of the weight.
    pub fn heads_backward(&self, x: &T, dy: T, grads: &mut Gradients<T>) -> Result<T> {
        let (rows, dy_rows) = (self.heads(x)?, self.heads(&dy)?);
        drop(dy);
        let (_, inv_rms) = self.forward(&rows)?;
        self.backward(&rows, &inv_rms, dy_rows, None, grads)?.shaped(x.dims())
    }

    /// (B, T, H K) as (B, T H, K).
    fn heads(&self, x: &T) -> Result<T> {
        let (size, &[batch, length, width]) = (self.weight.tensor.dims()[0], x.dims()) else {
            unreachable!("heads have three dimensions")
        };
        x.shaped(&[batch, length * (width / size), size])
    }

    fn scale(&self) -> NormWeight<'_, T> {
        NormWeight { tensor: &self.weight.tensor, offset: self.kind.offset }
    }
}
