//! The loop that carries out a list of events.
//!
//! The loop is written over [`Ops`]: on tensors it is the step, on counted tensors its rehearsal. The trainer sees the step
//! through an [`Observer`]: gradients to be measured, the decision, gradients to be applied.

pub(crate) mod rounds;
mod sums;

use std::collections::HashSet;
use std::ops::Range;

use t5_ops::LossSums;

use super::observer::Observer;
use super::schedule::{Backward, Event, ToEmbedding, Unit};
use super::store::{Store, Stored};
use crate::context::{LayerContext, Noise, StepContext};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::layers::attention::{SideGradients, SourceGradient};
use crate::layers::block::{BlockInput, BlockSaved};
use crate::micro_batch::MicroBatch;
use crate::network::Network;
use crate::ops::{Files, Ops};
use crate::parameters::{Parameter, Part};
use crate::reach::Keep;
use rounds::GraphRunner;

/// The state of a micro-batch between events.
#[derive(Debug)]
struct Slot<T: Ops> {
    /// Position bias of encoder and decoder, (H, 2T-1).
    bias: [Option<T>; 2],
    /// Activations that forward passes from layer to layer (B, T, D).
    x: Option<T>,
    /// The encoder's output (B, S, D).
    encoded: Option<T>,
    /// Saved activations of the blocks and the norm, of the encoder and then of the decoder.
    saved: [Vec<Option<BlockSaved<Stored<T>>>>; 2],
    /// Gradient of the decoder's output (B, T, D).
    dz: Option<T>,
    /// The gradient that backward passes from layer to layer (B, T, D).
    dx: Option<T>,
    /// Gradient of the encoder's output (B, S, D).
    source: SourceGradient<T>,
    /// Gradient of the position bias.
    dbias: Option<T>,
}

impl<T: Ops> Slot<T> {
    fn new(network: &Network<T>) -> Self {
        Slot {
            bias: [None, None],
            x: None,
            encoded: None,
            saved: [false, true].map(|decoder| (0..=network.stack(decoder).blocks.len()).map(|_| None).collect()),
            dz: None,
            dx: None,
            source: SourceGradient::NotWanted,
            dbias: None,
        }
    }
}

/// The gradient of a stack's first activations. It waits until the table's gradient is in memory.
#[derive(Debug)]
struct PendingEmbeddingGradient<T: Ops> {
    number: usize,
    decoder: bool,
    dx: Stored<T>,
}

/// A step that is being carried out.
#[derive(Debug)]
pub(crate) struct Step<'a, T: Ops> {
    network: &'a Network<T>,
    parameters: &'a [Parameter<T>],
    cx: StepContext,
    batches: &'a [MicroBatch<T>],
    slots: Vec<Slot<T>>,
    activations: Store<T>,
    gradients: Option<Store<T>>,
    copies_overlap: bool,
    /// Gradients that wait in a file, by parameter index: of units, then of tables. `None`: another process holds the gradient.
    waiting: Vec<(usize, Option<Stored<T>>)>,
    tables: Vec<(usize, Stored<T>)>,
    pending_embedding_gradients: Vec<PendingEmbeddingGradient<T>>,
    /// Parameters for which another process's update was received.
    received: HashSet<usize>,
    /// Parameters whose gradients are being summed.
    in_flight: HashSet<usize>,
    losses: LossSums,
    /// The cross-entropy of each sample, by micro-batch, of [`Event::LossOfSamples`].
    of_samples: Vec<Vec<f64>>,
    /// Records and launches micro-batches that repeat. `None`: nothing is recorded.
    repeats: Option<&'a dyn GraphRunner<T>>,
}

/// The directory for a step's files, and which tensors are put there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offload<'a> {
    pub files: &'a Files,
    pub activations: bool,
    pub gradients: bool,
    /// [`crate::LayerMajor::copies_overlap`].
    pub copies_overlap: bool,
}

