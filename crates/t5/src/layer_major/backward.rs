//! Backward of a layer-major step: block by block, all micro-batches through one before the next.

use candle_core::Tensor;

use super::{Entering, LayerPass, Samples, Stage, Unit};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::layers::attention::{SideGradients, SourceGradient};
use crate::layers::block::{Block, BlockSaved};
use crate::model::{Pass, T5};
use crate::parameters::Part;
use crate::store::{Store, Stored};

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
    /// One of the two backward passes: `hand_over` is called once for every trained parameter, with its index and the
    /// accumulators, when the one of that index is complete. [`Stage::Measure`] comes first; after [`Stage::Apply`] the
    /// gradients are gone. What is handed over for good may change its parameter, through [`T5::change`]. False when
    /// `interrupted` said so before a micro-batch.
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
            let [block, next] =
                [position, position + 1].map(|at| pass.units[..end].get(at).and_then(|unit| self.block(*unit)));
            block.inspect(|block| block.page_in());
            next.inspect(|next| next.read_ahead());
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
            block.inspect(|block| block.page_out());
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
        if stage == Stage::Apply && self.is_in_file() {
            // Weights were changed in copies; what these leave to be used again would lie beside the pages of the file.
            heap::release_unused();
        }
        Ok(true)
    }

    /// The block that a unit is.
    fn block(&self, unit: Unit) -> Option<&Block> {
        match unit {
            Unit::Block { decoder, block } => self.stack(decoder).blocks.get(block),
            Unit::Norm { .. } => None,
        }
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
            let stack = self.stack(decoder);
            stack.embed_backward(samples.ids(decoder), &self.shared, dx, &samples.context(&step, decoder), grads)?;
        }
        Ok(())
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = usize> {
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
        let stack = self.stack(decoder);
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
