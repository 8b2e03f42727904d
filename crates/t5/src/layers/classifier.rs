//! The layers of a classifier over some rows of a stack's output, with their loss.
//!
//! For a label of each token, and in a T5Gemma, this is one linear layer with a bias. For a label of a source it is transformers'
//! `T5ClassificationHead`: dropout, a linear layer, tanh, dropout, a linear layer.
//!
//! Shapes: B samples, n rows of each, D model size, N outputs.

use t5_ops::{Dropout, LossSums, TokenLoss};

use super::Weights;
use crate::config::Config;
use crate::context::{Noise, classifier_site};
use crate::description::LinearDescription;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::head::Problem;
use crate::label_loss::LabelLoss;
use crate::ops::Ops;
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct Classifier<T> {
    dense: Option<Affine<T>>,
    out: Affine<T>,
    /// The probability of dropout before each layer.
    dropout: f64,
    /// What the outputs say, which decides the loss.
    problem: Problem,
}

/// `x Wᵀ + b`.
#[derive(Clone, Debug)]
struct Affine<T> {
    weight: Weight<T>,
    bias: Weight<T>,
}

impl<T: Ops> Affine<T> {
    fn new(weights: &Weights<T>, name: &str) -> Self {
        Affine { weight: weights.get(format!("{name}.weight")), bias: weights.get(format!("{name}.bias")) }
    }

    fn forward(&self, x: &T) -> Result<T> {
        T::linear(x, &self.weight)?.plus_row(&self.bias.tensor)
    }

    /// Adds the gradients of weight and bias. Returns that of the input.
    fn backward(&self, x: &T, dy: &T, grads: &mut Gradients<T>) -> Result<T> {
        if let Some((dweight, accumulate)) = grads.accumulator_or_empty(&self.weight)? {
            T::linear_backward_weight(dy, x, &dweight, accumulate)?;
        }
        if let Some(dbias) = grads.accumulator(&self.bias)? {
            dy.add_rows_to(&dbias)?;
        }
        T::linear_backward_input(dy, &self.weight, None)
    }
}

impl<T: Ops> Classifier<T> {
    /// The classifier of a model's head, if it has one.
    pub fn new(weights: &Weights<T>, config: &Config) -> Option<Self> {
        let problem = config.head.labels()?.problem;
        let (dense, out) = config.classifier_layers()?;
        let of = |layer: &LinearDescription| Affine::new(weights, &layer.name);
        let (dense, out) = (dense.as_ref().map(of), of(&out));
        Some(Classifier { dense, out, dropout: config.classifier_dropout(), problem })
    }

    /// Logits (B, n, N) of rows (B, n, D), without dropout.
    pub fn logits(&self, x: &T) -> Result<T> {
        match &self.dense {
            Some(dense) => self.out.forward(&dense.forward(x)?.tanh()?),
            None => self.out.forward(x),
        }
    }

    /// The sum of the losses of rows (B, n, D).
    pub fn loss(&self, x: &T, labels: &[u32]) -> Result<f64> {
        let logits = self.logits(x)?;
        match self.loss_on_host(None) {
            Some(loss) => Ok(logits.label_loss_backward(labels, loss, 1.0)?.0.cross_entropy),
            None => T::logit_cross_entropy(&logits, labels, None),
        }
    }

    /// The loss, if the host computes it.
    fn loss_on_host<'a>(&self, class_factors: Option<&'a [f64]>) -> Option<LabelLoss<'a>> {
        match self.problem {
            Problem::Number => Some(LabelLoss::SquaredError),
            Problem::LabelSet => Some(LabelLoss::Binary(class_factors.unwrap_or_default())),
            Problem::OneLabel => class_factors.map(LabelLoss::CrossEntropy),
        }
    }

    /// Loss sums of rows (B, n, D), and the gradient of the rows. Gradients are multiplied by `scale`.
    pub fn backward(
        &self,
        x: &T,
        (labels, class_factors): (&[u32], Option<&[f64]>),
        (scale, token_loss): (f64, TokenLoss),
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<(LossSums, T)> {
        let [before, between] = [0, 1].map(|layer| self.dropout_of(noise, layer));
        let x = T::dropout(x, before.as_ref())?;
        let (hidden, dropped) = match &self.dense {
            Some(dense) => {
                let hidden = dense.forward(&x)?.tanh()?;
                let dropped = T::dropout(&hidden, between.as_ref())?;
                (Some(hidden), dropped)
            }
            None => (None, x.clone()),
        };
        let logits = self.out.forward(&dropped)?;
        let (losses, dlogits) = match self.loss_on_host(class_factors) {
            Some(loss) => logits.label_loss_backward(labels, loss, scale)?,
            None => T::logit_cross_entropy_backward(logits, labels, scale, token_loss, None)?,
        };
        let mut dx = self.out.backward(&dropped, &dlogits, grads)?;
        if let (Some(dense), Some(hidden)) = (&self.dense, hidden) {
            let dhidden = T::dropout(&dx, between.as_ref())?;
            dx = dense.backward(&x, &hidden.tanh_backward(&dhidden)?, grads)?;
        }
        Ok((losses, T::dropout(&dx, before.as_ref())?))
    }

    /// The dropout before a layer. A pass without the model's dropout has none here.
    fn dropout_of<'a>(&self, noise: &Noise<'a>, layer: u32) -> Option<Dropout<'a>> {
        let dropout = if noise.dropout > 0.0 { self.dropout } else { 0.0 };
        Noise { dropout, ..*noise }.dropout(classifier_site(layer))
    }
}
