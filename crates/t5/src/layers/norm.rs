//! T5's norm: RMS, a scale, no mean and no bias (Zhang and Sennrich 2019). Keeps nothing: its input is
//! kept by the layer it opens, and the inverse RMS is recomputed together with the normed rows.

use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct Norm<T> {
    pub weight: Weight<T>,
    pub epsilon: f64,
}

impl<T: Ops> Norm<T> {
    /// The normed rows (.., D) and the inverse RMS of each row.
    pub fn forward(&self, x: &T) -> Result<(T, T)> {
        T::rms_norm(x, &self.weight.tensor, self.epsilon)
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        grads.trains(&self.weight)
    }

    /// Gradient of the input, plus `residual`, which bypasses the norm. Adds the gradient of the weight.
    pub fn backward(&self, x: &T, inv_rms: &T, dy: T, residual: Option<&T>, grads: &mut Gradients<T>) -> Result<T> {
        let dweight = grads.accumulator(&self.weight)?;
        T::rms_norm_backward(x, &self.weight.tensor, inv_rms, dy, residual, dweight.as_ref())
    }
}