impl<'a, T: Ops> Step<'a, T> {
    /// A step before its first event.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn new(
        network: &'a Network<T>,
        parameters: &'a [Parameter<T>],
        cx: &StepContext,
        batches: &'a [MicroBatch<T>],
        offload: Option<Offload>,
    ) -> Result<Self> {
        let files = |is_wanted: fn(&Offload) -> bool| {
            let offload = offload.as_ref().filter(|offload| is_wanted(offload));
            let offload_store =
                |offload: &Offload| network.shared.tensor.offload_store(offload.files, offload.copies_overlap);
            offload.map(|offload| offload_store(offload).map(Store::on_disk)).transpose()
        };
        Ok(Step {
            network,
            parameters,
            cx: *cx,
            batches,
            slots: batches.iter().map(|_| Slot::new(network)).collect(),
            activations: files(|offload| offload.activations)?.unwrap_or_else(Store::in_memory),
            gradients: files(|offload| offload.gradients)?,
            copies_overlap: offload.is_some_and(|offload| offload.copies_overlap),
            waiting: Vec::new(),
            tables: Vec::new(),
            pending_embedding_gradients: Vec::new(),
            received: HashSet::new(),
            in_flight: HashSet::new(),
            losses: LossSums::default(),
            of_samples: Vec::new(),
            repeats: None,
        })
    }

    /// Has micro-batches that repeat recorded and launched. Only for steps that have all tensors in memory.
    pub fn repeating(self, repeats: &'a dyn GraphRunner<T>) -> Self {
        Step { repeats: Some(repeats), ..self }
    }

    /// The sum of the cross-entropies of all tokens so far.
    pub fn loss_sum(&self) -> f64 {
        self.losses.cross_entropy
    }

    /// The cross-entropy of each sample, by micro-batch.
    pub fn take_losses_of_samples(&mut self) -> Vec<Vec<f64>> {
        std::mem::take(&mut self.of_samples)
    }

    /// The output (B, T, D) of the last stack that the first micro-batch went through.
    pub fn take_output(&mut self) -> Option<T> {
        let slot = self.slots.first_mut()?;
        slot.x.take().or_else(|| slot.encoded.take())
    }

    /// Sets the first micro-batch's state to the beginning of a stack, for a rehearsal.
    pub(super) fn set_stage(&mut self, decoder: bool, bias: Option<T>, encoded: Option<T>) {
        self.slots[0].bias[usize::from(decoder)] = bias;
        self.slots[0].encoded = encoded;
    }

    /// Sets the activations that enter the first micro-batch's next layer.
    pub(super) fn set_activations(&mut self, x: T) {
        self.slots[0].x = Some(x);
    }

    /// Sets the gradient of the first micro-batch's decoder output.
    pub(super) fn set_output_gradient(&mut self, dz: T) {
        self.slots[0].dz = Some(dz);
    }

    /// Sets the gradients that enter backward of the first micro-batch's next unit.
    pub(super) fn set_gradients(&mut self, dx: Option<T>, source: SourceGradient<T>, dbias: Option<T>) {
        let slot = &mut self.slots[0];
        (slot.dx, slot.source, slot.dbias) = (dx, source, dbias);
    }

    /// Bytes in memory of the first micro-batch's saved activations.
    pub(super) fn saved_bytes(&self) -> u64 {
        let saved = self.slots.first().into_iter().flat_map(|slot| slot.saved.iter().flatten().flatten());
        saved.flat_map(BlockSaved::tensors).map(Stored::bytes).sum()
    }

    /// Bytes in memory of the first micro-batch's tensors.
    #[cfg(test)]
    pub fn slot_bytes(&self) -> u64 {
        let Slot { bias, x, encoded, dz, dx, dbias, .. } = &self.slots[0];
        let tensors = bias.iter().chain([x, encoded, dz, dx, dbias]).flatten();
        tensors.map(T::bytes).sum::<u64>() + self.saved_bytes()
    }

    /// The parameters whose gradients wait in a file, or are held by another process.
    pub(super) fn waiting(&self) -> impl Iterator<Item = usize> {
        self.waiting.iter().map(|(index, _)| *index)
    }

    /// Bytes written to files so far.
    pub fn written_bytes(&self) -> u64 {
        self.activations.written_bytes() + self.gradients.as_ref().map_or(0, Store::written_bytes)
    }

    /// Carries out the events. Returns false when the observer interrupted them, or decided against the update.
    ///
    /// # Errors
    /// An operation fails, a file cannot be written or read, or the observer returns an error.
    pub fn run<E: From<Error>>(
        &mut self,
        events: &[Event],
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<bool, E> {
        let mut rest = events;
        while !rest.is_empty() {
            let round = self.repeats.and_then(|repeats| Some((repeats, rounds::span(rest)?)));
            let (now, later) = rest.split_at(round.map_or(1, |(_, span)| span.events));
            let goes_on = match round {
                Some((repeats, span)) => self.run_micro_batch(repeats, (span, now), grads, observer),
                None => self.execute_each(now, grads, observer),
            };
            if !matches!(goes_on, Ok(true)) {
                self.network.release();
                return goes_on;
            }
            rest = later;
        }
        Ok(true)
    }

    fn execute_each<E: From<Error>>(
        &mut self,
        events: &[Event],
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<bool, E> {
        for event in events {
            if !self.execute(event, grads, observer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn execute<E: From<Error>>(
        &mut self,
        event: &Event,
        grads: &mut Gradients<T>,
        observer: &mut dyn Observer<T, E>,
    ) -> Result<bool, E> {
        match event {
            Event::Embed { decoder, of } => self.embed(*decoder, of.clone())?,
            Event::ReadAhead(part) => self.network.read_ahead(*part),
            Event::Prefetch(part) => self.network.prefetch(*part)?,
            Event::Copy(part) => self.network.copy(*part)?,
            Event::PageIn(part) => {
                self.network.weights_of(*part).try_for_each(|weight| self.network.page_in(weight))?
            }
            Event::PageOut(part) => {
                self.network.weights_of(*part).try_for_each(|weight| self.network.page_out(weight))?
            }
            Event::Forward { of, .. } | Event::Head { of } | Event::Backward(Backward { of, .. }) => {
                let is_norm = matches!(event, Event::Forward { unit: Unit::Norm { .. }, .. });
                for i in of.clone() {
                    if !is_norm && observer.interrupted() {
                        return Ok(false);
                    }
                    self.compute(i, event, grads)?;
                }
            }
            Event::Loss { of } => of.clone().try_for_each(|i| self.compute(i, event, grads))?,
            Event::LossOfSamples { of } => {
                let mut next = of.start;
                while next < of.end {
                    next = self.losses_of_samples(next..of.end)?;
                }
            }
            Event::Close { shard, part } => self.close(*shard, *part, grads, observer)?,
            Event::SumHead => {
                // An untied head's gradient is complete, and is handed over with that part.
                if self.network.has_tied_head() {
                    self.begin_sum(self.network.head.weight.index, grads, observer)?;
                }
            }
            Event::EndHead => self.end_head(grads, observer)?,
            Event::Send { part, closes } => self.send(*part, closes, grads, observer)?,
            Event::WriteTables => self.write_tables(grads)?,
            Event::Begin { of, is_last_use, wants_source } => self.begin(of.clone(), *is_last_use, *wants_source)?,
            Event::Finish { of } => self.finish(of.clone()),
            Event::HandOver { part, stage, disposition } => {
                self.hand_over(*part, *stage, *disposition, grads, observer)?;
            }
            Event::ReleaseSpare => grads.release_spare(),
            Event::EmbeddingBackward => {
                self.run_embedding_backward(observer.closes_shards().then(|| observer.shards()), grads)?;
            }
            Event::ReadBack => self.read_back(observer)?,
            Event::Decide => return observer.decide(self.losses),
            Event::ReleaseUnused => self.network.shared.tensor.release_unused(),
        }
        Ok(true)
    }

    /// Takes a micro-batch through an event.
    fn compute(&mut self, i: usize, event: &Event, grads: &mut Gradients<T>) -> Result<()> {
        match event {
            Event::Forward { unit, keep, in_memory, .. } => self.forward(i, *unit, *keep, *in_memory)?,
            Event::Head { .. } => self.head(i, grads)?,
            Event::Backward(way) => {
                self.backward(i, way, grads)?;
                self.copy()?;
                // The next unit's weights are copied behind the activations of this unit's second micro-batch, which are needed first.
                if let Some((next, _)) = way.next.filter(|_| i == way.of.start) {
                    self.network.copy_nonblocking(next.part())?;
                }
            }
            Event::Loss { .. } => {
                let Some(z) = self.slots[i].x.take() else { return Ok(()) };
                self.losses += self.network.loss(&z, &self.batches[i], &self.cx)?.into();
            }
            _ => unreachable!("not an event of one micro-batch: {event:?}"),
        }
        Ok(())
    }

    /// The losses of the samples of the first of these micro-batches, and of as many more as have rows for one chunk of the loss: then a head
    /// in a file is read once for all of them. Returns the number of the next.
    fn losses_of_samples(&mut self, of: Range<usize>) -> Result<usize> {
        let rows = |i: usize| self.slots[i].x.as_ref().map_or(0, |z| z.dims()[0] * z.dims()[1]);
        let (mut end, mut joined) = (of.start + 1, rows(of.start));
        let joins = |i: usize| self.network.reads_head_once(&self.batches[i]);
        while end < of.end && joins(of.start) && joins(end) && joined + rows(end) <= self.cx.loss_chunk_rows {
            joined += rows(end);
            end += 1;
        }
        let taken: Vec<(usize, T)> = (of.start..end).filter_map(|i| Some((i, self.slots[i].x.take()?))).collect();
        match taken.as_slice() {
            [] => {}
            [(i, z)] => {
                self.of_samples.push(self.network.losses(z, &self.batches[*i], &self.cx, &self.noise(*i))?);
            }
            several => {
                let of: Vec<_> = several.iter().map(|(i, z)| (z, &self.batches[*i])).collect();
                self.of_samples.extend(self.network.losses_together(&of, &self.cx)?);
            }
        }
        Ok(end)
    }

    fn noise(&self, i: usize) -> Noise<'a> {
        let StepContext { seed, step, dropout, adapter_dropout, .. } = self.cx;
        let batch = &self.batches[i];
        Noise { seed, step, dropout, adapter_dropout, samples: &batch.samples, skips_adapter: batch.skips_adapter }
    }

    fn embed(&mut self, decoder: bool, of: Range<usize>) -> Result<()> {
        let network = self.network;
        let table = network.table(decoder);
        network.fetch_remote(table)?;
        for i in of.clone() {
            self.slots[i].bias[usize::from(decoder)] = network.bias_of(&self.batches[i], decoder, 0)?;
        }
        for i in of {
            let (noise, ids) = (self.noise(i), self.batches[i].ids(decoder));
            let slot = &mut self.slots[i];
            if decoder {
                slot.encoded = slot.x.take();
            }
            slot.x = Some(network.stack(decoder).embed(ids, table, self.cx.activations, &noise)?);
        }
        Ok(())
    }

    fn forward(&mut self, i: usize, unit: Unit, keep: Keep, in_memory: bool) -> Result<()> {
        let (network, noise, decoder) = (self.network, self.noise(i), unit.is_decoder());
        let Some(x) = self.slots[i].x.take() else { return Ok(()) };
        let stack = network.stack(decoder);
        let (y, saved) = match unit {
            Unit::Block { block, .. } => {
                self.take_own_bias(i, decoder, block)?;
                stack.blocks[block].forward(x, &context(&self.slots[i], &self.batches[i], noise, decoder), keep)?
            }
            Unit::Norm { .. } => {
                let z = stack.finish(&x, &noise)?;
                (z, (keep != Keep::Nothing).then_some(BlockSaved::Input(BlockInput { x, heads: Vec::new() })))
            }
        };
        let files = &mut self.activations;
        // The saved activations of the micro-batch before are copied while this one is computed.
        files.copy()?;
        let mut put = |x: T| if in_memory { Ok(Stored::Memory(x)) } else { files.put(x) };
        let saved = saved.map(|saved| saved.try_map(&mut put)).transpose()?;
        let slot = &mut self.slots[i];
        slot.x = Some(y);
        *saved_of(slot, unit) = saved;
        Ok(())
    }

    /// Where each block has a position bias of its own, replaces the previous block's bias by this block's.
    fn take_own_bias(&mut self, i: usize, decoder: bool, block: usize) -> Result<()> {
        if self.network.stack(decoder).has_own_biases() {
            let bias = &mut self.slots[i].bias[usize::from(decoder)];
            *bias = None;
            *bias = self.network.bias_of(&self.batches[i], decoder, block)?;
        }
        Ok(())
    }

    fn head(&mut self, i: usize, grads: &mut Gradients<T>) -> Result<()> {
        let Some(z) = self.slots[i].x.take() else { return Ok(()) };
        let noise = self.noise(i);
        let (loss, dz) = self.network.head_backward(z, &self.batches[i], &self.cx, &noise, grads)?;
        self.losses += loss;
        self.slots[i].dz = Some(dz);
        self.copy()
    }

    /// Carries out the copies that overlap with computation.
    pub(super) fn copy(&mut self) -> Result<()> {
        self.activations.copy()?;
        self.gradients.as_mut().map_or(Ok(()), Store::copy)
    }

    fn begin(&mut self, of: Range<usize>, is_last_use: bool, wants_source: bool) -> Result<()> {
        for slot in &mut self.slots[of] {
            slot.dx = match &slot.dz {
                // Without dropout, backward writes into this tensor, and a second pass needs it unchanged.
                Some(dz) if !is_last_use && self.cx.dropout == 0.0 => Some(dz.copied()?),
                Some(dz) if !is_last_use => Some(dz.clone()),
                _ => slot.dz.take(),
            };
            slot.source = if wants_source { SourceGradient::Wanted(None) } else { SourceGradient::NotWanted };
            slot.dbias = None;
        }
        Ok(())
    }

    fn finish(&mut self, of: Range<usize>) {
        for slot in &mut self.slots[of] {
            slot.bias = [None, None];
            (slot.encoded, slot.dx, slot.source) = (None, None, SourceGradient::NotWanted);
        }
    }

    fn backward(&mut self, i: usize, way: &Backward, grads: &mut Gradients<T>) -> Result<()> {
        let (unit, decoder) = (way.unit, way.unit.is_decoder());
        let after = match i + 1 < way.of.end {
            true => saved_of(&mut self.slots[i + 1], unit).as_ref(),
            false => way.next.and_then(|(next, i)| saved_of(self.slots.get_mut(i)?, next).as_ref()),
        };
        let after = after.map(|saved| saved.x().clone());
        let slot = &mut self.slots[i];
        let saved = saved_of(slot, unit);
        let saved = if way.is_last_use { saved.take() } else { saved.clone() };
        let Some(saved) = saved else { return Ok(()) };
        let saved = load_saved(&mut self.activations, saved, after.as_ref())?;
        self.prefetch_next(i, way)?;
        let noise = self.noise(i);
        match unit {
            Unit::Block { block, .. } => self.block_backward(i, block, way, saved, grads)?,
            Unit::Norm { .. } => {
                let slot = &mut self.slots[i];
                let dz = match std::mem::replace(&mut slot.source, SourceGradient::NotWanted) {
                    SourceGradient::Wanted(dz) if !decoder => dz,
                    source => {
                        slot.source = source;
                        slot.dx.take()
                    }
                };
                let Some(dz) = dz else { return Ok(()) };
                slot.dx = Some(self.network.stack(decoder).finish_backward(saved.x(), dz, &noise, grads)?);
                slot.dbias = None;
            }
        }
        Ok(())
    }

    fn block_backward(
        &mut self,
        i: usize,
        block: usize,
        way: &Backward,
        saved: BlockSaved<T>,
        grads: &mut Gradients<T>,
    ) -> Result<()> {
        let (network, noise, decoder) = (self.network, self.noise(i), way.unit.is_decoder());
        let stack = network.stack(decoder);
        let Some(dy) = self.slots[i].dx.take() else { return Ok(()) };
        let mut source = std::mem::replace(&mut self.slots[i].source, SourceGradient::NotWanted);
        let mut dbias = self.slots[i].dbias.take();
        self.take_own_bias(i, decoder, block)?;
        let cx = context(&self.slots[i], &self.batches[i], noise, decoder);
        if let Some(bias) = cx.bias.filter(|_| way.trains_table && dbias.is_none()) {
            dbias = Some(bias.zeros(bias.dims(), bias.dtype())?);
        }
        let mut side = SideGradients { bias: dbias.as_ref(), source: &mut source };
        let dx = stack.blocks[block].backward(saved, dy, &cx, &mut side, way.passes_on, grads)?;
        let ids = self.batches[i].ids(decoder);
        if let Some(dbias) = dbias.take_if(|_| block == 0 || stack.has_own_biases()) {
            stack.bias_backward(block, &dbias, ids.dims()[1], grads)?;
        }
        let slot = &mut self.slots[i];
        (slot.source, slot.dbias) = (source, dbias);
        match (dx, way.to_embedding) {
            (dx, ToEmbedding::No) => slot.dx = dx,
            (None, _) => {}
            (Some(dx), ToEmbedding::Now) => {
                stack.embed_backward(ids, network.table(decoder), dx, &noise, grads)?;
            }
            (Some(dx), ToEmbedding::Later) => {
                let dx = self.activations.put(dx)?;
                self.pending_embedding_gradients.push(PendingEmbeddingGradient { number: i, decoder, dx });
            }
        }
        Ok(())
    }
}

impl<T: Ops> Step<'_, T> {
    /// Where copies overlap with computation, prefetches the saved activations of the next micro-batch, or of the next unit.
    fn prefetch_next(&mut self, i: usize, way: &Backward) -> Result<()> {
        if !self.copies_overlap {
            return Ok(());
        }
        let here = (i + 1 < way.of.end).then_some((way.unit, i + 1));
        let Some((unit, i)) = here.or(way.next) else { return Ok(()) };
        let Some(slot) = self.slots.get_mut(i) else { return Ok(()) };
        let mut saved = saved_of(slot, unit).iter().flat_map(BlockSaved::tensors);
        saved.try_for_each(|stored| self.activations.prefetch(stored))
    }
}

/// The saved activations of a unit.
fn saved_of<T: Ops>(slot: &mut Slot<T>, unit: Unit) -> &mut Option<BlockSaved<Stored<T>>> {
    let saved = &mut slot.saved[usize::from(unit.is_decoder())];
    let place = match unit {
        Unit::Block { block, .. } => block,
        Unit::Norm { .. } => saved.len() - 1,
    };
    &mut saved[place]
}

/// The inputs of a stack's layers for a micro-batch.
fn context<'b, T: Ops>(
    slot: &'b Slot<T>,
    batch: &'b MicroBatch<T>,
    noise: Noise<'b>,
    decoder: bool,
) -> LayerContext<'b, T> {
    let bias = slot.bias[usize::from(decoder)].as_ref();
    let source = slot.encoded.as_ref().filter(|_| decoder).map(|encoded| (encoded, batch.lengths(false)));
    LayerContext { noise, lengths: batch.lengths(decoder), bias, source }
}

/// The saved activations of a unit. Begins to read the first tensor of the next unit meanwhile.
fn load_saved<T: Ops>(
    store: &mut Store<T>,
    saved: BlockSaved<Stored<T>>,
    after: Option<&Stored<T>>,
) -> Result<BlockSaved<T>> {
    let order: Vec<Stored<T>> = saved.tensors().into_iter().skip(1).chain(after).cloned().collect();
    // A tensor that has several handles is read for the last time through its last handle.
    let mut following = order.into_iter();
    saved.try_map(&mut |stored| store.get(stored, following.next().as_ref()))
}

fn indices<T>(parameters: &[Parameter<T>], is_meant: impl Fn(Part) -> bool) -> Vec<usize> {
    let meant = parameters.iter().enumerate().filter(|(_, parameter)| is_meant(parameter.part));
    meant.map(|(index, _)| index).collect()
}
