//! Layer-major accumulation: all micro-batches of an optimizer batch pass through one block before the next, so that the
//! gradient of one block at a time exists, and its weights are needed once in forward and once in each backward pass.
//!
//! Forward keeps the input of every block for every sample, or all that backward needs of it. Backward goes down block
//! by block: it runs the block forward again where it has to for each micro-batch in turn, adds to the block's
//! gradient, and hands the complete gradient over.
//!
//! Two passes follow one forward: the first [`Stage::Measure`]s, for the norm of the whole gradient and whether it is
//! finite, and the second [`Stage::Apply`]s, when nothing can go wrong half-way. The tables (embedding, head) and the
//! last [`LayerMajor::kept_gradient_blocks`] blocks keep their gradients from the first pass, so the second does not go
//! as far. With [`LayerMajor::gradients_on_disk`] the first pass writes the others to a file, and the second reads
//! instead of computing. Where backward goes through every block once, blocks need not be computed again
//! ([`StepContext::recompute_blocks`]).
//!
//! Invariants: gradients are those of [`crate::T5::forward_backward`] over the same micro-batches, up to the order in
//! which the tables' contributions are added (those of everything else are the same to the bit); a gradient
//! is handed over once a pass; a block's parameters may be changed as soon as its gradient was handed over
//! for the second time.

mod backward;
mod forward;

use candle_core::Tensor;

use crate::context::{LayerContext, StepContext};
use crate::layers::block::BlockSaved;
use crate::layers::bytes;
use crate::layers::stack::StackSaved;
use crate::levers::LayerMajor;
use crate::micro_batch::MicroBatch;
use crate::model::Pass;
use crate::parameters::Part;
use crate::reach::{Keep, Reach};
use crate::store::{Store, Stored};

impl LayerMajor {
    /// What forward keeps of a block that is computed again.
    pub(crate) fn kept_of_a_block(&self) -> Keep {
        if self.heads_kept { Keep::Heads } else { Keep::Input }
    }

    /// Of how many of the units, from the first, what forward keeps stays in memory.
    pub(crate) fn in_memory(&self, units: &[Unit]) -> usize {
        if self.boundaries_on_disk { Unit::leading(units, self.blocks_in_memory) } else { units.len() }
    }

    /// How many of the units, of which `dropped` do not keep their gradients, backward goes through twice: from the first.
    pub(crate) fn again(&self, dropped: usize) -> usize {
        if self.gradients_on_disk { 0 } else { dropped }
    }

    /// Blocks that are computed again where `wanted` are to be: all, if backward goes through any a second time.
    pub(crate) fn recompute_blocks(&self, wanted: usize, dropped: usize) -> usize {
        if self.again(dropped) == 0 { wanted } else { usize::MAX }
    }
}

/// Which of the two passes backward makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Every gradient is handed over once; those that can be computed again are dropped.
    Measure,
    /// Every gradient is handed over once more, for good.
    Apply,
}

/// A step of backward: what lies between two boundaries of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Norm { decoder: bool },
    Block { decoder: bool, block: usize },
}

impl Unit {
    /// Everything that backward enters, in its order.
    pub fn all(reach: Reach) -> Vec<Unit> {
        let mut units = Vec::new();
        for (decoder, stack) in [(true, reach.decoder), (false, reach.encoder)] {
            if stack.enters_norm() {
                units.push(Unit::Norm { decoder });
            }
            let blocks = (0..stack.blocks()).rev().filter(|&block| stack.enters_block(block));
            units.extend(blocks.map(|block| Unit::Block { decoder, block }));
        }
        units
    }

    /// How many of `units`, from the first, do not keep their gradients: those before the last `kept` blocks. A norm that
    /// nothing but kept blocks follows is kept with them.
    pub fn dropped(units: &[Unit], kept: usize) -> usize {
        let is_norm = |unit: &Unit| matches!(unit, Unit::Norm { .. });
        let blocks = |units: &[Unit]| units.iter().filter(|unit| !is_norm(unit)).count();
        let mut dropped = (0..=units.len()).rev().find(|&n| blocks(&units[n..]) >= kept).unwrap_or(0);
        while dropped > 0 && dropped < units.len() && is_norm(&units[dropped - 1]) {
            dropped -= 1;
        }
        dropped
    }

