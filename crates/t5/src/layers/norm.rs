//! T5's norm: RMS, a scale, no mean and no bias (Zhang and Sennrich 2019). Keeps nothing: its input is
//! kept by the layer it opens, and the inverse RMS is recomputed together with the normed rows.

use candle_core::Tensor;

use crate::error::Result;
use crate::gradients::Gradients;
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub weight: Weight,
    pub epsilon: f64,
}

impl Norm {
    /// The normed rows (.., D) and the inverse RMS of each row.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok(t5_ops::rms_norm(x, &self.weight.tensor, self.epsilon)?)
    }

    pub fn is_trained(&self, grads: &Gradients) -> bool {
        grads.trains(&self.weight)
    }

    /// Gradient of the input, plus what reaches it beside the norm; adds the weight's.
    pub fn backward(
        &self,
        x: &Tensor,
        inv_rms: &Tensor,
        dy: Tensor,
        residual: Option<&Tensor>,
        grads: &mut Gradients,
    ) -> Result<Tensor> {
        let dweight = grads.accumulator(&self.weight)?;
        Ok(t5_ops::rms_norm_backward(x, &self.weight.tensor, inv_rms, dy, residual, dweight.as_ref())?)
    }
}
