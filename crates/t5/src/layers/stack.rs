//! The encoder or the decoder: embedding, blocks with one shared position bias, final norm.
//!
//! The parts are visible one by one (`embed`, `blocks`, `finish`, and their backward), so that a caller may
//! run all micro-batches through one block before the next.

use candle_core::{DType, Tensor};
use t5_ops::RelativePosition;

use super::attention::{SideGradients, SourceGradient};
use super::block::{Block, BlockInput, BlockSaved};
use super::norm::Norm;
use super::{Weights, dropout_backward};
use crate::config::Config;
use crate::context::{LayerContext, Place, site};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::parameters::Weight;
use crate::reach::{Keep, StackReach};

#[derive(Clone, Debug)]
pub(crate) struct Stack {
    pub blocks: Vec<Block>,
    /// Block 0's relative-position table, (buckets, H): every block uses its bias.
    pub table: Weight,
    relative: RelativePosition,
    final_norm: Norm,
    embedding_site: u32,
    final_site: u32,
}

/// What a stack keeps, each put where the caller of forward wants it: what its blocks keep, and the input of the final
/// norm (B, T, D).
#[derive(Debug)]
pub(crate) struct StackSaved<S = BlockSaved> {
    pub blocks: Vec<Option<S>>,
    pub last: Option<S>,
}

/// A stack's output (B, T, D) for a micro-batch, and what was kept of it.
pub(crate) type Output<S = BlockSaved> = (Tensor, StackSaved<S>);

impl StackSaved {
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().chain([&self.last]).flatten().map(BlockSaved::bytes).sum()
    }
}