    /// How many of `units`, from the first, are no more than so many blocks and the norms between them and after them.
    fn leading(units: &[Unit], blocks: usize) -> usize {
        let is_block = |unit: &&Unit| matches!(unit, Unit::Block { .. });
        if blocks == 0 {
            0
        } else {
            (0..=units.len()).rev().find(|&n| units[..n].iter().filter(is_block).count() <= blocks).unwrap_or(0)
        }
    }

    pub fn is_decoder(self) -> bool {
        match self {
            Unit::Norm { decoder } | Unit::Block { decoder, .. } => decoder,
        }
    }

    /// Where its parameters are.
    pub fn part(self) -> Part {
        match self {
            Unit::Norm { decoder: true } => Part::DecoderNorm,
            Unit::Norm { decoder: false } => Part::EncoderNorm,
            Unit::Block { decoder: true, block } => Part::Decoder { block },
            Unit::Block { decoder: false, block } => Part::Encoder { block },
        }
    }
}

/// An optimizer batch between forward and the end of backward.
#[derive(Debug)]
pub struct LayerPass {
    samples: Vec<Samples>,
    boundaries: Store,
    /// Where gradients wait that are neither kept nor computed again, and those that do.
    gradients: Option<Store>,
    waiting: Vec<(usize, Stored)>,
    /// The gradients of tables that wait there for those of the embedding's rows, and what these are made of.
    tables: Vec<(usize, Stored)>,
    entering: Vec<Entering>,
    cx: StepContext,
    units: Vec<Unit>,
    /// How many of the units, from the first, do not keep their gradients.
    dropped: usize,
    /// How many of the units the second pass goes through: these, or none where their gradients wait.
    again: usize,
    /// The sum of the token losses.
    loss_sum: f64,
}

/// The gradient of a stack's first activations for one micro-batch.
#[derive(Debug)]
struct Entering {
    /// The micro-batch.
    number: usize,
    decoder: bool,
    dx: Stored,
}

/// One micro-batch of it.
#[derive(Debug)]
struct Samples {
    batch: MicroBatch,
    source_bias: Tensor,
    target_bias: Tensor,
    /// The encoder's output (B, S, D).
    encoded: Tensor,
    encoder: StackSaved<BlockSaved<Stored>>,
    decoder: StackSaved<BlockSaved<Stored>>,
    /// Gradient of the decoder's output (B, T, D).
    dz: Option<Tensor>,
}

impl Samples {
    /// What was kept of a unit.
    fn kept(&mut self, unit: Unit) -> &mut Option<BlockSaved<Stored>> {
        let stack = if unit.is_decoder() { &mut self.decoder } else { &mut self.encoder };
        match unit {
            Unit::Norm { .. } => &mut stack.last,
            Unit::Block { block, .. } => &mut stack.blocks[block],
        }
    }

    fn ids(&self, decoder: bool) -> &Tensor {
        self.batch.ids(decoder)
    }

    fn bias(&self, decoder: bool) -> &Tensor {
        if decoder { &self.target_bias } else { &self.source_bias }
    }

    fn context<'a>(&'a self, pass: &Pass, decoder: bool) -> LayerContext<'a> {
        match decoder {
            true => pass.decoder(&self.batch, &self.target_bias, &self.encoded),
            false => pass.encoder(&self.batch, &self.source_bias),
        }
    }

    fn bytes(&self) -> u64 {
        let boundaries = [&self.encoder, &self.decoder].into_iter().flat_map(|s| s.blocks.iter().chain([&s.last]));
        let tensors = bytes(&[&self.source_bias, &self.target_bias, &self.encoded]);
        let held: u64 = boundaries.flatten().flat_map(BlockSaved::tensors).map(Stored::bytes).sum();
        tensors + self.dz.as_ref().map_or(0, |dz| bytes(&[dz])) + held
    }
}

impl LayerPass {
    /// The sum of the token losses over the optimizer batch.
    pub fn loss_sum(&self) -> f64 {
        self.loss_sum
    }

    /// What it holds in memory.
    pub fn bytes(&self) -> u64 {
        self.samples.iter().map(Samples::bytes).sum()
    }

    /// What it has written to files so far.
    pub fn written_bytes(&self) -> u64 {
        [Some(&self.boundaries), self.gradients.as_ref()].into_iter().flatten().map(Store::written_bytes).sum()
    }
}
