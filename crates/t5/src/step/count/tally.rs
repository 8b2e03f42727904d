//! The sum of a step's events, from the rehearsals of its units.

use std::rc::Rc;

use t5_ops::Calls;

use super::buffers::Buffers;
use super::live::Live;
use super::rehearsal::{BackwardScene, Cost, Rehearsal, Scene, Source};
use super::tallied::{Tallied, at_head};
use super::timeline::Noted;
use super::{Counter, Shape};
use crate::costs::WeightsOnDisk;
use crate::levers::Levers;
use crate::parameters::Part;
use crate::reach::Keep;
use crate::step::disposition::GradientDisposition;
use crate::step::schedule::{Backward, Event, Outline, Stage, ToEmbedding, Unit};

/// The state of a count while it goes through a step.
pub(super) struct Tally<'a> {
    counter: &'a Counter,
    rehearsal: &'a Rehearsal,
    /// One micro-batch.
    micro: Shape,
    /// Where an event is for all micro-batches: the number of full ones, and the shape of a smaller last one.
    full: u64,
    rest: Option<Shape>,
    levers: &'a Levers,
    weights: Rc<WeightsOnDisk>,
    buffers: Buffers<'a>,
    live: Live,
    so_far: Tallied,
    /// Bytes of activations that lie in files now.
    in_files: u64,
    /// How each unit saves its activations, and whether in memory.
    places: Vec<(Unit, Keep, bool)>,
    /// The state of the current backward pass.
    keeps_dz: bool,
    wants_source: bool,
    is_first: bool,
    /// Gradients of first activations that wait in memory.
    pending_embedding_gradients: u64,
    /// Whether the weights of the current part are read matrix by matrix, or by rows. Each scene's cost then has the bytes in memory.
    paged_by_matrix: bool,
    /// Bytes of the next part's weights, while they are prefetched from other processes or to a device.
    fetched: u64,
    /// Bytes of saved activations of the micro-batch before that are being copied from a device.
    outgoing: u64,
    /// Every moment, for a timeline.
    noted: Option<Noted>,
}

impl<'a> Tally<'a> {
    /// Goes through all events of a step over this batch.
    pub fn count(counter: &'a Counter, outline: Outline, batch: Shape, levers: &'a Levers) -> Tallied {
        Tally::new(counter, batch, levers, None).through(outline).so_far
    }

    /// The moments of a step. That of the head includes its chunk of logits.
    pub fn timeline(counter: &'a Counter, outline: Outline, batch: Shape, levers: &'a Levers) -> Noted {
        Tally::new(counter, batch, levers, Some(Noted::default())).through(outline).noted.unwrap_or_default()
    }

