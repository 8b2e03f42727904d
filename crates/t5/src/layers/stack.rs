//! The encoder or the decoder: embedding, blocks with one shared position bias or one each, final norm.
//!
//! The stack does not order its parts. [`crate::step`] decides in which order micro-batches go through them.

use candle_core::DType;
use t5_ops::RelativePosition;

use super::Weights;
use super::block::Block;
use super::norm::Norm;
use crate::context::{DropoutSite, Noise, site};
use crate::description::Positions;
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
    /// Factor of the embedding's rows.
    embedding_scale: f64,
    embedding_site: u32,
    final_site: u32,
}

impl<T: Ops> Stack<T> {
    pub fn new(weights: &Weights<T>, decoder: bool) -> Result<Self> {
        let config = weights.config;
        let stack = config.stack(decoder);
        let table = |block| match config.block(decoder, block).own.positions {
            Positions::Bias { table } => table,
            Positions::Rotary { .. } | Positions::None => None,
        };
        // A decoder that is not there has no norm, and never asks for one.
        let norm = if stack.blocks == 0 { config.stack(false).final_norm } else { stack.final_norm };
        Ok(Stack {
            blocks: (0..stack.blocks).map(|block| Block::new(weights, decoder, block)).collect::<Result<_>>()?,
            tables: (0..stack.blocks).filter_map(table).map(|name| weights.get(name)).collect(),
            relative: RelativePosition {
                buckets: config.relative_attention_num_buckets,
                max_distance: config.relative_attention_max_distance,
                bidirectional: !decoder,
            },
            final_norm: Norm::new(weights, &norm, stack.norm),
            embedding_scale: stack.embedding_scale,
            embedding_site: site(decoder, None, DropoutSite::Embedding),
            final_site: site(decoder, None, DropoutSite::FinalNorm),
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

    /// The bias in a block of `queries` positions from `first_query` on over `keys` positions, (H, queries + keys - 1), if blocks have one.
    pub fn position_bias(&self, block: usize, queries: usize, keys: usize, first_query: usize) -> Result<Option<T>> {
        let table = self.table(block);
        table.map(|table| T::relative_bias(&table.tensor, &self.relative, queries, keys, first_query)).transpose()
    }

    /// Adds the gradient of the bias of `length` positions to the gradient of the block's table.
    pub fn bias_backward(&self, block: usize, dbias: &T, length: usize, grads: &mut Gradients<T>) -> Result<()> {
        let table = self.table(block).expect("a stack with a gradient of a bias has its table");
        if let Some(dtable) = grads.accumulator(table)? {
            T::relative_bias_backward(dbias, &self.relative, length, length, &dtable)?;
        }
        Ok(())
    }

    fn table(&self, block: usize) -> Option<&Weight<T>> {
        self.tables.get(block.min(self.tables.len().saturating_sub(1)))
    }

    /// The stack's first activations (B, T, D).
    pub fn embed(&self, ids: &T, embedding: &Weight<T>, dtype: DType, noise: &Noise) -> Result<T> {
        let x = T::embedding(ids, embedding.whole(), dtype)?.scaled(self.scale_in(dtype))?;
        T::dropout(&x, noise.dropout(self.embedding_site).as_ref())
    }

    /// The factor of the embedding's rows, rounded as transformers does: it is a tensor of that dtype.
    fn scale_in(&self, dtype: DType) -> f64 {
        match dtype {
            DType::BF16 => {
                // To the nearest, ties to even.
                let bits = (self.embedding_scale as f32).to_bits();
                f64::from(f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000))
            }
            DType::F64 => self.embedding_scale,
            _ => f64::from(self.embedding_scale as f32),
        }
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
            let dx = dx.scaled(self.scale_in(dx.dtype()))?;
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
