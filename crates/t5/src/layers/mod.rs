//! The layers of a T5, each with an explicit forward and backward.
//!
//! `forward` takes its input by value and returns the output and, when asked to keep it, a `Saved` that
//! holds exactly what backward needs; `backward` consumes it and frees every tensor after its last use.
//! Layers are written over [`crate::ops::Ops`]: run on tensors they compute, run on counted tensors they say what they hold.
//!
//! What is kept is what is dear to compute again. Norms, dropout masks and activations of the
//! feed-forward layer are recomputed from what is kept, at the price of one pass over memory each.
//!
//! Shapes: B batch, T length of this stack, S length of the source, H heads, K head size, D model size,
//! F feed-forward size.

pub(crate) mod attention;
pub(crate) mod block;
pub(crate) mod feed_forward;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod stack;

use crate::config::Config;
use crate::parameters::{Comes, Parameter, Weight};
use linear::{Adapter, Linear};

/// Hands parameters to layers by name while a model is put together.
pub(crate) struct Weights<'a, T> {
    pub parameters: &'a [Parameter<T>],
    /// Of some parameters, by their places, a copy for products; empty where there are none.
    pub copies: &'a [Option<T>],
    pub config: &'a Config,
    /// [`crate::LayerMajor::weights_by_matrix`].
    pub by_matrix: bool,
}

impl<T: Clone> Weights<'_, T> {
    /// # Panics
    /// For a name that [`crate::ParameterSpec::all`] does not list: the two describe one model.
    pub fn get(&self, name: String) -> Weight<T> {
        let index = self.parameters.iter().position(|p| p.name == name);
        let index = index.unwrap_or_else(|| panic!("`{name}` is not a parameter of this model"));
        let Parameter { tensor, quantisation, part, name } = &self.parameters[index];
        let trains = self.config.lora.as_ref().is_some_and(|lora| lora.trains(name));
        let comes = if self.by_matrix && !trains { Comes::apart(*part, self.config) } else { Comes::Together };
        let copy = self.copies.get(index).cloned().flatten();
        Weight { index, tensor: tensor.clone(), copy, quantisation: *quantisation, comes }
    }

    /// The linear layer of this name, without `.weight`. `site` is the place of its adapter's dropout.
    ///
    /// # Panics
    /// As [`Weights::get`].
    pub fn linear(&self, name: &str, site: u32) -> Linear<T> {
        self.linear_with(self.get(format!("{name}.weight")), name, site)
    }

    /// A linear layer of this name with a weight that may have another.
    pub fn linear_with(&self, weight: Weight<T>, name: &str, site: u32) -> Linear<T> {
        let lora = self.config.lora.as_ref();
        let adapter = lora.and_then(|lora| Some((lora, lora.of(name)?))).map(|(lora, linear)| Adapter {
            a: self.get(format!("{name}.lora_A.weight")),
            b: self.get(format!("{name}.lora_B.weight")),
            magnitude: lora.dora.then(|| self.get(format!("{name}.lora_magnitude_vector"))),
            lora: linear,
            site,
        });
        Linear { weight, adapter }
    }
}