    fn new(counter: &'a Counter, batch: Shape, levers: &'a Levers, noted: Option<Noted>) -> Tally<'a> {
        let samples = levers.micro_batch_samples.clamp(1, batch.samples.max(1));
        let (full, rest) = match levers.layer_major {
            Some(_) => (batch.samples / samples, batch.samples % samples),
            None => (1, 0),
        };
        let micro = Shape { samples, ..batch };
        let rehearsal = counter.rehearsal_of(levers);
        Tally {
            counter,
            rehearsal,
            micro,
            full: full as u64,
            rest: (rest > 0).then_some(Shape { samples: rest, ..batch }),
            levers,
            weights: counter.weights_on_disk(levers),
            buffers: Buffers::new(counter, rehearsal, levers),
            live: Live::default(),
            so_far: Tallied::default(),
            in_files: 0,
            places: Vec::new(),
            keeps_dz: false,
            wants_source: false,
            is_first: true,
            pending_embedding_gradients: 0,
            paged_by_matrix: false,
            fetched: 0,
            outgoing: 0,
            noted,
        }
    }

    fn through(mut self, outline: Outline) -> Tally<'a> {
        let events = match self.levers.layer_major {
            Some(_) => outline.training(self.micro_batches() as usize),
            // Every micro-batch is as long as the first.
            None => outline.accumulation(0..1),
        };
        for event in &events {
            self.add_and_note(event);
        }
        if self.levers.layer_major.is_none() {
            self.so_far.passes = std::mem::take(&mut self.so_far.peak);
            // After the last micro-batch, gradients are measured and applied.
            for stage in [Stage::Measure, Stage::Apply] {
                self.hands_over(None, stage);
            }
            let Tallied { peak, passes, handed_over, .. } = &mut self.so_far;
            *handed_over = peak.total().saturating_sub(peak.gradients);
            if passes.total() >= peak.total() {
                *peak = *passes;
            }
        }
        self
    }

    fn add_and_note(&mut self, event: &Event) {
        if let Some(noted) = &mut self.noted {
            noted.begin(self.live);
        }
        self.add(event);
        let (live, before, chunk) = (self.live, self.so_far.head, self.levers.loss_chunk_rows);
        if let Some(noted) = &mut self.noted {
            noted.moment(live);
            if matches!(event, Event::Head { .. }) {
                let head = self.rehearsal.head(self.micro, chunk);
                noted.moment(at_head(before, self.so_far.head_paged_by_matrix, &head));
            }
            noted.end(event);
        }
    }

    fn add(&mut self, event: &Event) {
        match event {
            &Event::Embed { decoder, .. } => {
                let of_table =
                    if self.weights.is_paged_by_matrix(Part::Shared) { 0 } else { self.weights_of(Part::Shared) };
                self.live.weights = of_table + self.fetched;
                self.beside(self.outgoing, |tally| tally.all_through(Scene::Embed { decoder }, |_, _| 0));
            }
            &Event::PageIn(part) => {
                self.fetched = 0;
                self.paged_by_matrix = self.weights.is_paged_by_matrix(self.table(part));
                self.live.weights = if self.paged_by_matrix { 0 } else { self.weights_of(self.table(part)) };
            }
            Event::PageOut(_) => (self.live.weights, self.paged_by_matrix) = (self.fetched, false),
            &Event::Forward { unit, keep, in_memory, .. } => self.forward(unit, keep, in_memory),
            Event::Head { .. } => self.head(),
            Event::WriteTables | Event::ReleaseSpare => self.carry_out(event),
            &Event::Begin { is_last_use, wants_source, .. } => self.begin(is_last_use, wants_source),
            Event::Backward(way) => self.backward(way),
            &Event::HandOver { part: Some(part), stage, .. } => {
                if stage == Stage::Apply && self.levers.has_weights_on_disk() && self.live.weights == 0 {
                    // The part's weights were released while its gradients were summed.
                    self.changes(self.largest_changed(std::iter::once(part)));
                }
                self.hands_over(Some(part), stage);
                self.carry_out(event);
            }
            &Event::HandOver { part: None, stage, disposition } => {
                self.hands_over(None, stage);
                if (stage, disposition) == (Stage::Apply, GradientDisposition::Free) {
                    self.update_the_rest();
                }
            }
            Event::EmbeddingBackward => {
                self.carry_out(event);
                self.run_embedding_backward();
            }
            Event::ReadBack => self.read_back(),
            &Event::Prefetch(part) => {
                self.fetched = self.weights_of(self.table(part));
                self.live.weights += self.fetched;
            }
            Event::ReadAhead(_)
            | Event::Copy(_)
            | Event::Send { .. }
            | Event::EndHead
            | Event::Loss { .. }
            | Event::LossOfSamples { .. }
            | Event::Finish { .. }
            | Event::Close { .. }
            | Event::SumHead
            | Event::Decide
            | Event::ReleaseUnused => {}
        }
    }

    /// Notes a moment at which `workspace` bytes are held beside those that are alive.
    fn moment(&mut self, workspace: u64) {
        let now = Live { workspace: self.live.workspace + workspace, ..self.live };
        if let Some(noted) = &mut self.noted {
            noted.moment(now);
        }
        if now.total() > self.so_far.peak.total() {
            self.so_far.peak = now;
        }
    }

    /// Calls `f` while `bytes` more are held.
    fn beside<R>(&mut self, bytes: u64, f: impl FnOnce(&mut Self) -> R) -> R {
        self.live.workspace += bytes;
        let result = f(self);
        self.live.workspace -= bytes;
        result
    }

    /// Adds the bytes of a unit's weights that a micro-batch reads.
    fn reads(&mut self, unit: Unit, scene: Scene) {
        if self.levers.has_weights_by_matrix() && self.weights.part(unit.part()) > 0 {
            self.so_far.paged_in += self.rehearsal.cost(self.micro, scene).paged_in;
        }
    }

    /// Bytes that a forward scene of a micro-batch saves.
    fn saved_by(&self, scene: Scene) -> u64 {
        self.rehearsal.cost(self.micro, scene).saved
    }

    /// As [`Tally::saved_by`], for a unit whose saved activations lie in a file. Other units count 0.
    fn saved_in_file(&self, unit: Unit) -> u64 {
        let place = self.places.iter().find(|(other, _, in_memory)| *other == unit && !in_memory);
        let scene = |keep| Scene::Forward { unit: self.rehearsal.like(unit), keep };
        place.map_or(0, |&(_, keep, _)| self.saved_by(scene(keep)))
    }

    fn micro_batches(&self) -> u64 {
        self.full + u64::from(self.rest.is_some())
    }

    /// Takes all micro-batches through an event, one after the other. Each leaves `from_files` bytes more in memory than the
    /// scene does. Returns the sum of these bytes.
    fn all_through(&mut self, scene: Scene, from_files: impl Fn(Shape, &Cost) -> i64) -> i64 {
        let rehearsal = self.rehearsal;
        let left = |shape: Shape| {
            let cost = rehearsal.cost(shape, scene);
            (cost, from_files(shape, &cost))
        };
        let (cost, one_from_files) = left(self.micro);
        self.asks(cost.calls);
        let (rest, rest_from_files) = self.rest.map_or((0, 0), |rest| {
            let (cost, from_files) = left(rest);
            (cost.after + from_files, from_files)
        });
        let (one, full) = (cost.after + one_from_files, self.full.cast_signed());
        let total = one * full + rest;
        self.so_far.packed = self.so_far.packed.max(cost.packed);
        self.so_far.on_host = self.so_far.on_host.max(cost.on_host);
        // If each micro-batch leaves something behind, the last holds most; if each frees something, the first does.
        let before = self.live.activations;
        self.live.activations = before.checked_add_signed((total - one).max(0)).expect("bytes of a step");
        let weights = self.live.weights;
        self.live.weights += if self.paged_by_matrix { cost.weights } else { 0 };
        self.moment(cost.extra);
        self.live.weights = weights;
        self.live.activations = before.checked_add_signed(total).expect("no more is freed than is alive");
        one_from_files * full + rest_from_files
    }

    /// Adds these requests for each micro-batch.
    fn asks(&mut self, calls: Calls) {
        self.so_far.calls = self.so_far.calls + calls * self.micro_batches();
    }

    fn forward(&mut self, unit: Unit, keep: Keep, in_memory: bool) {
        let scene = Scene::Forward { unit: self.rehearsal.like(unit), keep };
        self.reads(unit, scene);
        let to_file = |_, cost: &Cost| if in_memory { 0 } else { -cost.saved.cast_signed() };
        let before = self.outgoing;
        self.outgoing = if in_memory || !self.levers.copies_overlap() { 0 } else { self.saved_by(scene) };
        let outgoing = if self.micro_batches() > 1 { before.max(self.outgoing) } else { before };
        let written = self.beside(outgoing, |tally| tally.all_through(scene, to_file)).unsigned_abs();
        self.write(written);
        if keep != Keep::Nothing {
            self.places.push((unit, keep, in_memory));
        }
    }

    fn head(&mut self) {
        self.take_accumulators(self.table(Part::LmHead));
        self.so_far.saved = self.live.activations;
        // The gradient takes the place of the output; `at_head` adds the loss, whose chunk is not known here.
        let outgoing = std::mem::take(&mut self.outgoing);
        self.so_far.head = Live { workspace: self.live.workspace + outgoing, ..self.live };
        self.so_far.head_paged_by_matrix = self.paged_by_matrix;
    }

    fn begin(&mut self, is_last_use: bool, wants_source: bool) {
        (self.keeps_dz, self.wants_source, self.is_first) = (!is_last_use, wants_source, true);
        if !is_last_use {
            self.all_through(Scene::Begin, |_, _| 0);
        }
    }

    fn backward(&mut self, way: &Backward) {
        let &Backward { unit, next, is_last_use, passes_on, trains_table, to_embedding, .. } = way;
        let decoder = unit.is_decoder();
        let Some(&(_, keep, in_memory)) = self.places.iter().find(|(other, ..)| *other == unit) else { return };
        self.take_accumulators(unit.part());
        let is_block = matches!(unit, Unit::Block { .. });
        // These events have no shards. With shards, the table's gradient is computed at the end.
        let to_embedding = match to_embedding {
            ToEmbedding::Now if self.counter.sums > 1 => ToEmbedding::Later,
            to_embedding => to_embedding,
        };
        if to_embedding == ToEmbedding::Now {
            self.take_accumulators(Part::Shared);
        }
        let source = match (decoder && is_block && self.wants_source, self.is_first) {
            (false, _) => Source::NotWanted,
            (true, true) => Source::First,
            (true, false) => Source::Later,
        };
        let rehearsal = self.rehearsal;
        let scene = BackwardScene {
            unit: rehearsal.like(unit),
            keep,
            is_last_use: is_last_use || !in_memory,
            keeps_dz: self.keeps_dz && unit == Unit::Norm { decoder: rehearsal.has_decoder() },
            passes_on,
            trains_table,
            is_first: is_block && self.is_first,
            source,
            into_embedding: to_embedding == ToEmbedding::Now,
        };
        self.reads(unit, Scene::Backward(scene));
        self.is_first = !is_block;
        let saved = |shape| match in_memory {
            true => 0,
            false => rehearsal.cost(shape, Scene::Forward { unit: scene.unit, keep }).saved,
        };
        // Bytes from a file: the unit's activations, and all or the first tensor of those of its next micro-batch or of the next unit.
        let following = next.map(|(next, _)| next).into_iter().chain((self.micro_batches() > 1).then_some(unit));
        let from_file = match self.levers.copies_overlap() {
            true => saved(self.micro) + following.map(|unit| self.saved_in_file(unit)).max().unwrap_or(0),
            false if in_memory => 0,
            false => {
                let firsts = following.map(|unit| self.between_units(unit.is_decoder(), self.micro));
                saved(self.micro) + self.read_ahead(firsts.max().unwrap_or(0))
            }
        };
        // Activations that were read from a file were not alive before.
        let through =
            |tally: &mut Self| tally.all_through(Scene::Backward(scene), |shape, _| saved(shape).cast_signed());
        let read = self.beside(from_file, through);
        if is_last_use {
            self.in_files -= read.unsigned_abs();
        }
        self.buffers.step.copy().expect("counting cannot fail");
        self.live.gradients = self.buffers.bytes();
        if to_embedding == ToEmbedding::Later {
            self.wait_for_embedding(decoder);
        }
    }

    /// Counts the gradient of a stack's first activations, for the whole batch, while it waits for the embedding.
    fn wait_for_embedding(&mut self, decoder: bool) {
        self.asks(self.rehearsal.cost(self.micro, Scene::Enter { decoder }).calls);
        let rest = self.rest.map_or(0, |rest| self.between_units(decoder, rest));
        let bytes = self.between_units(decoder, self.micro) * self.full + rest;
        // This is the gradient that the unit has passed on.
        if self.levers.layer_major.is_some_and(|layers| layers.boundaries_on_disk) {
            self.live.activations -= bytes;
            self.write(bytes);
        } else {
            self.pending_embedding_gradients += bytes;
        }
    }

    /// Gives the trained parameters of a part accumulators, if they have none.
    fn take_accumulators(&mut self, part: Part) {
        // Micro-batch-major, all gradients stay from step to step, and are counted apart.
        if self.levers.layer_major.is_some() {
            self.buffers.take_accumulators(part).expect("counting cannot fail");
            self.live.gradients = self.buffers.bytes();
        }
    }

    /// Has the step carry out an event of its gradients.
    fn carry_out(&mut self, event: &Event) {
        self.buffers.run(event).expect("counting cannot fail");
        self.live.gradients = self.buffers.bytes();
        self.note_files();
    }

    fn write(&mut self, bytes: u64) {
        self.so_far.written += bytes;
        self.in_files += bytes;
        self.note_files();
    }

    fn note_files(&mut self) {
        let gradients = self.buffers.step.written_bytes();
        self.so_far.written += gradients - self.so_far.gradients_written;
        self.so_far.gradients_written = gradients;
        self.so_far.waiting = self.so_far.waiting.max(self.in_files + gradients);
    }

    /// Notes a moment at which the trainer holds memory for gradients that are handed over.
    fn hands_over(&mut self, part: Option<Part>, stage: Stage) {
        let bytes = self.counter.handed_over.bytes(part, stage);
        if bytes > 0 {
            self.moment(bytes);
        }
    }

    /// The gradients that waited for the tables' gradients are added.
    fn run_embedding_backward(&mut self) {
        let is_on_disk = self.levers.layer_major.is_some_and(|layers| layers.gradients_on_disk);
        if !is_on_disk && self.counter.sums == 1 {
            return;
        }
        let reach = self.counter.trained.reach();
        let enters = [false, true].map(|decoder| reach.enters_embedding(decoder));
        if enters.contains(&true) {
            self.take_accumulators(Part::Shared);
        }
        // The gradient that is added, and the next, which is being read.
        let costs = [false, true].map(|decoder| {
            if !enters[usize::from(decoder)] {
                return 0;
            }
            let x = self.between_units(decoder, self.micro);
            x + self.read_ahead(x) + self.rehearsal.cost(self.micro, Scene::Enter { decoder }).extra
        });
        self.moment(costs[0].max(costs[1]));
        self.live.activations -= std::mem::take(&mut self.pending_embedding_gradients);
    }

    /// Bytes read ahead from files, as far as they lie with the other tensors: none for a device, where they are on the host.
    fn read_ahead(&self, bytes: u64) -> u64 {
        if self.rehearsal.ledger().is_on_device() { 0 } else { bytes }
    }

    /// Bytes of the activations, or their gradients, that one unit passes to the next.
    fn between_units(&self, decoder: bool, shape: Shape) -> u64 {
        let tokens = if decoder { shape.target_tokens } else { shape.source_tokens };
        let Counter { config, precisions, .. } = self.counter;
        (shape.samples * tokens) as u64 * (config.d_model * precisions.activations.size_in_bytes()) as u64
    }

    /// Gradients that waited are applied one after the other, while the next is read. Where copies overlap with computation, the next is
    /// copied to the device with its weight.
    fn read_back(&mut self) {
        let at_once = self.changed_at_once();
        let largest = self.buffers.largest_waiting();
        if self.counter.pages_weights(self.levers) {
            self.live.weights = at_once * self.largest_changed(self.buffers.waiting_parts().into_iter());
        }
        self.live.gradients += at_once * largest;
        self.moment(self.read_ahead(largest));
        self.live.gradients -= at_once * largest;
        self.live.weights = 0;
    }

    /// The remaining gradients are applied one after the other. In blocks, a weight is prefetched while the one before is changed.
    fn update_the_rest(&mut self) {
        if !self.counter.pages_weights(self.levers) {
            return;
        }
        let waiting = self.buffers.waiting_parts();
        let rest = self.weights.parts().filter(|part| !waiting.contains(part));
        let (tables, blocks): (Vec<_>, Vec<_>) = rest.partition(|part| part.is_table());
        let of_blocks = self.changed_at_once() * self.largest_changed(blocks.into_iter());
        self.changes(of_blocks.max(self.largest_changed(tables.into_iter())));
    }

    /// Notes the moment at which weights of so many bytes are in memory to be changed, and no others.
    fn changes(&mut self, weights: u64) {
        self.live.weights = weights;
        self.moment(0);
        self.live.weights = 0;
    }

    /// The number of blocks' weights that an update has on a device at a time.
    fn changed_at_once(&self) -> u64 {
        if self.levers.copies_overlap() { 2 } else { 1 }
    }

    /// The bytes of the largest weight of the trained ones among these parts: it is in memory while it is changed.
    fn largest_changed(&self, parts: impl Iterator<Item = Part>) -> u64 {
        let is_changed = |part: &Part| self.weights.written_of(*part, &self.counter.trained) > 0;
        self.weights.largest_of(parts.filter(is_changed))
    }

    /// The part that a table's gradient belongs to.
    fn table(&self, part: Part) -> Part {
        if part == Part::LmHead { Part::of_head(&self.counter.config) } else { part }
    }

    /// The bytes of a part's weights that are resident while the part is in use, if they lie in a file.
    fn weights_of(&self, part: Part) -> u64 {
        if self.counter.pages_weights(self.levers) { self.weights.at_once(part) } else { 0 }
    }
}