impl Stack {
    pub fn new(weights: &Weights, config: &Config, decoder: bool) -> Result<Stack> {
        let (name, blocks) = match decoder {
            false => ("encoder", config.num_layers),
            true => ("decoder", config.num_decoder_layers),
        };
        let table = format!("{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
        let norm = format!("{name}.final_layer_norm.weight");
        Ok(Stack {
            blocks: (0..blocks).map(|block| Block::new(weights, config, decoder, block)).collect::<Result<_>>()?,
            table: weights.get(table),
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

    /// The bias of `queries` positions from `first_query` on over `keys` positions, (H, queries + keys - 1).
    pub fn position_bias(&self, queries: usize, keys: usize, first_query: usize) -> Result<Tensor> {
        Ok(t5_ops::relative_bias(&self.table.tensor, &self.relative, queries, keys, first_query)?)
    }

    /// The stack's first activations (B, T, D).
    pub fn embed(&self, ids: &Tensor, embedding: &Weight, dtype: DType, cx: &LayerContext) -> Result<Tensor> {
        let x = t5_ops::embedding(ids, &embedding.tensor, dtype)?;
        match cx.dropout(self.embedding_site) {
            None => Ok(x),
            some => Ok(t5_ops::dropout(&x, some.as_ref())?),
        }
    }

    /// Adds the gradient of the embedding's rows.
    pub fn embed_backward(
        &self,
        ids: &Tensor,
        embedding: &Weight,
        dx: Tensor,
        cx: &LayerContext,
        grads: &mut Gradients,
    ) -> Result<()> {
        if let Some(dtable) = grads.accumulator(embedding)? {
            let dx = dropout_backward(&dx, cx.dropout(self.embedding_site).as_ref())?;
            t5_ops::embedding_backward(ids, &dx, &dtable)?;
        }
        Ok(())
    }

    /// Final norm and its dropout.
    pub fn finish(&self, x: &Tensor, cx: &LayerContext) -> Result<Tensor> {
        let (n, _) = self.final_norm.forward(x)?;
        match cx.dropout(self.final_site) {
            None => Ok(n),
            some => Ok(t5_ops::dropout(&n, some.as_ref())?),
        }
    }

    /// Gradient of the last block's output; adds the final norm's.
    pub fn finish_backward(&self, x: &Tensor, dz: Tensor, cx: &LayerContext, grads: &mut Gradients) -> Result<Tensor> {
        let dn = dropout_backward(&dz, cx.dropout(self.final_site).as_ref())?;
        drop(dz);
        let (_, inv_rms) = self.final_norm.forward(x)?;
        self.final_norm.backward(x, &inv_rms, dn, None, grads)
    }

    /// Ids (B, T) of every micro-batch to the stack's output (B, T, D) for it, all of them through one block before the next,
    /// so that a block's weights are needed once. What a block keeps, or the final norm (`None`), is `put` away at once. `None`
    /// when `interrupted` said so before a micro-batch.
    #[allow(clippy::too_many_arguments, reason = "a pass needs its data, its settings and its place for what it keeps")]
    pub fn forward<S>(
        &self,
        micro_batches: &[(&Tensor, &LayerContext)],
        embedding: &Weight,
        dtype: DType,
        reach: StackReach,
        keep: &dyn Fn(usize) -> Keep,
        put: &mut dyn FnMut(Option<usize>, BlockSaved) -> Result<S>,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Output<S>>>> {
        let mut xs = Vec::with_capacity(micro_batches.len());
        for (ids, cx) in micro_batches {
            xs.push(self.embed(ids, embedding, dtype, cx)?);
        }
        t5_ops::page_out(&embedding.tensor);
        let room = || Vec::with_capacity(self.blocks.len());
        let mut saved: Vec<_> = xs.iter().map(|_| StackSaved { blocks: room(), last: None }).collect();
        for (index, block) in self.blocks.iter().enumerate() {
            block.page_in();
            if let Some(next) = self.blocks.get(index + 1) {
                next.read_ahead();
            }
            let mut ys = Vec::with_capacity(xs.len());
            for ((x, (_, cx)), saved) in xs.into_iter().zip(micro_batches).zip(&mut saved) {
                if interrupted() {
                    return Ok(None);
                }
                let (y, kept) = block.forward(x, cx, keep(index))?;
                saved.blocks.push(kept.map(|kept| put(Some(index), kept)).transpose()?);
                ys.push(y);
            }
            block.page_out();
            xs = ys;
        }
        let mut outputs = Vec::with_capacity(xs.len());
        for ((x, (_, cx)), mut saved) in xs.into_iter().zip(micro_batches).zip(saved) {
            let z = self.finish(&x, cx)?;
            let last = reach.enters_norm().then_some(BlockSaved::Input(BlockInput { x, heads: Vec::new() }));
            saved.last = last.map(|last| put(None, last)).transpose()?;
            outputs.push((z, saved));
        }
        Ok(Some(outputs))
    }

    /// [`Stack::forward`] of one micro-batch, what is kept in memory. `None` when `interrupted`, asked before every block,
    /// said so.
    #[allow(clippy::too_many_arguments, reason = "a pass needs its data, its settings and who may end it")]
    pub fn forward_one(
        &self,
        ids: &Tensor,
        embedding: &Weight,
        dtype: DType,
        cx: &LayerContext,
        reach: StackReach,
        keep: &dyn Fn(usize) -> Keep,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Output>> {
        let mut stays = |_, saved| Ok(saved);
        let outputs = self.forward(&[(ids, cx)], embedding, dtype, reach, keep, &mut stays, interrupted)?;
        Ok(outputs.and_then(|outputs| outputs.into_iter().next()))
    }

    /// [`Stack::forward_one`] for its output alone.
    pub fn output(
        &self,
        ids: &Tensor,
        embedding: &Weight,
        dtype: DType,
        cx: &LayerContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Tensor>> {
        let reach = StackReach::nothing(self.blocks.len());
        let output = self.forward_one(ids, embedding, dtype, cx, reach, &|_| Keep::Nothing, interrupted)?;
        Ok(output.map(|(z, _)| z))
    }

    /// Consumes what forward kept, block by block, adding every trained parameter's gradient. False when `interrupted`,
    /// asked before every block, said so.
    #[allow(clippy::too_many_arguments, reason = "a pass needs its data, its settings and its three outputs")]
    pub fn backward(
        &self,
        ids: &Tensor,
        embedding: &Weight,
        saved: StackSaved,
        dz: Tensor,
        cx: &LayerContext,
        reach: StackReach,
        source: &mut SourceGradient,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let Some(BlockSaved::Input(BlockInput { x: last, .. })) = saved.last else { return Ok(true) };
        let mut dx = self.finish_backward(&last, dz, cx, grads)?;
        drop(last);
        let dbias = match grads.trains(&self.table) {
            true => Some(cx.bias.zeros_like()?),
            false => None,
        };
        let mut side = SideGradients { bias: dbias.as_ref(), source };
        for (index, (block, saved)) in self.blocks.iter().zip(saved.blocks).enumerate().rev() {
            let Some(saved) = saved else { break };
            if interrupted() {
                return Ok(false);
            }
            match block.backward(saved, dx, cx, &mut side, reach.passes_block(index), grads)? {
                Some(below) => dx = below,
                None => return self.bias_backward(dbias, ids, grads).map(|()| true),
            }
        }
        self.bias_backward(dbias, ids, grads)?;
        if reach.enters_embedding() {
            self.embed_backward(ids, embedding, dx, cx, grads)?;
        }
        Ok(true)
    }

    /// Adds the gradient of the bias of a micro-batch to that of the table.
    pub fn bias_backward(&self, dbias: Option<Tensor>, ids: &Tensor, grads: &mut Gradients) -> Result<()> {
        if let (Some(dbias), Some(dtable)) = (dbias, grads.accumulator(&self.table)?) {
            let length = ids.dim(1)?;
            t5_ops::relative_bias_backward(&dbias, &self.relative, length, length, 0, &dtable)?;
        }
        Ok(())
    }
}
