//! The layers of a T5, each with an explicit forward and backward.
//!
//! `forward` takes its input by value and returns the output and, when asked to keep it, a `Saved` that
//! holds exactly what backward needs; `backward` consumes it and frees every tensor after its last use.
//! The bytes of a `Saved` are a function of shapes ([`crate::costs`]) and a test holds the two together.
//!
//! What is kept is what is dear to compute again. Norms, dropout masks and activations of the
//! feed-forward layer are recomputed from what is kept, at the price of one pass over memory each.
//!
//! Shapes: B batch, T length of this stack, S length of the source, H heads, K head size, D model size,
//! F feed-forward size.

pub(crate) mod attention;
pub(crate) mod block;
pub(crate) mod feed_forward;
pub(crate) mod norm;
pub(crate) mod stack;

use candle_core::Tensor;
use t5_ops::Dropout;

use crate::error::Result;
use crate::gradients::Gradients;
use crate::parameters::Weight;

/// Hands parameters to layers by name while a model is put together.
pub(crate) struct Weights<'a> {
    pub parameters: &'a [crate::parameters::Parameter],
}

impl Weights<'_> {
    /// # Panics
    /// For a name that [`crate::ParameterSpec::all`] does not list: the two describe one model.
    pub fn get(&self, name: String) -> Weight {
        let index = self.parameters.iter().position(|p| p.name == name);
        let index = index.unwrap_or_else(|| panic!("`{name}` is not a parameter of this model"));
        Weight { index, tensor: self.parameters[index].tensor.clone() }
    }
}

/// `dy` behind a dropout: the same mask as forward, and no copy without dropout.
pub(crate) fn dropout_backward(dy: &Tensor, dropout: Option<&Dropout>) -> Result<Tensor> {
    match dropout {
        None => Ok(dy.clone()),
        some => Ok(t5_ops::dropout(dy, some)?),
    }
}

/// `dw += dyᵀ x`, where the weight is trained.
pub(crate) fn add_weight_gradient(grads: &mut Gradients, weight: &Weight, dy: &Tensor, x: &Tensor) -> Result<()> {
    if let Some((dw, accumulate)) = grads.accumulator_or_empty(weight)? {
        t5_ops::linear_backward_weight(dy, x, &dw, accumulate)?;
    }
    Ok(())
}

/// Bytes of some tensors.
pub(crate) fn bytes(tensors: &[&Tensor]) -> u64 {
    tensors.iter().map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64).sum()
}
