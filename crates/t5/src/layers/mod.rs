//! The layers of a T5, each with an explicit forward and backward.
//!
//! `forward` takes its input by value and returns the output and, when asked to keep it, a `Saved` that
//! holds exactly the tensors that backward needs. `backward` consumes them and frees every tensor after its last use.
//! Layers are written over [`crate::ops::Ops`]: on tensors they compute, on counted tensors they count the bytes that they hold.
//!
//! A layer keeps the tensors that are expensive to compute again. Norms, dropout masks and activations of the
//! feed-forward layer are recomputed from the kept tensors, at the price of one pass over memory each.
//!
//! Shapes: B batch, T length of this stack, S length of the source, H heads, K head size, D model size,
//! F feed-forward size.

pub(crate) mod attention;
pub(crate) mod block;
pub(crate) mod classifier;
pub(crate) mod feed_forward;
pub(crate) mod linear;
pub(crate) mod logit_head;
pub(crate) mod norm;
pub(crate) mod residual;
pub(crate) mod stack;

use crate::config::Config;
use crate::parameters::{PagingGranularity, Parameter, Weight};
use linear::{Adapter, Linear};

/// Hands parameters to layers by name while a model is built.
pub(crate) struct Weights<'a, T> {
    pub parameters: &'a [Parameter<T>],
    /// Copies of parameters for products, by parameter index, where there is one. Empty without copies.
    pub copies: &'a [Option<T>],
    pub config: &'a Config,
    /// [`crate::LayerMajor::weights_by_matrix`].
    pub by_matrix: bool,
}

impl<T: Clone> Weights<'_, T> {
    /// The parameter of this name.
    ///
    /// # Panics
    /// For a name that [`crate::ParameterSpec::all`] does not list: the two describe one model.
    pub fn get(&self, name: String) -> Weight<T> {
        let index = self.parameters.iter().position(|p| p.name == name);
        let index = index.unwrap_or_else(|| panic!("`{name}` is not a parameter of this model"));
        let Parameter { tensor, quantisation, part, name } = &self.parameters[index];
        let trains = self.config.lora.as_ref().is_some_and(|lora| lora.trains(name));
        let paging = if self.by_matrix && !trains {
            PagingGranularity::apart(*part, self.config)
        } else {
            PagingGranularity::Together
        };
        let copy = self.copies.get(index).cloned().flatten();
        Weight { index, tensor: tensor.clone(), copy, quantisation: *quantisation, paging }
    }

    /// The linear layer of this name, without `.weight`. `site` is the place of its adapter's dropout.
    ///
    /// # Panics
    /// As [`Weights::get`].
    pub fn linear(&self, name: &str, site: u32) -> Linear<T> {
        self.linear_with(self.get(format!("{name}.weight")), name, site)
    }

    /// A linear layer of this name. Its weight may have another name.
    pub fn linear_with(&self, weight: Weight<T>, name: &str, site: u32) -> Linear<T> {
        let lora = self.config.lora.as_ref();
        let adapter = lora.and_then(|lora| Some((lora, lora.linear(name)?))).map(|(lora, linear)| Adapter {
            a: self.get(format!("{name}.lora_A.weight")),
            b: self.get(format!("{name}.lora_B.weight")),
            magnitude: lora.dora.then(|| self.get(format!("{name}.lora_magnitude_vector"))),
            lora: linear,
            site,
        });
        Linear { weight, adapter }
    }
}
