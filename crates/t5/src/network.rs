//! The layers of a T5 put together: both stacks, the shared table and the head.

use crate::config::Config;
use crate::context::{Noise, StepContext, adapter_site};
use crate::error::Result;
use crate::layers::Weights;
use crate::layers::linear::Linear;
use crate::layers::stack::Stack;
use crate::micro_batch::MicroBatch;
use crate::ops::Ops;
use crate::parameters::{Parameter, Weight};
use crate::step::gradients::Gradients;

/// Every layer of a model, over tensors or counted tensors.
#[derive(Debug)]
pub(crate) struct Network<T> {
    pub shared: Weight<T>,
    pub encoder: Stack<T>,
    pub decoder: Stack<T>,
    pub head: Linear<T>,
    logit_scale: f64,
}

impl<T: Ops> Network<T> {
    /// The network of these parameters, in the order of [`crate::ParameterSpec::all`].
    ///
    /// # Errors
    /// An activation that is not known.
    pub fn new(config: &Config, parameters: &[Parameter<T>]) -> Result<Self> {
        let weights = Weights { parameters, lora: config.lora.as_ref() };
        let shared = weights.get("shared.weight".into());
        let table = if config.tie_word_embeddings { shared.clone() } else { weights.get("lm_head.weight".into()) };
        let head = weights.linear_with(table, "lm_head", adapter_site(true, None, 0));
        let (encoder, decoder) = (Stack::new(&weights, config, false)?, Stack::new(&weights, config, true)?);
        Ok(Network { shared, encoder, decoder, head, logit_scale: config.logit_scale() })
    }

    /// One of the two stacks.
    pub fn stack(&self, decoder: bool) -> &Stack<T> {
        if decoder { &self.decoder } else { &self.encoder }
    }

    /// The position bias of a stack's block for a micro-batch.
    pub fn bias_of(&self, batch: &MicroBatch<T>, decoder: bool, block: usize) -> Result<T> {
        let length = batch.ids(decoder).dims()[1];
        self.stack(decoder).position_bias(block, length, length, 0)
    }

    /// Loss sum, without gradients, of the decoder's output (B, T, D).
    pub fn loss(&self, z: &T, labels: &[u32], chunk_rows: usize) -> Result<f64> {
        let settings = self.cross_entropy(1.0, chunk_rows);
        T::linear_cross_entropy(&z.as_rows()?, &self.head.weight.tensor, labels, &settings)
    }

    /// Loss sum and gradient of the decoder's output (B, T, D); logits exist a chunk of rows at a time.
    pub fn head_backward(&self, z: T, labels: &[u32], cx: &StepContext, grads: &mut Gradients<T>) -> Result<(f64, T)> {
        let settings = self.cross_entropy(1.0 / cx.target_tokens.max(1) as f64, cx.loss_chunk_rows);
        let dw = grads.accumulator_or_empty(&self.head.weight)?;
        let dw = dw.as_ref().map(|(dw, accumulate)| (dw, *accumulate));
        let rows = z.as_rows()?; // (B T, D)
        let (loss, drows) = T::linear_cross_entropy_backward(&rows, &self.head.weight.tensor, labels, &settings, dw)?;
        Ok((loss, drows.shaped(z.dims())?))
    }

    fn cross_entropy(&self, gradient_scale: f64, chunk_rows: usize) -> t5_ops::CrossEntropy {
        t5_ops::CrossEntropy { logit_scale: self.logit_scale, gradient_scale, chunk_rows: chunk_rows.max(1) }
    }

    /// Logits (.., V) of decoder outputs (.., D).
    pub fn logits(&self, z: &T) -> Result<T> {
        self.head.forward(&z.scaled(self.logit_scale)?, &Noise::NONE)
    }
}
