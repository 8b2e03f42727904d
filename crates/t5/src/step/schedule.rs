//! The order of events of a step: a pure function of what is trained, the number of micro-batches and the levers.
//!
//! One list has two readers: [`super::run`] carries it out on tensors, [`super::count`] adds it up. Micro-batch-major, each
//! micro-batch goes through the whole model before the next, and every gradient stays until the end. Layer-major, all
//! micro-batches go through one block before the next block. A block's weights are then needed once, and its
//! gradient can be handed over as soon as the block is done.
//!
//! A layer-major step makes up to two backward passes after one forward pass. The first, [`Stage::Measure`], hands each gradient over
//! for the norm of the whole. The second, [`Stage::Apply`], hands it over for the update, when nothing can fail half-way. Blocks that
//! keep their gradient, and blocks whose gradient waits in a file, are left out of the second pass.

use std::ops::Range;

use super::disposition::GradientDisposition;
use crate::config::Config;
use crate::levers::LayerMajor;
use crate::parameters::Part;
use crate::reach::{Keep, Reach};

/// Why a gradient is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// To be measured: the update has not begun.
    Measure,
    /// For good: its parameter may change.
    Apply,
}

/// A part of a stack that backward enters and leaves at its borders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Norm { decoder: bool },
    Block { decoder: bool, block: usize },
}

impl Unit {
    pub fn is_decoder(self) -> bool {
        match self {
            Unit::Norm { decoder } | Unit::Block { decoder, .. } => decoder,
        }
    }

    fn is_block(self) -> bool {
        matches!(self, Unit::Block { .. })
    }

    /// The part that holds the unit's parameters.
    pub fn part(self) -> Part {
        match self {
            Unit::Norm { decoder: true } => Part::DecoderNorm,
            Unit::Norm { decoder: false } => Part::EncoderNorm,
            Unit::Block { decoder: true, block } => Part::Decoder { block },
            Unit::Block { decoder: false, block } => Part::Encoder { block },
        }
    }

    /// The units that backward enters, in the order of backward.
    pub fn entered(reach: Reach) -> Vec<Unit> {
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

    /// The number of `units`, from the first, that do not keep their gradients. They come before the last `kept` blocks. The norm
    /// just before the first kept block is kept too.
    fn dropped(units: &[Unit], kept: usize) -> usize {
        let blocks = |units: &[Unit]| units.iter().filter(|unit| unit.is_block()).count();
        let mut dropped = (0..=units.len()).rev().find(|&n| blocks(&units[n..]) >= kept).unwrap_or(0);
        while dropped > 0 && dropped < units.len() && !units[dropped - 1].is_block() {
            dropped -= 1;
        }
        dropped
    }

    /// The length of the longest start of `units` that has at most `blocks` blocks. It includes the norms between and behind these blocks.
    fn leading(units: &[Unit], blocks: usize) -> usize {
        if blocks == 0 {
            return 0;
        }
        let count = |units: &[Unit]| units.iter().filter(|unit| unit.is_block()).count();
        (0..=units.len()).rev().find(|&n| count(&units[..n]) <= blocks).unwrap_or(0)
    }
}

/// Where the gradient of a stack's first activations goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToEmbedding {
    /// Nowhere: the table is not trained, or the gradient was added to it before.
    No,
    /// Into the table's gradient at once.
    Now,
    /// Pending until the table's gradient is back from its file.
    Later,
}

