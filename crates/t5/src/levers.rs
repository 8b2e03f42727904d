//! The levers of a step: how it trades time for memory. None changes the mathematics.
//!
//! They are defined here once. A planner chooses the values, a trainer follows them, and checkpoints and metrics record
//! them under these names.

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::parameters::Part;

/// How a step is cut, and which tensors are recomputed instead of kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Levers {
    /// The most samples of one micro-batch.
    pub micro_batch_samples: usize,
    /// The number of blocks, from the first, that keep only their input and run forward again in backward. Layer by layer, all
    /// blocks do so if backward goes through any of them twice.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time in the loss.
    pub loss_chunk_rows: usize,
    /// Layer after layer. `None`: one micro-batch through all blocks, then the next, so that the gradients of all
    /// parameters exist together.
    #[serde(default)]
    pub layer_major: Option<LayerMajor>,
    /// Whether a device holds the weights of products a second time, in bf16, so that no product casts them
    /// ([`T5::hold_copies`](crate::T5::hold_copies)).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weight_copies: bool,
    /// Whether a card records micro-batches that repeat, so that each is a few launches
    /// ([`T5::repeat_micro_batches`](crate::T5::repeat_micro_batches)).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeats: bool,
}

/// Accumulates all micro-batches of one layer before the next, with the optimizer inside backward. The fields say how to spend memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerMajor {
    /// Of the blocks that backward visits last, how many keep their gradients from the pass that takes the norm, instead of
    /// computing them again. 0 holds least; with all blocks there is no second pass.
    pub kept_gradient_blocks: usize,
    /// Whether attention outputs are kept beside block inputs instead of being computed again.
    #[serde(default)]
    pub heads_kept: bool,
    /// Whether saved activations lie in a file instead of memory.
    pub boundaries_on_disk: bool,
    /// Of the blocks that backward visits first, how many keep their saved activations in memory although the others lie
    /// in a file. They are gone before the gradients of the last blocks exist.
    #[serde(default)]
    pub blocks_in_memory: usize,
    /// Whether gradients that are not kept wait in a file instead of being computed again.
    pub gradients_on_disk: bool,
    /// Whether the weights lie in a file ([`T5::move_weights`](crate::T5::move_weights)). Memory holds those of one block at a
    /// time.
    #[serde(default)]
    pub weights_on_disk: bool,
    /// How many blocks keep their weights in memory although the others' lie in a file. Only for weights that are not trained.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub weight_blocks_in_memory: usize,
    /// Whether weights in a file are read apart: a block's for one product at a time, tables of the vocabulary by rows.
    /// Only for weights that are not trained.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weights_by_matrix: bool,
    /// Whether the optimizer's moments lie in a file, some rows at a time in memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optimizer_on_disk: bool,
    /// With a device: whether the host's memory takes the place of the files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_host_memory: bool,
    /// Whether a block's gradients that are sent to other processes, and its weights that come from them, have memory of their own. Another
    /// block is then computed meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlaps: bool,
    /// Whether copies to a device and from it overlap with computation. They then have memory of their own there: the next block's
    /// weights, the gradients of the one before, saved activations of another micro-batch.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copies_overlap: bool,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl LayerMajor {
    /// Everything in memory, and no gradient kept.
    pub const PLAIN: LayerMajor = LayerMajor {
        kept_gradient_blocks: 0,
        heads_kept: false,
        boundaries_on_disk: false,
        blocks_in_memory: 0,
        gradients_on_disk: false,
        weights_on_disk: false,
        weight_blocks_in_memory: 0,
        weights_by_matrix: false,
        optimizer_on_disk: false,
        in_host_memory: false,
        overlaps: false,
        copies_overlap: false,
    };

    /// Whether a part keeps its weights in memory if `blocks` blocks do. Blocks of the decoder are kept first, because each token of
    /// an answer needs them. In each stack the last block is kept first.
    pub fn keeps_weights(blocks: usize, part: Part, config: &Config) -> bool {
        let turn = match part {
            Part::Decoder { block } => config.num_decoder_layers - 1 - block,
            Part::Encoder { block } => config.num_decoder_layers + config.num_layers - 1 - block,
            _ => return false,
        };
        turn < blocks
    }

    /// Whether backward goes through any of `blocks` blocks a second time. If so, forward keeps no more than their inputs.
    pub fn goes_twice(&self, blocks: usize) -> bool {
        !self.gradients_on_disk && self.kept_gradient_blocks < blocks
    }
}

impl Levers {
    /// Micro-batches of a batch of `samples` samples.
    pub fn micro_batches(&self, samples: usize) -> usize {
        samples.div_ceil(self.micro_batch_samples.max(1))
    }

    /// Whether anything lies in a file instead of memory.
    pub fn uses_files(&self) -> bool {
        self.keeps_anything_elsewhere() && !self.has_host_memory()
    }

    /// Whether anything lies in a file, or in the host's memory beside a device.
    pub fn keeps_anything_elsewhere(&self) -> bool {
        let is_elsewhere = |layers: &LayerMajor| {
            let activations_or_gradients = layers.boundaries_on_disk || layers.gradients_on_disk;
            activations_or_gradients || layers.weights_on_disk || layers.optimizer_on_disk
        };
        self.layer_major.as_ref().is_some_and(is_elsewhere)
    }

    /// With a device: whether the host's memory takes the place of the files.
    pub fn has_host_memory(&self) -> bool {
        self.layer_major.is_some_and(|layers| layers.in_host_memory)
    }

    /// Whether copies to a device and from it overlap with computation.
    pub fn copies_overlap(&self) -> bool {
        self.layer_major.is_some_and(|layers| layers.copies_overlap)
    }

    /// Whether the optimizer's moments lie in a file.
    pub fn has_optimizer_on_disk(&self) -> bool {
        self.layer_major.is_some_and(|layers| layers.optimizer_on_disk)
    }

    /// How many blocks keep their weights in memory although the others' lie in a file.
    pub fn weight_blocks_in_memory(&self) -> usize {
        self.layer_major.map_or(0, |layers| layers.weight_blocks_in_memory)
    }

    /// Whether weights in a file are read matrix by matrix.
    pub fn has_weights_by_matrix(&self) -> bool {
        self.layer_major.is_some_and(|layers| layers.weights_on_disk && layers.weights_by_matrix)
    }

    /// Whether the weights lie in a file.
    pub fn has_weights_on_disk(&self) -> bool {
        self.layer_major.is_some_and(|layers| layers.weights_on_disk)
    }
}
