//! The end of a layer: `y = x + dropout(projected)` or, with a norm after the layer, `y = x + dropout(norm(projected))`.
//!
//! Kept for backward with a norm: `projected`.

use super::Weights;
use super::norm::Norm;
use crate::context::LayerContext;
use crate::description::NormKind;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;

#[derive(Clone, Debug)]
pub(crate) struct Residual<T> {
    norm: Option<Norm<T>>,
    /// The number of its dropout place.
    site: u32,
}

impl<T: Ops> Residual<T> {
    pub fn new(weights: &Weights<T>, norm: Option<&str>, kind: NormKind, site: u32) -> Self {
        Residual { norm: norm.map(|name| Norm::new(weights, name, kind)), site }
    }

    /// The layer's output (B, T, D), and `projected` where backward needs it.
    pub fn forward(&self, x: &T, projected: T, cx: &LayerContext<T>) -> Result<(T, Option<T>)> {
        let dropout = cx.dropout(self.site);
        let Some(norm) = &self.norm else { return Ok((T::dropout_add(x, &projected, dropout.as_ref())?, None)) };
        let (normed, _) = norm.forward(&projected)?;
        Ok((T::dropout_add(x, &normed, dropout.as_ref())?, Some(projected)))
    }

    /// The output without dropout, for generation.
    pub fn infer(&self, x: &T, projected: &T) -> Result<T> {
        match &self.norm {
            None => T::dropout_add(x, projected, None),
            Some(norm) => T::dropout_add(x, &norm.forward(projected)?.0, None),
        }
    }

    /// The gradient of `projected`. Adds the gradient of the norm's weight. Where neither the layer nor anything below is trained, backward
    /// does not come here.
    pub fn backward(&self, projected: Option<T>, dy: &T, cx: &LayerContext<T>, grads: &mut Gradients<T>) -> Result<T> {
        let dropout = cx.dropout(self.site);
        let (Some(norm), Some(projected)) = (&self.norm, projected) else { return T::dropout(dy, dropout.as_ref()) };
        // The norm's backward writes into its argument, and the gradient that bypasses the layer is needed unchanged.
        let dropped = if dropout.is_some() { T::dropout(dy, dropout.as_ref())? } else { dy.copied()? };
        let (_, inv_rms) = norm.forward(&projected)?;
        norm.backward(&projected, &inv_rms, dropped, None, grads)
    }

    /// Whether backward needs `projected`.
    pub fn needs_projected(&self) -> bool {
        self.norm.is_some()
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        self.norm.as_ref().is_some_and(|norm| norm.is_trained(grads))
    }
}
