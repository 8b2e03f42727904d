//! Layer-major accumulation: all micro-batches of an optimizer batch pass backward through one block before
//! the next, so that the gradient of one block at a time exists.
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

use candle_core::Tensor;

use crate::context::{LayerContext, StepContext};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::layers::attention::{SideGradients, SourceGradient};
use crate::layers::block::BlockSaved;
use crate::layers::bytes;
use crate::layers::stack::StackSaved;
use crate::micro_batch::MicroBatch;
use crate::model::{Kept, Pass, T5};
use crate::parameters::Part;
use crate::reach::{Keep, Reach};
use crate::store::{Files, Store, Stored};

/// How layer-major accumulation spends memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerMajor {
    /// Blocks, of those that backward comes to last, whose gradients stay from the first pass, so that the second
    /// is spared them: 0 holds least, all of them need no second pass.
    pub kept_gradient_blocks: usize,
    /// What the attentions' heads put out is kept beside block inputs, and not computed again.
    pub heads_kept: bool,
    /// What forward keeps of blocks lies in a file.
    pub boundaries_on_disk: bool,
    /// Blocks, of those that backward comes to first, of which it stays in memory nevertheless: it is gone before the last
    /// gradients are there.
    pub blocks_in_memory: usize,
    /// Gradients that are not kept are written to a file by the first pass, and the second reads them.
    pub gradients_on_disk: bool,
}

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
        if decoder { &self.batch.decoder_inputs } else { &self.batch.sources }
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

/// What was kept of a unit, while the first tensor of the next is read.
fn get_back(store: &mut Store, kept: BlockSaved<Stored>, after: Option<&Stored>) -> Result<BlockSaved> {
    let order: Vec<Stored> = kept.tensors().into_iter().skip(1).chain(after).cloned().collect();
    let mut following = order.iter();
    kept.try_map(&mut |stored| store.get(stored, following.next()))
}

/// The gradients on their way down, by micro-batch.
struct Down {
    /// Of what the last unit put out.
    dx: Vec<Option<Tensor>>,
    /// Of the encoder's output.
    source: Vec<SourceGradient>,
    /// Of the stack's position bias.
    bias: Vec<Option<Tensor>>,
}

