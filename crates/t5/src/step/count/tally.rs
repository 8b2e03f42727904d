//! The sum of a step's events, from the rehearsals of its units.

use std::rc::Rc;

use t5_ops::Calls;

use super::live::Live;
use super::rehearsal::{BackwardScene, Cost, Scene, Source};
use super::tallied::{Tallied, at_head};
use super::timeline::Noted;
use super::{Counter, Shape};
use crate::costs::WeightsOnDisk;
use crate::levers::Levers;
use crate::ops::Kept;
use crate::parameters::{ParameterSpec, Part};
use crate::reach::Keep;
use crate::step::disposition::{Accumulator, GradientDisposition};
use crate::step::schedule::{Backward, Event, Outline, Stage, ToEmbedding, Unit};

/// Shape and bytes of an accumulator. A spare accumulator is used again for another of the same kind.
type Kind<'a> = (&'a [usize], u64);

/// The state of a count while it goes through a step.
pub(super) struct Tally<'a> {
    counter: &'a Counter,
    /// One micro-batch.
    micro: Shape,
    /// Where an event is for all micro-batches: the number of full ones, and the shape of a smaller last one.
    full: u64,
    rest: Option<Shape>,
    levers: &'a Levers,
    weights: Rc<WeightsOnDisk>,
    live: Live,
    peak: Live,
    passes: Live,
    handed_over: u64,
    head: Live,
    saved: u64,
    written: u64,
    gradients_written: u64,
    /// Bytes that wait in files now, and the most so far.
    in_files: u64,
    most_in_files: u64,
    packed: Kept,
    on_host: u64,
    paged_in: u64,
    calls: Calls,
    spare: Vec<Kind<'a>>,
    /// How each unit saves its activations, and whether in memory.
    places: Vec<(Unit, Keep, bool)>,
    /// The state of the current backward pass.
    keeps_dz: bool,
    wants_source: bool,
    is_first: bool,
    has_embedding: bool,
    /// Gradients of first activations that wait in memory, and parts whose gradients wait in a file.
    pending_embedding_gradients: u64,
    waiting: Vec<Part>,
    /// Whether the weights of the current part are read matrix by matrix, or by rows. Each scene's cost then has the bytes in memory.
    paged_by_matrix: bool,
    head_paged_by_matrix: bool,
    /// Bytes of the next part's weights, while they are prefetched from other processes or to a device.
    fetched: u64,
    /// Bytes that are being copied from a device: saved activations of the micro-batch before, and gradients.
    outgoing: u64,
    leaving_gradients: u64,
    /// Every moment, for a timeline.
    noted: Option<Noted>,
}

impl<'a> Tally<'a> {
    /// Goes through all events of a step over this batch.
    pub fn count(counter: &'a Counter, outline: Outline, batch: Shape, levers: &'a Levers) -> Tallied {
        let tally = Tally::through(counter, outline, batch, levers, None);
        let Tally { peak, head, saved, written, gradients_written, most_in_files: waiting, packed, on_host, .. } =
            tally;
        let Tally { paged_in, calls, passes, handed_over, head_paged_by_matrix, .. } = tally;
        Tallied {
            peak,
            passes,
            handed_over,
            head,
            head_paged_by_matrix,
            saved,
            written,
            gradients_written,
            waiting,
            packed,
            on_host,
            paged_in,
            calls,
        }
    }

    /// The moments of a step. That of the head includes its chunk of logits.
    pub fn timeline(counter: &'a Counter, outline: Outline, batch: Shape, levers: &'a Levers) -> Noted {
        Tally::through(counter, outline, batch, levers, Some(Noted::default())).noted.unwrap_or_default()
    }