/// One event. `of` are micro-batches, which go through the event one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// Position bias and first activations of a stack.
    Embed {
        decoder: bool,
        of: Range<usize>,
    },
    /// Prefetches weights from another process, or to a device, while other weights are in use.
    Prefetch(Part),
    /// Copies prefetched weights, now that something is computed meanwhile.
    Copy(Part),
    /// Weights in a file: begin to read, make resident, release.
    ReadAhead(Part),
    PageIn(Part),
    PageOut(Part),
    /// A unit's output, with the saved activations in memory or in a file.
    Forward {
        unit: Unit,
        of: Range<usize>,
        keep: Keep,
        in_memory: bool,
    },
    /// Loss of the decoder's output, without gradients.
    Loss {
        of: Range<usize>,
    },
    /// The same, for each sample.
    LossOfSamples {
        of: Range<usize>,
    },
    /// Loss, and the gradients of the decoder's output and of the head's table.
    Head {
        of: Range<usize>,
    },
    /// The gradients of this shard are complete: a part's, or all. With the head's part, or with all, the shard's loss is complete, too.
    Close {
        shard: usize,
        part: Option<Part>,
    },
    /// Begins to sum the head's contribution to the table's gradient over all shards, before the table's rows add theirs.
    SumHead,
    /// The sum of [`Event::SumHead`] is needed.
    EndHead,
    /// The gradients of a part, and with them these shards, are complete, and begin to be summed. They are handed over later.
    Send {
        part: Part,
        closes: Vec<usize>,
    },
    /// The tables' gradients go to a file until backward has finished.
    WriteTables,
    /// The gradient of the decoder's output enters backward.
    Begin {
        of: Range<usize>,
        is_last_use: bool,
        wants_source: bool,
    },
    /// A unit's backward.
    Backward(Backward),
    /// The position biases and the encoder's output of these micro-batches are not needed by any later event.
    Finish {
        of: Range<usize>,
    },
    /// Hands over the complete gradients of a part, or of all.
    HandOver {
        part: Option<Part>,
        stage: Stage,
        disposition: GradientDisposition,
    },
    /// Frees accumulators that no later parameter uses.
    ReleaseSpare,
    /// The tables' gradients are read back from their file, and those of the embedding's rows are added.
    EmbeddingBackward,
    /// Gradients are read back from their file one by one, handed over to be applied, and freed.
    ReadBack,
    /// The observer decides whether the update is made, now that the gradient is measured.
    Decide,
    /// Copies of weights that were changed are freed, and their memory is given back to the system.
    ReleaseUnused,
}

/// The backward of a unit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backward {
    pub unit: Unit,
    pub of: Range<usize>,
    /// The unit that follows, with its first micro-batch, whose saved activations may be read ahead.
    pub next: Option<(Unit, usize)>,
    /// Whether saved activations are freed.
    pub is_last_use: bool,
    /// Whether the gradient of its input is wanted.
    pub passes_on: bool,
    /// Whether the stack's position table is trained.
    pub trains_table: bool,
    pub to_embedding: ToEmbedding,
}

/// How a step is carried out, apart from the number of its micro-batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outline<'a> {
    /// How far backward reaches.
    pub reach: Reach,
    /// Whether the position tables of encoder and decoder are trained: the one table of all blocks, or one table for each block.
    pub trains_tables: [&'a [bool]; 2],
    /// Blocks that keep only their input, from the first.
    pub recompute_blocks: usize,
    /// Layer-major, or else micro-batch-major.
    pub layer_major: Option<&'a LayerMajor>,
    /// Whether weights lie in a file, or come from other processes.
    pub has_paged_weights: bool,
    /// Whether data that processes send to each other is transferred while something else is computed.
    pub overlaps: bool,
    /// Whether copies to a device and from it overlap with computation.
    pub copies_overlap: bool,
}

/// Shards by number, each with its micro-batches.
type Shards<'a> = &'a [(usize, Range<usize>)];

/// One backward pass through `units`.
struct Pass<'a> {
    units: &'a [Unit],
    stage: Stage,
    /// The number of units, from the first, that a second pass goes through.
    again: usize,
    /// The next use of gradients that are complete; `None` where they are incomplete, because other micro-batches follow.
    hand_over: Option<HandOver>,
    /// Shards that this pass over all units completes, and with them all gradients. `None` where other micro-batches follow.
    completes: Option<&'a [usize]>,
    /// Shards, each of which sums its gradients separately, or none.
    shards: Shards<'a>,
}

/// The gradients of a part are complete, and with them some shards.
fn send(part: Part, closes: &[usize]) -> Event {
    Event::Send { part, closes: closes.to_vec() }
}

