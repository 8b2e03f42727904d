//! [`Vectors`]: the vectors of texts, by an encoder and the modules behind it.

use candle_core::DType;
use t5::T5;

use crate::failure::Outcome;
use crate::files::sentence_transformers::{Dense, Modules};

/// How vectors are made with an encoder.
#[derive(Debug)]
pub struct Vectors {
    /// How its output becomes a vector.
    pub modules: Modules,
    /// A linear layer behind the pooling.
    pub dense: Option<Dense>,
    /// Dtype of activations.
    pub activations: DType,
}

impl Vectors {
    /// The numbers of a vector.
    pub fn width(&self, config: &t5::Config) -> usize {
        self.dense.as_ref().map_or(config.vector_width(), Dense::width)
    }

    /// Bytes of the linear layer.
    pub fn bytes(&self) -> u64 {
        self.dense.as_ref().map_or(0, Dense::bytes)
    }

    /// The vectors of a batch of sources, one after the other. `between` is called before every block.
    pub fn compute(&self, model: &T5, sources: &[&[u32]], between: &dyn Fn()) -> Outcome<Vec<f32>> {
        let Modules { pooling, normalizes, .. } = self.modules;
        let Some(dense) = &self.dense else {
            return Ok(model.vectors(sources, pooling, normalizes, self.activations, between)?);
        };
        let mut made = dense.forward(&model.vectors(sources, pooling, false, self.activations, between)?)?;
        made.chunks_mut(dense.width()).filter(|_| normalizes).for_each(normalize);
        Ok(made)
    }
}

/// Scales a vector to length 1.
pub fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt().max(1e-12);
    vector.iter_mut().for_each(|value| *value /= length);
}