    fn through(
        counter: &'a Counter,
        outline: Outline,
        batch: Shape,
        levers: &'a Levers,
        noted: Option<Noted>,
    ) -> Tally<'a> {
        let samples = levers.micro_batch_samples.clamp(1, batch.samples.max(1));
        let (full, rest) = match levers.layer_major {
            Some(_) => (batch.samples / samples, batch.samples % samples),
            None => (1, 0),
        };
        let micro = Shape { samples, ..batch };
        let mut tally = Tally {
            counter,
            micro,
            full: full as u64,
            rest: (rest > 0).then_some(Shape { samples: rest, ..batch }),
            levers,
            weights: counter.weights_on_disk(levers),
            live: Live::default(),
            peak: Live::default(),
            passes: Live::default(),
            handed_over: 0,
            head: Live::default(),
            saved: 0,
            written: 0,
            gradients_written: 0,
            in_files: 0,
            most_in_files: 0,
            packed: Kept::default(),
            on_host: 0,
            paged_in: 0,
            calls: Calls::default(),
            spare: Vec::new(),
            places: Vec::new(),
            keeps_dz: false,
            wants_source: false,
            is_first: true,
            has_embedding: false,
            pending_embedding_gradients: 0,
            waiting: Vec::new(),
            paged_by_matrix: false,
            head_paged_by_matrix: false,
            fetched: 0,
            outgoing: 0,
            leaving_gradients: 0,
            noted,
        };
        let events = match levers.layer_major {
            Some(_) => outline.training(full + usize::from(rest > 0)),
            // Every micro-batch is as long as the first.
            None => outline.accumulation(0..1),
        };
        for event in &events {
            tally.add_and_note(event);
        }
        if levers.layer_major.is_none() {
            tally.passes = std::mem::take(&mut tally.peak);
            // After the last micro-batch, gradients are measured and applied.
            for stage in [Stage::Measure, Stage::Apply] {
                tally.hands_over(None, stage);
            }
            tally.handed_over = tally.peak.total().saturating_sub(tally.peak.gradients);
            if tally.passes.total() >= tally.peak.total() {
                tally.peak = tally.passes;
            }
        }
        tally
    }

    fn add_and_note(&mut self, event: &Event) {
        if let Some(noted) = &mut self.noted {
            noted.begin(self.live);
        }
        self.add(event);
        let (live, before, micro, chunk) = (self.live, self.head, self.micro, self.levers.loss_chunk_rows);
        if let Some(noted) = &mut self.noted {
            noted.moment(live);
            if matches!(event, Event::Head { .. }) {
                let head = self.counter.rehearsal_of(self.levers).head(micro, chunk);
                noted.moment(at_head(before, self.head_paged_by_matrix, &head));
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
            &Event::Forward { unit, keep, in_memory, .. } => {
                let scene = Scene::Forward { unit: self.counter.rehearsal_of(self.levers).like(unit), keep };
                self.reads(unit, scene);
                let to_file = |_, cost: &Cost| if in_memory { 0 } else { -cost.saved.cast_signed() };
                let before = self.outgoing;
                self.outgoing = if in_memory || !self.levers.copies_overlap() { 0 } else { self.saved_by(scene) };
                let outgoing = if self.has_more() { before.max(self.outgoing) } else { before };
                let written = self.beside(outgoing, |tally| tally.all_through(scene, to_file)).unsigned_abs();
                self.write(written);
                if keep != Keep::Nothing {
                    self.places.push((unit, keep, in_memory));
                }
            }
            Event::Head { .. } => {
                if self.levers.layer_major.is_some() {
                    self.live.gradients += self.sums() * self.gradients_of(self.table(Part::LmHead));
                }
                self.saved = self.live.activations;
                // The gradient takes the place of the output; `at_head` adds the loss, whose chunk is not known here.
                let outgoing = std::mem::take(&mut self.outgoing);
                self.head = Live { workspace: self.live.workspace + outgoing, ..self.live };
                self.head_paged_by_matrix = self.paged_by_matrix;
            }
            Event::WriteTables => {
                let bytes = self.gradients_of(self.table(Part::LmHead));
                match self.levers.copies_overlap() {
                    true => self.leaving_gradients += bytes,
                    false => self.live.gradients -= bytes,
                }
                self.write_gradients(bytes);
            }
            &Event::Begin { is_last_use, wants_source, .. } => {
                (self.keeps_dz, self.wants_source, self.is_first) = (!is_last_use, wants_source, true);
                if !is_last_use {
                    self.all_through(Scene::Begin, |_, _| 0);
                }
            }
            Event::Backward(way) => self.backward(way),
            &Event::HandOver { part: Some(part), stage, disposition } => {
                if stage == Stage::Apply && self.levers.has_weights_on_disk() && self.live.weights == 0 {
                    // The part's weights were released while its gradients were summed.
                    self.live.weights = self.largest_changed(std::iter::once(part));
                    self.moment(0);
                    self.live.weights = 0;
                }
                self.hands_over(Some(part), stage);
                self.hand_over(part, disposition);
            }
            &Event::HandOver { part: None, stage, disposition } => {
                self.hands_over(None, stage);
                if (stage, disposition) == (Stage::Apply, GradientDisposition::Free) {
                    self.update_the_rest();
                }
            }
            Event::ReleaseSpare => {
                let spare = self.spare.drain(..).map(|(_, bytes)| bytes).sum::<u64>();
                self.live.gradients -= spare;
            }
            Event::EmbeddingBackward => self.run_embedding_backward(),
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
        if now.total() > self.peak.total() {
            self.peak = now;
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
            self.paged_in += self.counter.rehearsal_of(self.levers).cost(self.micro, scene).paged_in;
        }
    }

    /// Bytes that a forward scene of a micro-batch saves.
    fn saved_by(&self, scene: Scene) -> u64 {
        self.counter.rehearsal_of(self.levers).cost(self.micro, scene).saved
    }

    /// As [`Tally::saved_by`], for a unit whose saved activations lie in a file. Other units count 0.
    fn saved_in_file(&self, unit: Unit) -> u64 {
        let place = self.places.iter().find(|(other, _, in_memory)| *other == unit && !in_memory);
        let scene = |keep| Scene::Forward { unit: self.counter.rehearsal_of(self.levers).like(unit), keep };
        place.map_or(0, |&(_, keep, _)| self.saved_by(scene(keep)))
    }

    /// Whether there is more than one micro-batch.
    fn has_more(&self) -> bool {
        self.full + u64::from(self.rest.is_some()) > 1
    }

    /// Takes all micro-batches through an event, one after the other. Each leaves `from_files` bytes more in memory than the
    /// scene does. Returns the sum of these bytes.
    fn all_through(&mut self, scene: Scene, from_files: impl Fn(Shape, &Cost) -> i64) -> i64 {
        let rehearsal = self.counter.rehearsal_of(self.levers);
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
        self.packed = self.packed.max(cost.packed);
        self.on_host = self.on_host.max(cost.on_host);
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
        self.calls = self.calls + calls * (self.full + u64::from(self.rest.is_some()));
    }

    fn backward(&mut self, way: &Backward) {
        let &Backward { unit, next, is_last_use, passes_on, trains_table, to_embedding, .. } = way;
        let decoder = unit.is_decoder();
        let Some(&(_, keep, in_memory)) = self.places.iter().find(|(other, ..)| *other == unit) else { return };
        self.add_gradients(unit.part());
        let is_block = matches!(unit, Unit::Block { .. });
        if to_embedding == ToEmbedding::Now && !std::mem::replace(&mut self.has_embedding, true) {
            // A tied head has begun this gradient already.
            if self.table(Part::LmHead) != Part::Shared && self.levers.layer_major.is_some() {
                self.live.gradients += self.gradients_of(Part::Shared);
            }
        }
        let source = match (decoder && is_block && self.wants_source, self.is_first) {
            (false, _) => Source::NotWanted,
            (true, true) => Source::First,
            (true, false) => Source::Later,
        };
        let rehearsal = self.counter.rehearsal_of(self.levers);
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
        let following = next.map(|(next, _)| next).into_iter().chain(self.has_more().then_some(unit));
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
        self.live.gradients -= std::mem::take(&mut self.leaving_gradients);
        if to_embedding == ToEmbedding::Later {
            self.wait_for_embedding(decoder);
        }
    }

    /// Counts the gradient of a stack's first activations, for the whole batch, while it waits for the embedding.
    fn wait_for_embedding(&mut self, decoder: bool) {
        self.asks(self.counter.rehearsal_of(self.levers).cost(self.micro, Scene::Enter { decoder }).calls);
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

    fn add_gradients(&mut self, part: Part) {
        // Micro-batch-major, all gradients stay from step to step, and are counted apart.
        if self.levers.layer_major.is_none() {
            return;
        }
        for spec in self.counter.trained.part(part).iter().flat_map(|spec| std::iter::repeat_n(spec, self.counter.sums))
        {
            let kind = (spec.shape.as_slice(), self.bytes_of(spec));
            match self.spare.iter().position(|spare| *spare == kind) {
                Some(place) => drop(self.spare.swap_remove(place)),
                None => self.live.gradients += kind.1,
            }
        }
    }

    fn write(&mut self, bytes: u64) {
        self.written += bytes;
        self.in_files += bytes;
        self.most_in_files = self.most_in_files.max(self.in_files);
    }

    fn write_gradients(&mut self, bytes: u64) {
        self.gradients_written += bytes;
        self.write(bytes);
    }

    /// Notes a moment at which the trainer holds memory for gradients that are handed over.
    fn hands_over(&mut self, part: Option<Part>, stage: Stage) {
        let bytes = self.counter.handed_over.bytes(part, stage);
        if bytes > 0 {
            self.moment(bytes);
        }
    }

    fn hand_over(&mut self, part: Part, disposition: GradientDisposition) {
        let counter = self.counter;
        for (spec, is_held) in counter.trained.held_of(part) {
            let kind = (spec.shape.as_slice(), self.bytes_of(spec));
            if disposition == GradientDisposition::Write && is_held {
                self.write_gradients(kind.1);
            }
            // The sums of other shards were added to the first.
            self.spare.extend(std::iter::repeat_n(kind, counter.sums - 1));
            match disposition.accumulator(is_held, self.levers.copies_overlap()) {
                Accumulator::Stays | Accumulator::IsFreed => {}
                Accumulator::IsSpare => self.spare.push(kind),
                Accumulator::Leaves => self.leaving_gradients += kind.1,
            }
        }
        if disposition == GradientDisposition::Write {
            self.waiting.push(part);
        }
    }

    /// The tables' gradients are read back, and the gradients that waited for them are added.
    fn run_embedding_backward(&mut self) {
        self.live.gradients -= std::mem::take(&mut self.leaving_gradients);
        let is_on_disk = self.levers.layer_major.is_some_and(|layers| layers.gradients_on_disk);
        if !is_on_disk && self.sums() == 1 {
            return;
        }
        let reach = self.counter.trained.reach();
        let enters = [false, true].map(|decoder| reach.enters_embedding(decoder));
        let head = self.table(Part::LmHead);
        if is_on_disk {
            self.live.gradients += self.gradients_of(head);
        }
        if enters.contains(&true) && (head != Part::Shared || !is_on_disk) {
            self.live.gradients += self.sums() * self.gradients_of(Part::Shared);
        }
        // The gradient that is added, and the next, which is being read.
        let costs = [false, true].map(|decoder| {
            if !enters[usize::from(decoder)] {
                return 0;
            }
            let x = self.between_units(decoder, self.micro);
            x + self.read_ahead(x)
                + self.counter.rehearsal_of(self.levers).cost(self.micro, Scene::Enter { decoder }).extra
        });
        self.moment(costs[0].max(costs[1]));
        self.live.activations -= std::mem::take(&mut self.pending_embedding_gradients);
    }

    /// Bytes read ahead from files, as far as they lie with the other tensors: none for a device, where they are on the host.
    fn read_ahead(&self, bytes: u64) -> u64 {
        if self.counter.rehearsal_of(self.levers).ledger().is_on_device() { 0 } else { bytes }
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
        let specs = || self.waiting.iter().flat_map(|part| self.counter.trained.part(*part));
        let largest = specs().map(|spec| self.bytes_of(spec)).max().unwrap_or(0);
        if self.counter.pages_weights(self.levers) {
            self.live.weights = at_once * self.largest_changed(self.waiting.iter().copied());
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
        let rest = self.weights.parts().filter(|part| !self.waiting.contains(part));
        let (tables, blocks): (Vec<_>, Vec<_>) = rest.partition(|part| part.is_table());
        let of_blocks = self.changed_at_once() * self.largest_changed(blocks.into_iter());
        self.live.weights = of_blocks.max(self.largest_changed(tables.into_iter()));
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

    /// The number of sums of a gradient that exist at a time.
    fn sums(&self) -> u64 {
        self.counter.sums as u64
    }

    /// The part that a table's gradient belongs to.
    fn table(&self, part: Part) -> Part {
        if part == Part::LmHead { Part::of_head(&self.counter.config) } else { part }
    }

    /// Bytes of the gradients of the trained parameters of a part.
    fn gradients_of(&self, part: Part) -> u64 {
        self.counter.trained.gradient_bytes_of(part, self.counter.precisions.gradients)
    }

    fn bytes_of(&self, spec: &ParameterSpec) -> u64 {
        spec.gradient_bytes(self.counter.precisions.gradients)
    }

    /// The bytes of a part's weights that are resident while the part is in use, if they lie in a file.
    fn weights_of(&self, part: Part) -> u64 {
        if self.counter.pages_weights(self.levers) { self.weights.at_once(part) } else { 0 }
    }
}