/// The use of the gradients of the first `dropped` units. The other units keep theirs.
#[derive(Clone, Copy)]
struct HandOver {
    dropped: usize,
    disposition: GradientDisposition,
}

impl Outline<'_> {
    /// A pass that trains nothing.
    pub fn inference(config: &Config, has_paged_weights: bool) -> Self {
        let reach = Reach::nothing(config);
        let trains_tables = [&[][..]; 2];
        let (overlaps, copies_overlap) = (false, false);
        Outline {
            reach,
            trains_tables,
            recompute_blocks: 0,
            layer_major: None,
            has_paged_weights,
            overlaps,
            copies_overlap,
        }
    }

    /// The encoder, or both stacks, without keeping anything.
    pub fn forward_only(self, decoder: bool) -> Vec<Event> {
        self.forward_of(0..1, decoder)
    }

    fn forward_of(self, of: Range<usize>, decoder: bool) -> Vec<Event> {
        let mut events = Vec::new();
        let stacks = self.stacks().iter().filter(|stack| decoder || !**stack);
        stacks.for_each(|&decoder| self.forward_stack(decoder, of.clone(), &[], 0, &mut events));
        events
    }

    fn has_decoder(self) -> bool {
        self.reach.decoder.blocks() > 0
    }

    /// The stacks, each by whether it is the decoder.
    fn stacks(self) -> &'static [bool] {
        if self.has_decoder() { &[false, true] } else { &[false] }
    }

    /// The loss of a micro-batch, without gradients.
    pub fn evaluation(self) -> Vec<Event> {
        let mut events = self.forward_only(true);
        self.head([Event::Loss { of: 0..1 }], &mut events);
        events
    }

    /// The loss of each sample of `n` micro-batches, without gradients. Each block's weights are paged in once for all of them.
    pub fn losses_of_samples(self, n: usize) -> Vec<Event> {
        let mut events = self.forward_of(0..n, true);
        self.head([Event::LossOfSamples { of: 0..n }], &mut events);
        events
    }

    /// A whole step over `n` micro-batches.
    pub fn training(self, n: usize) -> Vec<Event> {
        self.training_of_shards(n, &[], 0)
    }

    /// A whole step over `n` micro-batches, where the gradients of each of `shards` are summed separately. Micro-batch-major, the events
    /// of `idle` more micro-batches follow, which compute nothing: every process asks for weights as often as the one with most work.
    pub fn training_of_shards(self, n: usize, shards: Shards, idle: usize) -> Vec<Event> {
        if let Some(layers) = self.layer_major {
            return self.layer_major_step(layers, n, shards);
        }
        let (rounds, mut events, mut open) = (n + idle, Vec::new(), shards.iter().peekable());
        let close = |(shard, _): &(usize, Range<usize>)| Event::Close { shard: *shard, part: None };
        for m in 0..rounds {
            while let Some(complete) = open.next_if(|(_, of)| of.end <= m) {
                events.push(close(complete));
            }
            let of = if m < n { m..m + 1 } else { n..n };
            let is_last = self.overlaps && m + 1 == rounds;
            let completes: Vec<usize> = open.clone().map(|(shard, _)| *shard).collect();
            self.round(of, is_last.then_some(completes.as_slice()), &mut events);
        }
        events.extend(open.map(close));
        if rounds == 0 {
            // The sums that other processes begin in their last round.
            self.send_all(&mut events);
        }
        self.micro_batch_major_step(events)
    }

    fn send_all(self, events: &mut Vec<Event>) {
        let parts = Unit::entered(self.reach).into_iter().map(Unit::part);
        if self.overlaps {
            events.extend(std::iter::once(Part::LmHead).chain(parts).map(|part| send(part, &[])));
        }
    }

    /// Forward and backward of each micro-batch. Gradients are accumulated, and none is handed over.
    pub fn accumulation(self, of: Range<usize>) -> Vec<Event> {
        let mut events = Vec::new();
        of.for_each(|m| self.round(m..m + 1, None, &mut events));
        events
    }

    /// Forward and backward of some micro-batches. With `completes`, these shards are complete, and so is each gradient with its unit.
    fn round(self, of: Range<usize>, completes: Option<&[usize]>, events: &mut Vec<Event>) {
        let units = Unit::entered(self.reach);
        self.forward(of.clone(), &units, units.len(), events);
        if let Some(shards) = completes {
            events.push(send(Part::LmHead, shards));
        }
        let pass = Pass { units: &units, stage: Stage::Measure, again: 0, hand_over: None, completes, shards: &[] };
        self.backward(of, &pass, events);
    }

    fn micro_batch_major_step(self, mut events: Vec<Event>) -> Vec<Event> {
        events.push(Event::HandOver { part: None, stage: Stage::Measure, disposition: GradientDisposition::Keep });
        events.push(Event::Decide);
        events.push(Event::HandOver { part: None, stage: Stage::Apply, disposition: GradientDisposition::Keep });
        events
    }

    fn layer_major_step(self, layers: &LayerMajor, n: usize, shards: Shards) -> Vec<Event> {
        let units = Unit::entered(self.reach);
        let dropped = Unit::dropped(&units, layers.kept_gradient_blocks);
        // Where gradients wait in a file, no unit goes through a second pass.
        let again = if layers.gradients_on_disk { 0 } else { dropped };
        let in_memory = match layers.boundaries_on_disk {
            true => Unit::leading(&units, layers.blocks_in_memory),
            false => units.len(),
        };
        // A unit that goes through a second pass is recomputed in the first pass, too.
        let recompute_blocks = if again == 0 { self.recompute_blocks } else { usize::MAX };
        let outline = Outline { recompute_blocks, ..self };
        let mut events = Vec::new();
        for &decoder in self.stacks() {
            outline.forward_stack(decoder, 0..n, &units, in_memory, &mut events);
        }
        let is_summed_behind = outline.layer_major_head(n, shards, layers.gradients_on_disk, &mut events);
        let disposition =
            if layers.gradients_on_disk { GradientDisposition::Write } else { GradientDisposition::Reuse };
        if layers.gradients_on_disk {
            events.push(Event::WriteTables);
        }
        let hand_over = Some(HandOver { dropped, disposition });
        let pass = Pass { units: &units, stage: Stage::Measure, again, hand_over, completes: None, shards };
        outline.backward(0..n, &pass, &mut events);
        if is_summed_behind {
            events.push(Event::EndHead);
        }
        events.push(Event::EmbeddingBackward);
        for part in [Part::Shared, Part::LmHead] {
            let (stage, disposition) = (Stage::Measure, GradientDisposition::Keep);
            events.push(Event::HandOver { part: Some(part), stage, disposition });
        }
        // Accumulators of tables whose gradient another process holds.
        events.push(Event::ReleaseSpare);
        events.push(Event::Decide);
        if again > 0 {
            let pass = Pass { units: &units[..again], stage: Stage::Apply, ..pass };
            outline.backward(0..n, &pass, &mut events);
        }
        if layers.gradients_on_disk {
            events.push(Event::ReadBack);
        }
        events.push(Event::HandOver { part: None, stage: Stage::Apply, disposition: GradientDisposition::Free });
        if self.has_paged_weights {
            events.push(Event::ReleaseUnused);
        }
        events
    }

    /// Loss and backward of the head. Returns whether the head's contribution is still being summed, while backward goes on.
    fn layer_major_head(self, n: usize, shards: Shards, gradients_on_disk: bool, events: &mut Vec<Event>) -> bool {
        let head = if shards.is_empty() { vec![Event::Head { of: 0..n }] } else { Vec::new() };
        let of_shard = |(shard, of): &(usize, Range<usize>)| {
            [Event::Head { of: of.clone() }, Event::Close { shard: *shard, part: Some(Part::LmHead) }]
        };
        self.head(head.into_iter().chain(shards.iter().flat_map(of_shard)), events);
        // The gradients of tables that go to a file are summed after they were read back.
        let sends_head = self.overlaps && !gradients_on_disk;
        if sends_head {
            events.push(send(Part::LmHead, &[]));
        }
        let sums_head = !shards.is_empty();
        if sums_head {
            events.push(Event::SumHead);
        }
        if sums_head && !sends_head {
            events.push(Event::EndHead);
        }
        sums_head && sends_head
    }

    /// Forward of both stacks and the head, with the first `in_memory` of `units` saving in memory.
    fn forward(self, of: Range<usize>, units: &[Unit], in_memory: usize, events: &mut Vec<Event>) {
        for &decoder in self.stacks() {
            self.forward_stack(decoder, of.clone(), units, in_memory, events);
        }
        self.head([Event::Head { of }], events);
    }

    fn forward_stack(self, decoder: bool, of: Range<usize>, units: &[Unit], in_memory: usize, events: &mut Vec<Event>) {
        let reach = if decoder { self.reach.decoder } else { self.reach.encoder };
        events.push(Event::Embed { decoder, of: of.clone() });
        self.paging(Event::PageOut(Part::Shared), events);
        let place = |unit| units.iter().position(|other| *other == unit);
        let blocks = (0..reach.blocks()).map(|block| Unit::Block { decoder, block });
        for unit in blocks.chain([Unit::Norm { decoder }]) {
            let next = match unit {
                Unit::Block { block, .. } if block + 1 < reach.blocks() => {
                    Some(Unit::Block { decoder, block: block + 1 }.part())
                }
                Unit::Block { .. } if decoder || !self.has_decoder() => Some(Part::LmHead),
                Unit::Block { .. } => Some(Part::Decoder { block: 0 }),
                Unit::Norm { .. } => None,
            };
            if unit.is_block() {
                self.paging(Event::PageIn(unit.part()), events);
            }
            if let Some(next) = next {
                self.read_ahead(next, events);
            }
            let in_memory = place(unit).is_none_or(|place| place < in_memory);
            events.push(Event::Forward { unit, of: of.clone(), keep: self.keep(unit), in_memory });
            self.copy(next, events);
            if unit.is_block() {
                self.paging(Event::PageOut(unit.part()), events);
            }
        }
    }

    fn keep(self, unit: Unit) -> Keep {
        let again = if self.layer_major.is_some_and(|layers| layers.heads_kept) { Keep::Heads } else { Keep::Input };
        match unit {
            Unit::Norm { decoder } => {
                let reach = if decoder { self.reach.decoder } else { self.reach.encoder };
                if reach.enters_norm() { Keep::Input } else { Keep::Nothing }
            }
            Unit::Block { decoder: true, block } => {
                self.reach.keep_decoder_block(block, self.recompute_blocks).instead_of_input(again)
            }
            Unit::Block { decoder: false, block } => {
                self.reach.keep_encoder_block(block, self.recompute_blocks).instead_of_input(again)
            }
        }
    }

    fn head(self, of: impl IntoIterator<Item = Event>, events: &mut Vec<Event>) {
        self.paging(Event::PageIn(Part::LmHead), events);
        events.extend(of);
        self.paging(Event::PageOut(Part::LmHead), events);
    }

    fn read_ahead(self, part: Part, events: &mut Vec<Event>) {
        self.paging(Event::ReadAhead(part), events);
        if self.overlaps || self.copies_overlap {
            self.paging(Event::Prefetch(part), events);
        }
    }

    /// Copies prefetched weights to the device while an event is computed.
    fn copy(self, next: Option<Part>, events: &mut Vec<Event>) {
        if let Some(part) = next.filter(|_| self.copies_overlap) {
            self.paging(Event::Copy(part), events);
        }
    }

    fn paging(self, event: Event, events: &mut Vec<Event>) {
        if self.has_paged_weights {
            events.push(event);
        }
    }

    /// Whether backward of a unit adds to the gradient of a position bias that a pass through `units` uses.
    fn trains_table(self, unit: Unit, units: &[Unit]) -> bool {
        let Unit::Block { decoder, block } = unit else { return false };
        match self.trains_tables[usize::from(decoder)] {
            // The bias of all blocks: block 0, the last in backward, hands its gradient to the table.
            [is_trained] => *is_trained && units.contains(&Unit::Block { decoder, block: 0 }),
            own => own.get(block).is_some_and(|is_trained| *is_trained),
        }
    }

    /// Where the gradient of a unit's input goes, if that is the embedding.
    fn to_embedding(self, unit: Unit, &Pass { stage, hand_over, shards, .. }: &Pass) -> ToEmbedding {
        let is_first_block = matches!(unit, Unit::Block { block: 0, .. });
        match hand_over {
            _ if !(is_first_block && stage == Stage::Measure && self.reach.enters_embedding(unit.is_decoder())) => {
                ToEmbedding::No
            }
            Some(HandOver { disposition: GradientDisposition::Write, .. }) => ToEmbedding::Later,
            // The table's sums are kept apart from those of the blocks.
            _ if !shards.is_empty() => ToEmbedding::Later,
            _ => ToEmbedding::Now,
        }
    }

    fn backward(self, of: Range<usize>, pass: &Pass, events: &mut Vec<Event>) {
        let &Pass { units, stage, again, hand_over, completes, shards } = pass;
        let is_last_pass = stage == Stage::Apply || again == 0;
        let wants_source = self.has_decoder() && units.iter().any(|unit| !unit.is_decoder());
        // The gradients of a unit are summed while the next unit is computed.
        let (lag, mut behind) = (usize::from(self.overlaps), None);
        events.push(Event::Begin { of: of.clone(), is_last_use: is_last_pass, wants_source });
        for (position, &unit) in units.iter().enumerate() {
            let (decoder, next) = (unit.is_decoder(), units.get(position + 1).copied());
            if hand_over.is_some_and(|hand_over| position == hand_over.dropped + lag) {
                events.push(Event::ReleaseSpare);
            }
            self.paging(Event::PageIn(unit.part()), events);
            next.into_iter().for_each(|next| self.read_ahead(next.part(), events));
            let to_embedding = self.to_embedding(unit, pass);
            let backward = Backward {
                unit,
                of: of.clone(),
                next: next.map(|next| (next, of.start)),
                is_last_use: is_last_pass || position >= again,
                passes_on: to_embedding != ToEmbedding::No
                    || next.is_some_and(|next| next.is_block() && next.is_decoder() == decoder),
                trains_table: self.trains_table(unit, units),
                to_embedding,
            };
            for (number, (shard, of)) in shards.iter().enumerate() {
                let here = shards.get(number + 1).map(|(_, of)| (unit, of.start));
                let next = here.or(backward.next);
                events.push(Event::Backward(Backward { of: of.clone(), next, ..backward.clone() }));
                events.push(Event::Close { shard: *shard, part: Some(unit.part()) });
            }
            if shards.is_empty() {
                events.push(Event::Backward(backward));
            }
            self.copy(next.map(Unit::part), events);
            if let Some(shards) = completes {
                events.push(send(unit.part(), shards));
            }
            let handed_over = hand_over.map(|HandOver { dropped, disposition }| {
                let disposition = if position < dropped { disposition } else { GradientDisposition::Keep };
                Event::HandOver { part: Some(unit.part()), stage, disposition }
            });
            if self.overlaps {
                events.extend(handed_over.is_some().then(|| send(unit.part(), &[])));
                self.paging(Event::PageOut(unit.part()), events);
                events.extend(std::mem::replace(&mut behind, handed_over));
            } else {
                events.extend(handed_over);
                self.paging(Event::PageOut(unit.part()), events);
            }
        }
        events.extend(behind);
        if is_last_pass {
            events.push(Event::Finish { of });
        }
        if hand_over.is_some() {
            events.push(Event::ReleaseSpare);
        }
    }
}

#[cfg(test)]
mod tests;
