//! One block: self attention, in the decoder cross attention, feed-forward.

use super::Weights;
use super::attention::{Attention, AttentionKept, AttentionSaved, Heads, SideGradients, SourceGradient};
use super::feed_forward::{FeedForward, FeedForwardSaved};
use super::linear::Linear;
use crate::context::LayerContext;
use crate::description::AttentionDescription;
use crate::error::Result;
use crate::gradients::Gradients;
use crate::ops::Ops;
use crate::reach::Keep;

#[derive(Clone, Debug)]
pub(crate) struct Block<T> {
    pub attention: Attention<T>,
    /// Cross attention, in the decoder.
    pub cross: Option<Attention<T>>,
    pub feed_forward: FeedForward<T>,
}

/// The tensors from which forward runs again.
#[derive(Clone, Debug)]
pub(crate) struct BlockInput<T> {
    /// The block's input (B, T, D).
    pub x: T,
    /// The outputs of the block's attentions, in their order, if they were kept.
    pub heads: Vec<Heads<T>>,
}

/// Saved activations of a block: tensors, or the places in a file where they were put.
#[derive(Clone, Debug)]
pub(crate) enum BlockSaved<T> {
    /// The tensors from which backward runs forward again.
    Input(BlockInput<T>),
    /// Everything that the block's layers keep.
    Layers { attention: AttentionSaved<T>, cross: Option<AttentionSaved<T>>, feed_forward: FeedForwardSaved<T> },
}

impl<T> BlockSaved<T> {
    /// The block's input.
    pub fn x(&self) -> &T {
        match self {
            BlockSaved::Input(BlockInput { x, .. }) => x,
            BlockSaved::Layers { attention, .. } => &attention.x,
        }
    }

    /// The block's tensors; the first is its input.
    pub fn tensors(&self) -> Vec<&T> {
        match self {
            BlockSaved::Input(BlockInput { x, heads }) => {
                std::iter::once(x).chain(heads.iter().flat_map(Heads::tensors)).collect()
            }
            BlockSaved::Layers { attention, cross, feed_forward } => {
                let cross = cross.iter().flat_map(AttentionSaved::tensors);
                attention.tensors().chain(cross).chain(feed_forward.tensors()).collect()
            }
        }
    }

    /// Applies `f` to each tensor, in the order of [`BlockSaved::tensors`].
    pub fn try_map<U>(self, f: &mut dyn FnMut(T) -> Result<U>) -> Result<BlockSaved<U>> {
        Ok(match self {
            BlockSaved::Input(BlockInput { x, heads }) => {
                let x = f(x)?;
                let heads = heads.into_iter().map(|heads| heads.try_map(f)).collect::<Result<_>>()?;
                BlockSaved::Input(BlockInput { x, heads })
            }
            BlockSaved::Layers { attention, cross, feed_forward } => BlockSaved::Layers {
                attention: attention.try_map(f)?,
                cross: cross.map(|cross| cross.try_map(f)).transpose()?,
                feed_forward: feed_forward.try_map(f)?,
            },
        })
    }
}

impl<T: Ops> Block<T> {
    pub fn new(weights: &Weights<T>, decoder: bool, block: usize) -> Result<Self> {
        let description = weights.config.block(decoder, block);
        let attention = |of: &AttentionDescription| Attention::new(weights, of, decoder, block);
        Ok(Block {
            attention: attention(&description.own),
            cross: description.cross.as_ref().map(attention),
            feed_forward: FeedForward::new(weights, &description.feed_forward, decoder, block)?,
        })
    }

    /// The linear layers of the block.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<T>> {
        let cross = self.cross.iter().flat_map(Attention::linears);
        self.attention.linears().chain(cross).chain(self.feed_forward.linears())
    }

    /// The block's output. `x` is (B, T, D).
    pub fn forward(&self, x: T, cx: &LayerContext<T>, keep: Keep) -> Result<(T, Option<BlockSaved<T>>)> {
        let input = matches!(keep, Keep::Input | Keep::Heads).then(|| x.clone());
        let (mut x, attention) = self.attention.forward(x, cx, keep)?;
        let mut cross = AttentionKept::Nothing;
        if let Some(layer) = &self.cross {
            (x, cross) = layer.forward(x, cx, keep)?;
        }
        let (y, feed_forward) = self.feed_forward.forward(x, cx, keep == Keep::Everything)?;
        let saved = match (attention, cross, feed_forward) {
            (AttentionKept::Everything(attention), cross, Some(feed_forward)) => {
                let cross = if let AttentionKept::Everything(cross) = cross { Some(cross) } else { None };
                Some(BlockSaved::Layers { attention, cross, feed_forward })
            }
            (attention, cross, _) => input.map(|x| {
                let heads = [attention, cross].into_iter();
                let heads =
                    heads.filter_map(|kept| if let AttentionKept::Heads(kept) = kept { Some(kept) } else { None });
                BlockSaved::Input(BlockInput { x, heads: heads.collect() })
            }),
        };
        Ok((y, saved))
    }

    /// Runs forward again, as far as backward needs it. Masks come from a counter, so the bits are the same.
    fn recompute(&self, input: BlockInput<T>, cx: &LayerContext<T>) -> Result<BlockSaved<T>> {
        let mut heads = input.heads.into_iter();
        let (mut x, attention) = self.attention.recompute(input.x, cx, heads.next())?;
        let mut cross = None;
        if let Some(layer) = &self.cross {
            let (y, saved) = layer.recompute(x, cx, heads.next())?;
            (x, cross) = (y, Some(saved));
        }
        Ok(BlockSaved::Layers { attention, cross, feed_forward: self.feed_forward.recompute(x, cx)? })
    }

    /// Adds the weights' gradients. Returns the gradient of the block's input where `wanted`. Does not enter
    /// a layer below which no gradient is wanted.
    pub fn backward(
        &self,
        saved: BlockSaved<T>,
        dy: T,
        cx: &LayerContext<T>,
        side: &mut SideGradients<T>,
        wanted: bool,
        grads: &mut Gradients<T>,
    ) -> Result<Option<T>> {
        let (attention, cross, feed_forward) = match saved {
            BlockSaved::Input(input) => return self.backward(self.recompute(input, cx)?, dy, cx, side, wanted, grads),
            BlockSaved::Layers { attention, cross, feed_forward } => (attention, cross, feed_forward),
        };
        let to_source = matches!(side.source, SourceGradient::Wanted(_));
        let into_attention = wanted
            || side.bias.is_some()
            || (to_source && self.attention.sees_source())
            || self.attention.is_trained(grads);
        let into_cross =
            into_attention || to_source || self.cross.as_ref().is_some_and(|cross| cross.is_trained(grads));
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
