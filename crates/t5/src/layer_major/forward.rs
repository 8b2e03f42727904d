//! Forward of a layer-major step: block by block, all micro-batches through one before the next, so that a block's weights
//! are needed once.

use candle_core::DType;

use super::{LayerPass, Samples, Unit};
use crate::context::{LayerContext, StepContext};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::layers::block::BlockSaved;
use crate::layers::stack::Output;
use crate::levers::LayerMajor;
use crate::micro_batch::MicroBatch;
use crate::model::{Pass, T5};
use crate::reach::{Keep, Reach};
use crate::store::{Files, Store, Stored};

/// What both stacks are told alike.
struct Settings<'a> {
    reach: Reach,
    /// Blocks that are computed again, and what is kept of these.
    recompute_blocks: usize,
    again: Keep,
    dtype: DType,
    interrupted: &'a dyn Fn() -> bool,
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
        let mut boundaries = if layers.boundaries_on_disk { Store::on_disk(files)? } else { Store::in_memory() };
        // In a file at once: a micro-batch then holds what is kept of one block at a time.
        let mut put = |unit: Unit, saved: BlockSaved| {
            let stays = units.iter().position(|&other| other == unit).is_none_or(|position| position < in_memory);
            saved.try_map(&mut |x| if stays { Ok(Stored::Memory(x)) } else { boundaries.put(x) })
        };
        let settings = Settings {
            reach,
            recompute_blocks: cx.recompute_blocks,
            again: layers.kept_of_a_block(),
            dtype: cx.activations,
            interrupted,
        };
        let pass = Pass::of(&cx);
        let biases = |decoder| batches.iter().map(|batch| self.bias_of(batch, decoder)).collect::<Result<Vec<_>>>();
        let source_biases = biases(false)?;
        let contexts: Vec<_> =
            batches.iter().zip(&source_biases).map(|(batch, bias)| pass.encoder(batch, bias)).collect();
        let Some(encoders) = self.through_stack(false, &batches, &contexts, &settings, &mut put)? else {
            return Ok(None);
        };
        let target_biases = biases(true)?;
        let sides = batches.iter().zip(&target_biases).zip(&encoders);
        let contexts: Vec<_> = sides.map(|((batch, bias), (encoded, _))| pass.decoder(batch, bias, encoded)).collect();
        let Some(decoders) = self.through_stack(true, &batches, &contexts, &settings, &mut put)? else {
            return Ok(None);
        };
        let mut pass = LayerPass {
            samples: Vec::with_capacity(batches.len()),
            boundaries,
            gradients: layers.gradients_on_disk.then(|| Store::on_disk(files)).transpose()?,
            waiting: Vec::new(),
            tables: Vec::new(),
            entering: Vec::new(),
            cx,
            dropped,
            again: layers.again(dropped),
            units,
            loss_sum: 0.0,
        };
        t5_ops::page_in(&self.head.tensor);
        let stacks = encoders.into_iter().zip(decoders);
        let sides = batches.into_iter().zip(source_biases.into_iter().zip(target_biases));
        for ((batch, (source_bias, target_bias)), ((encoded, encoder), (z, decoder))) in sides.zip(stacks) {
            if interrupted() {
                return Ok(None);
            }
            let (loss, dz) = self.head_backward(z, &batch, &cx, grads)?;
            pass.loss_sum += loss;
            let dz = Some(dz);
            pass.samples.push(Samples { batch, source_bias, target_bias, encoded, encoder, decoder, dz });
        }
        t5_ops::page_out(&self.head.tensor);
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

    /// All micro-batches through one stack. What is kept is `put` away at once. `None` when interrupted.
    fn through_stack(
        &self,
        decoder: bool,
        batches: &[MicroBatch],
        contexts: &[LayerContext],
        settings: &Settings,
        put: &mut dyn FnMut(Unit, BlockSaved) -> Result<BlockSaved<Stored>>,
    ) -> Result<Option<Vec<Output<BlockSaved<Stored>>>>> {
        let &Settings { reach, recompute_blocks, again, dtype, interrupted } = settings;
        let keep = |block| match decoder {
            true => reach.keep_decoder_block(block, recompute_blocks).instead_of_input(again),
            false => reach.keep_encoder_block(block, recompute_blocks).instead_of_input(again),
        };
        let mut put = |block: Option<usize>, saved| {
            put(block.map_or(Unit::Norm { decoder }, |block| Unit::Block { decoder, block }), saved)
        };
        let of_stack = if decoder { reach.decoder } else { reach.encoder };
        let micro_batches: Vec<_> = batches.iter().map(|batch| batch.ids(decoder)).zip(contexts).collect();
        self.stack(decoder).forward(&micro_batches, &self.shared, dtype, of_stack, &keep, &mut put, interrupted)
    }
}
