//! One block: self attention, in the decoder cross attention, feed-forward.

use candle_core::Tensor;

use super::attention::{Attention, AttentionSaved, SideGradients, SourceGradient};
use super::feed_forward::{FeedForward, FeedForwardSaved};
use super::{Weights, bytes};
use crate::config::Config;
use crate::context::LayerContext;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::reach::Keep;

#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub attention: Attention,
    /// In the decoder.
    pub cross: Option<Attention>,
    pub feed_forward: FeedForward,
}

/// What a block keeps.
#[derive(Debug)]
pub(crate) enum BlockSaved {
    /// Its input (B, T, D) only: backward runs forward again.
    Input(Tensor),
    /// Everything that its layers keep.
    Layers { attention: AttentionSaved, cross: Option<AttentionSaved>, feed_forward: FeedForwardSaved },
}

impl BlockSaved {
    pub fn bytes(&self) -> u64 {
        match self {
            BlockSaved::Input(x) => bytes(&[x]),
            BlockSaved::Layers { attention, cross, feed_forward } => {
                attention.bytes() + cross.as_ref().map_or(0, AttentionSaved::bytes) + feed_forward.bytes()
            }
        }
    }
}

impl Block {
    pub fn new(weights: &Weights, config: &Config, decoder: bool, block: usize) -> Result<Block> {
        let prefix = format!("{}.block.{block}.layer", if decoder { "decoder" } else { "encoder" });
        let attention = |layer: usize, cross: bool| {
            Attention::new(weights, config, &format!("{prefix}.{layer}"), decoder, cross, block)
        };
        let last = if decoder { 2 } else { 1 };
        Ok(Block {
            attention: attention(0, false),
            cross: decoder.then(|| attention(1, true)),
            feed_forward: FeedForward::new(weights, config, &format!("{prefix}.{last}"), decoder, block)?,
        })
    }

    /// `x` is (B, T, D).
    pub fn forward(&self, x: Tensor, cx: &LayerContext, keep: Keep) -> Result<(Tensor, Option<BlockSaved>)> {
        let input = (keep == Keep::Input).then(|| BlockSaved::Input(x.clone()));
        let keep = keep == Keep::Everything;
        let (mut x, attention) = self.attention.forward(x, cx, keep)?;
        let mut cross = None;
        if let Some(layer) = &self.cross {
            (x, cross) = layer.forward(x, cx, keep)?;
        }
        let (y, feed_forward) = self.feed_forward.forward(x, cx, keep)?;
        let saved = match (attention, feed_forward) {
            (Some(attention), Some(feed_forward)) => Some(BlockSaved::Layers { attention, cross, feed_forward }),
            _ => input,
        };
        Ok((y, saved))
    }

    /// Forward again, as far as backward needs it. Masks come from a counter, so the bits are the same.
    fn recompute(&self, x: Tensor, cx: &LayerContext) -> Result<BlockSaved> {
        let (mut x, attention) = self.attention.forward(x, cx, true)?;
        let mut cross = None;
        if let Some(layer) = &self.cross {
            (x, cross) = layer.forward(x, cx, true)?;
        }
        let attention = attention.expect("attention was asked to keep");
        Ok(BlockSaved::Layers { attention, cross, feed_forward: self.feed_forward.recompute(x)? })
    }

    /// Adds the weights' gradients. Returns the gradient of the block's input where `wanted`, and enters
    /// no layer below which nothing is wanted.
    pub fn backward(
        &self,
        saved: BlockSaved,
        dy: Tensor,
        cx: &LayerContext,
        side: &mut SideGradients,
        wanted: bool,
        grads: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let (attention, cross, feed_forward) = match saved {
            BlockSaved::Input(x) => return self.backward(self.recompute(x, cx)?, dy, cx, side, wanted, grads),
            BlockSaved::Layers { attention, cross, feed_forward } => (attention, cross, feed_forward),
        };
        let into_attention = wanted || side.bias.is_some() || self.attention.is_trained(grads);
        let into_cross = into_attention
            || matches!(side.source, SourceGradient::Wanted(_))
            || self.cross.as_ref().is_some_and(|cross| cross.is_trained(grads));
        let into_first = if self.cross.is_some() { into_cross } else { into_attention };

        let Some(mut dx) = self.feed_forward.backward(feed_forward, dy, cx, into_first, grads)? else {
            return Ok(None);
        };
        if let (Some(layer), Some(cross)) = (&self.cross, cross) {
            match layer.backward(cross, dx, cx, side, into_attention, grads)? {
                Some(below) => dx = below,
                None => return Ok(None),
            }
        }
        self.attention.backward(attention, dx, cx, side, wanted, grads)
    }
}
