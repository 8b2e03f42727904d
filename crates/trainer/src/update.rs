//! The update of a step, as its events reach the optimizer: gradients are measured, a decision is made, gradients are applied.

use candle_core::Tensor;
use t5::{Observer, T5};
use t5_ops::SquareSums;

use crate::error::{Error, Result};
use crate::optimizer::Optimizer;

/// How the events of a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No decision was reached, or the caller asked to stop before anything changed.
    Interrupted,
    /// Loss, gradient or the square of the clipped gradient was not finite.
    NotFinite,
    /// The update is made.
    Made,
}

/// One update of a model's parameters.
pub(crate) struct Update<'a> {
    model: &'a T5,
    optimizer: &'a Optimizer,
    learning_rate: f64,
    /// The largest gradient norm; 0: any.
    max_norm: f64,
    target_tokens: f64,
    interrupted: &'a dyn Fn() -> bool,
    sums: Vec<Option<SquareSums>>,
    scale: f64,
    is_changed: bool,
    /// The mean token loss.
    pub loss: f64,
    /// The norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    pub verdict: Verdict,
}

impl<'a> Update<'a> {
    /// An update at `learning_rate` from the mean loss over `target_tokens`.
    pub fn new(
        model: &'a T5,
        optimizer: &'a Optimizer,
        (learning_rate, max_norm): (f64, f64),
        target_tokens: u64,
        interrupted: &'a dyn Fn() -> bool,
    ) -> Self {
        Update {
            model,
            optimizer,
            learning_rate,
            max_norm,
            target_tokens: target_tokens as f64,
            interrupted,
            sums: vec![None; model.parameters().len()],
            scale: 1.0,
            is_changed: false,
            loss: 0.0,
            grad_norm: 0.0,
            verdict: Verdict::Interrupted,
        }
    }
}

impl Observer<Tensor, Error> for Update<'_> {
    /// Never again once a parameter has changed: a step is made whole or not at all.
    fn interrupted(&mut self) -> bool {
        !self.is_changed && (self.interrupted)()
    }

    fn measure(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        self.sums[index] = Some(SquareSums::of(gradient)?);
        Ok(())
    }

    fn decide(&mut self, loss_sum: f64) -> Result<bool> {
        self.loss = loss_sum / self.target_tokens;
        self.grad_norm = norm(&self.sums);
        self.scale = clip_scale(self.grad_norm, self.max_norm);
        // The optimizer squares in f32: a gradient whose square is infinite would reach its state as one.
        let largest_square = (self.grad_norm * self.scale).powi(2) as f32;
        let is_finite = self.loss.is_finite() && self.grad_norm.is_finite() && largest_square.is_finite();
        self.verdict = match is_finite {
            false => Verdict::NotFinite,
            true if (self.interrupted)() => Verdict::Interrupted,
            true => Verdict::Made,
        };
        Ok(self.verdict == Verdict::Made)
    }

    fn apply(&mut self, index: usize, gradient: &Tensor) -> Result<()> {
        let Some(sums) = &self.sums[index] else { return Ok(()) };
        self.is_changed = true;
        self.model.change(index, |values| {
            self.optimizer.update_one(index, values, gradient, sums, self.learning_rate, self.scale)
        })
    }
}

/// The global L2 norm, summed in the parameters' order.
fn norm(sums: &[Option<SquareSums>]) -> f64 {
    sums.iter().flatten().map(SquareSums::total).sum::<f64>().sqrt()
}

/// The factor of the gradients: `torch.nn.utils.clip_grad_norm_`.
fn clip_scale(norm: f64, max_norm: f64) -> f64 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_is_that_of_torch() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(4.0, 1.0), 1.0 / (4.0 + 1e-6));
        assert_eq!(clip_scale(4.0, 0.0), 1.0);
        assert_eq!(clip_scale(0.0, 1.0), 1.0);
    }
}
