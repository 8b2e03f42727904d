//! A linear layer without a bias: one weight (out, in), and its product in three directions.

use crate::error::Result;
use crate::ops::Ops;
use crate::parameters::Weight;
use crate::step::gradients::Gradients;

/// `y = x Wᵀ`.
#[derive(Clone, Debug)]
pub(crate) struct Linear<T> {
    pub weight: Weight<T>,
}

impl<T: Ops> Linear<T> {
    pub fn new(weight: Weight<T>) -> Linear<T> {
        Linear { weight }
    }

    /// x (.., in) to (.., out).
    pub fn forward(&self, x: &T) -> Result<T> {
        T::linear(x, &self.weight.tensor)
    }

    /// The gradient of the input, (.., in), plus `sum`, whose memory it takes.
    pub fn backward_input(&self, dy: &T, sum: Option<T>) -> Result<T> {
        T::linear_backward_input(dy, &self.weight.tensor, sum)
    }

    /// Adds `dyᵀ x` to the weight's gradient, where it is trained.
    pub fn backward_weight(&self, dy: &T, x: &T, grads: &mut Gradients<T>) -> Result<()> {
        if let Some((dweight, accumulate)) = grads.accumulator_or_empty(&self.weight)? {
            T::linear_backward_weight(dy, x, &dweight, accumulate)?;
        }
        Ok(())
    }

    pub fn is_trained(&self, grads: &Gradients<T>) -> bool {
        grads.trains(&self.weight)
    }
}
