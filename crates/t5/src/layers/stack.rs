//! The encoder or the decoder: embedding, blocks with one shared position bias or one each, final norm.
//!
//! The stack does not order its parts. [`crate::step`] decides in which order micro-batches go through them.

use candle_core::DType;
use t5_ops::RelativePosition;

use super::Weights;
use super::block::Block;
use super::norm::Norm;
use crate::config::Config;
use crate::context::{Noise, Place, site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;
use crate::parameters::Weight;

#[derive(Clone, Debug)]
pub(crate) struct Stack<T> {
    pub blocks: Vec<Block<T>>,
    /// Relative-position tables, (buckets, H): block 0's alone, whose bias every block uses, or one of each block.
    tables: Vec<Weight<T>>,
    relative: RelativePosition,
    final_norm: Norm<T>,
    embedding_site: u32,
    final_site: u32,
}

impl<T: Ops> Stack<T> {
    pub fn new(weights: &Weights<T>, config: &Config, decoder: bool) -> Result<Self> {
        let (name, blocks) = match decoder {
            false => ("encoder", config.num_layers),
            true => ("decoder", config.num_decoder_layers),
        };
        let tables = if config.family.has_a_table_in_every_block() { blocks } else { blocks.min(1) };
        let table =
            |block| weights.get(format!("{name}.block.{block}.layer.0.SelfAttention.relative_attention_bias.weight"));
        // A decoder that is not there has no norm, and never asks for one.
        let norm = format!("{}.final_layer_norm.weight", if blocks == 0 { "encoder" } else { name });
        Ok(Stack {
            blocks: (0..blocks).map(|block| Block::new(weights, config, decoder, block)).collect::<Result<_>>()?,
            tables: (0..tables).map(table).collect(),
            relative: RelativePosition {
                buckets: config.relative_attention_num_buckets,
                max_distance: config.relative_attention_max_distance,
                bidirectional: !decoder,
            },
            final_norm: Norm { weight: weights.get(norm), epsilon: config.layer_norm_epsilon },
            embedding_site: site(decoder, None, Place::Embedding),
            final_site: site(decoder, None, Place::FinalNorm),
        })
    }

    /// Whether each block has a bias of its own, rather than block 0's.
    pub fn has_own_biases(&self) -> bool {
        self.tables.len() > 1
    }

    /// Whether each table is trained: block 0's alone, which all blocks share, or one of each block.
    pub fn trained_tables(&self, grads: &Gradients<T>) -> Vec<bool> {
        self.tables.iter().map(|table| grads.trains(table)).collect()
    }

    /// The bias in a block of `queries` positions from `first_query` on over `keys` positions, (H, queries + keys - 1).
    pub fn position_bias(&self, block: usize, queries: usize, keys: usize, first_query: usize) -> Result<T> {
        T::relative_bias(&self.table(block).tensor, &self.relative, queries, keys, first_query)
    }

    /// Adds the gradient of the bias of `length` positions to the gradient of the block's table.
    pub fn bias_backward(&self, block: usize, dbias: &T, length: usize, grads: &mut Gradients<T>) -> Result<()> {
        if let Some(dtable) = grads.accumulator(self.table(block))? {
            T::relative_bias_backward(dbias, &self.relative, length, length, &dtable)?;
        }
        Ok(())
    }

    fn table(&self, block: usize) -> &Weight<T> {
        &self.tables[block.min(self.tables.len() - 1)]
    }

    /// The stack's first activations (B, T, D).
    pub fn embed(&self, ids: &T, embedding: &Weight<T>, dtype: DType, noise: &Noise) -> Result<T> {
        let x = T::embedding(ids, embedding.whole(), dtype)?;
        T::dropout(&x, noise.dropout(self.embedding_site).as_ref())
    }

    /// Adds the gradient of the embedding's rows.
    pub fn embed_backward(
        &self,
        ids: &T,
        embedding: &Weight<T>,
        dx: T,
        noise: &Noise,
        grads: &mut Gradients<T>,
    ) -> Result<()> {
        if let Some(dtable) = grads.accumulator(embedding)? {
            let dx = T::dropout(&dx, noise.dropout(self.embedding_site).as_ref())?;
            T::embedding_backward(ids, &dx, &dtable)?;
        }
        Ok(())
    }

    /// Final norm and its dropout.
    pub fn finish(&self, x: &T, noise: &Noise) -> Result<T> {
        let (n, _) = self.final_norm.forward(x)?;
        T::dropout(&n, noise.dropout(self.final_site).as_ref())
    }

    /// Gradient of the last block's output. Adds the gradient of the final norm's weight.
    pub fn finish_backward(&self, x: &T, dz: T, noise: &Noise, grads: &mut Gradients<T>) -> Result<T> {
        let dn = T::dropout(&dz, noise.dropout(self.final_site).as_ref())?;
        drop(dz);
        let (_, inv_rms) = self.final_norm.forward(x)?;
        self.final_norm.backward(x, &inv_rms, dn, None, grads)
    }
}