impl T5 {
    /// Forward and loss of a whole optimizer batch, keeping the block inputs; adds the gradient of the head's table to
    /// `grads`. `cx.recompute_blocks` counts where backward goes through every block once, otherwise all are computed
    /// again. What `layers` wants on disk goes to `files`. `None` when `interrupted` said so before a micro-batch.
    ///
    /// # Errors
    /// A failed tensor operation, or a file that cannot be written.
    pub fn layer_major_forward(
        &self,
        batches: Vec<MicroBatch>,
        cx: &StepContext,
        layers: &LayerMajor,
        files: &Files,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<LayerPass>> {
        let reach = self.reach(grads);
        let units = Unit::all(reach);
        let (dropped, in_memory) = (Unit::dropped(&units, layers.kept_gradient_blocks), layers.in_memory(&units));
        let cx = StepContext { recompute_blocks: layers.recompute_blocks(cx.recompute_blocks, dropped), ..*cx };
        let mut pass = LayerPass {
            samples: Vec::new(),
            boundaries: if layers.boundaries_on_disk { Store::on_disk(files)? } else { Store::in_memory() },
            gradients: layers.gradients_on_disk.then(|| Store::on_disk(files)).transpose()?,
            waiting: Vec::new(),
            tables: Vec::new(),
            entering: Vec::new(),
            cx,
            units,
            dropped,
            again: layers.again(dropped),
            loss_sum: 0.0,
        };
        for batch in batches {
            if interrupted() {
                return Ok(None);
            }
            // In a file at once: a micro-batch then holds what is kept of one block at a time. Forward comes to the units in the
            // other order.
            let mut left = pass.units.len();
            let mut put = |saved: BlockSaved| {
                left -= 1;
                let stays = left < in_memory;
                saved.try_map(&mut |x| if stays { Ok(Stored::Memory(x)) } else { pass.boundaries.put(x) })
            };
            let Kept { source_bias, target_bias, encoded, encoder, decoder, z } =
                self.forward(&batch, &cx, reach, layers.kept_of_a_block(), &mut put)?;
            let (loss, dz) = self.head_backward(z, &batch, &cx, grads)?;
            pass.loss_sum += loss;
            let dz = Some(dz);
            pass.samples.push(Samples { batch, source_bias, target_bias, encoded, encoder, decoder, dz });
        }
        if let Some(file) = &mut pass.gradients {
            // The head is through; the embedding comes last.
            for index in self.tables() {
                if let Some(gradient) = grads.take(index) {
                    pass.tables.push((index, file.put(gradient)?));
                }
            }
        }
        tracing::trace!(kept_bytes = pass.bytes(), "boundaries between forward and backward");
        Ok(Some(pass))
    }

    /// One of the two backward passes: `hand_over` is called once for every trained parameter, with its index and the
    /// accumulators, when the one of that index is complete. [`Stage::Measure`] comes first; after [`Stage::Apply`] the gradients are gone. False when `interrupted` said
    /// so before a micro-batch.
    ///
    /// # Errors
    /// A failed tensor operation, a file of boundaries that cannot be read, or what `hand_over` returns. In the
    /// second pass some parameters are changed then, and others not.
    pub fn layer_major_backward<E: From<Error>>(
        &self,
        pass: &mut LayerPass,
        stage: Stage,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
        hand_over: &mut dyn FnMut(usize, &Gradients) -> Result<(), E>,
    ) -> Result<bool, E> {
        let end = if stage == Stage::Measure { pass.units.len() } else { pass.again };
        let mut down = self.start_of_backward(pass, stage);
        for position in 0..end {
            if position == pass.dropped {
                grads.release_spare();
            }
            if !self.unit_backward(pass, position, end, stage, &mut down, grads, interrupted)? {
                return Ok(false);
            }
            let part = pass.units[position].part();
            for index in self.parameters_of(|other| other == part) {
                if grads.get(index).is_some() {
                    hand_over(index, grads)?;
                }
                if position < pass.dropped {
                    if let (Some(file), Some(gradient)) = (&mut pass.gradients, grads.get(index)) {
                        pass.waiting.push((index, file.put(gradient.clone())?));
                    }
                    grads.put_aside(index);
                }
            }
        }
        drop(down);
        grads.release_spare();
        self.enter_embedding(pass, grads)?;
        if stage == Stage::Apply {
            let waiting = std::mem::take(&mut pass.waiting);
            for (place, (index, stored)) in waiting.iter().enumerate() {
                let Some(file) = &mut pass.gradients else { break };
                let next = waiting.get(place + 1).map(|(_, next)| next);
                grads.put_back(*index, file.get(stored.clone(), next)?);
                hand_over(*index, grads)?;
                grads.take(*index);
            }
        }
        // In the end what stays: tables at first, at last whatever is still there.
        let rest: Vec<usize> = match stage {
            Stage::Measure => self.tables().collect(),
            Stage::Apply => self.parameters_of(|_| true).collect(),
        };
        for index in rest {
            if grads.get(index).is_some() {
                hand_over(index, grads)?;
            }
            if stage == Stage::Apply {
                grads.take(index);
            }
        }
        Ok(true)
    }

    /// Adds the gradients of the embedding's rows that waited for the tables, and gets these back.
    fn enter_embedding(&self, pass: &mut LayerPass, grads: &mut Gradients) -> Result<()> {
        if let Some(file) = &mut pass.gradients {
            for (index, stored) in std::mem::take(&mut pass.tables) {
                grads.put_back(index, file.get(stored, None)?);
            }
        }
        let step = Pass::of(&pass.cx);
        let mut entering = std::mem::take(&mut pass.entering).into_iter().peekable();
        while let Some(Entering { number, decoder, dx }) = entering.next() {
            let dx = pass.boundaries.get(dx, entering.peek().map(|next| &next.dx))?;
            let samples = &pass.samples[number];
            let stack = if decoder { &self.decoder } else { &self.encoder };
            stack.embed_backward(samples.ids(decoder), &self.shared, dx, &samples.context(&step, decoder), grads)?;
        }
        Ok(())
    }

    fn tables(&self) -> impl Iterator<Item = usize> {
        self.parameters_of(|part| matches!(part, Part::Shared | Part::LmHead))
    }

    fn parameters_of(&self, is_meant: impl Fn(Part) -> bool) -> impl Iterator<Item = usize> {
        let meant = self.parameters().iter().enumerate().filter(move |(_, parameter)| is_meant(parameter.part));
        meant.map(|(index, _)| index)
    }

    fn start_of_backward(&self, pass: &mut LayerPass, stage: Stage) -> Down {
        let is_last_use = stage == Stage::Apply || pass.again == 0;
        let end = if stage == Stage::Measure { pass.units.len() } else { pass.again };
        let enters_encoder = pass.units[..end].iter().any(|unit| !unit.is_decoder());
        let source = || if enters_encoder { SourceGradient::Wanted(None) } else { SourceGradient::NotWanted };
        let dz = |samples: &mut Samples| if is_last_use { samples.dz.take() } else { samples.dz.clone() };
        Down {
            dx: pass.samples.iter_mut().map(dz).collect(),
            source: pass.samples.iter().map(|_| source()).collect(),
            bias: pass.samples.iter().map(|_| None).collect(),
        }
    }

    /// Backward of one unit for every micro-batch.
    #[allow(clippy::too_many_arguments, reason = "a pass needs its data, its place and its outputs")]
    fn unit_backward(
        &self,
        pass: &mut LayerPass,
        position: usize,
        end: usize,
        stage: Stage,
        down: &mut Down,
        grads: &mut Gradients,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let unit = pass.units[position];
        let decoder = unit.is_decoder();
        let is_last_use = stage == Stage::Apply || position >= pass.again;
        let next = pass.units[..end].get(position + 1).copied();
        let goes_on = matches!(next, Some(Unit::Block { decoder: other, .. }) if other == decoder);
        let step = Pass::of(&pass.cx);
        let stack = if decoder { &self.decoder } else { &self.encoder };
        for i in 0..pass.samples.len() {
            if interrupted() {
                return Ok(false);
            }
            let after = match pass.samples.get_mut(i + 1) {
                Some(samples) => samples.kept(unit).as_ref(),
                None => next.and_then(|next| pass.samples[0].kept(next).as_ref()),
            };
            let after = after.map(|kept| kept.x().clone());
            let samples = &mut pass.samples[i];
            let kept = if is_last_use { samples.kept(unit).take() } else { samples.kept(unit).clone() };
            let Some(kept) = kept else { continue };
            let kept = get_back(&mut pass.boundaries, kept, after.as_ref())?;
            let cx = samples.context(&step, decoder);
            match unit {
                Unit::Norm { decoder } => {
                    let dz = match std::mem::replace(&mut down.source[i], SourceGradient::NotWanted) {
                        SourceGradient::Wanted(dz) if !decoder => dz,
                        source => {
                            down.source[i] = source;
                            down.dx[i].take()
                        }
                    };
                    let Some(dz) = dz else { continue };
                    down.dx[i] = Some(stack.finish_backward(kept.x(), dz, &cx, grads)?);
                    down.bias[i] = None;
                }
                Unit::Block { block, .. } => {
                    let Some(dy) = down.dx[i].take() else { continue };
                    let into_embedding =
                        block == 0 && stage == Stage::Measure && self.reach(grads).enters_embedding(decoder);
                    let trains_table =
                        grads.trains(&stack.table) && pass.units[..end].contains(&Unit::Block { decoder, block: 0 });
                    if trains_table && down.bias[i].is_none() {
                        down.bias[i] = Some(samples.bias(decoder).zeros_like()?);
                    }
                    let mut side = SideGradients { bias: down.bias[i].as_ref(), source: &mut down.source[i] };
                    let wanted = goes_on || into_embedding;
                    let dx = stack.blocks[block].backward(kept, dy, &cx, &mut side, wanted, grads)?;
                    let ids = samples.ids(decoder);
                    if block == 0 {
                        stack.bias_backward(down.bias[i].take(), ids, grads)?;
                    }
                    match dx {
                        Some(dx) if into_embedding && pass.gradients.is_some() => {
                            pass.entering.push(Entering { number: i, decoder, dx: pass.boundaries.put(dx)? });
                        }
                        Some(dx) if into_embedding => stack.embed_backward(ids, &self.shared, dx, &cx, grads)?,
                        dx => down.dx[i] = dx,
                    }
                }
            }
        }
        Ok(true)
    }
}
