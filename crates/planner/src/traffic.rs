//! Bytes that processes send each other in a step, and the time that they take beside its arithmetic.
//!
//! One thread of a process talks to the others, and does one thing after the other. Gradients of a block are on their way while the
//! next one is computed. Layer by layer no block begins before those of the block before the last are through; micro-batch by
//! micro-batch the last one waits for all of them. Weights of a block come while the one before is worked on. The rest has to be
//! waited for. So a step is gone through block by block, in [`Line`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use memory_policy::Place;
use t5::step::count::BlockArithmetic;
use t5::{LayerMajor, Levers, ParameterSpec, Part};
use trainer::Sharding;

use crate::counted::{Arithmetic, StepCounter};
use crate::error::Result;
use crate::job::Training;
use crate::prices::Prices;
use crate::processes::Processes;

/// The time of a multiply-add in picoseconds where it was not measured: some processor's, and the card's of [`Prices::card`].
const MULTIPLY_ADD_PS: f64 = 20.0;
const MULTIPLY_ADD_PS_ON_A_CARD: f64 = 0.025;

/// What is sent in a step. Bytes on the line are those for which the thread that talks is busy: where one process sends to one, the
/// others wait for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The bytes that the busiest process sends.
    pub bytes: u64,
    /// On the line: gradients that are complete before backward enters a block.
    pub before: u64,
    /// On the line: those of each block that backward enters, in the order of [`Arithmetic::blocks`].
    pub blocks: Vec<OfBlock>,
    /// On the line: the weights of a head, which come while the block before is worked on.
    pub head: u64,
    /// On the line: what is sent when nothing is left to compute. Tables, and parameters that their owners updated.
    pub alone: u64,
    /// Of a process on a card: the bytes of all these that it copies to the host, and from there.
    pub over_the_bus: u64,
}

/// What a block has on the line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OfBlock {
    /// Its gradients.
    pub gradients: u64,
    /// How often these are complete.
    pub sums: u64,
    /// Its weights, where other processes hold them.
    pub weights: u64,
    /// How often these come.
    pub brought: u64,
}

impl Sent {
    /// Bytes that are copied over the bus for each one on the line, by the thread that talks.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn copied(&self) -> f64 {
        self.over_the_bus as f64 / self.on_the_line().max(1) as f64
    }

    /// All that is on the line.
    pub fn on_the_line(&self) -> u64 {
        let of_block = |block: &OfBlock| block.sums * block.gradients + block.brought * block.weights;
        self.before + self.head + self.alone + self.blocks.iter().map(of_block).sum::<u64>()
    }
}

/// The parameters of a part, or its matrices, by owner.
struct Owned {
    part: Part,
    are_matrices: bool,
    gradient_bytes: Vec<u64>,
    weight_bytes: Vec<u64>,
}

type Known = HashMap<(Option<LayerMajor>, usize), Rc<Sent>>;

/// What several processes send each other.
pub struct Traffic {
    processes: Processes,
    place: Place,
    has_tied_head: bool,
    /// Blocks of the encoder, and of both stacks.
    blocks: (usize, usize),
    owned: Vec<Owned>,
    /// Numbers that all say to all.
    numbers: u64,
    /// Many choices send the same, by their order of a step and its micro-batches.
    known: RefCell<Known>,
}

impl Traffic {
    /// That of a job; none where one process trains alone.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn of(model: &t5::Config, training: &Training<'_>, place: Place) -> Result<Option<Self>> {
        let (processes, options) = (training.processes, training.options);
        if processes.number == 1 {
            return Ok(None);
        }
        let weight_bytes = options.parameter_dtype().size_in_bytes() as u64;
        let mut owned: Vec<Owned> = Vec::new();
        for (spec, owner) in trainer::costs::dealt_out(model, options, processes.number)? {
            let are_matrices = t5::is_matrix(&spec.name, spec.shape.len());
            let is_here = |owned: &Owned| owned.part == spec.part && owned.are_matrices == are_matrices;
            let place = owned.iter().position(is_here).unwrap_or_else(|| {
                let none = vec![0; processes.number];
                owned.push(Owned { part: spec.part, are_matrices, gradient_bytes: none.clone(), weight_bytes: none });
                owned.len() - 1
            });
            owned[place].gradient_bytes[owner] += spec.gradient_bytes(options.gradient_dtype());
            owned[place].weight_bytes[owner] += weight_bytes * spec.elements();
        }
        // Samples and tokens, the sums of losses, and the square sums of all parameters with their length.
        let all = processes.shards_of_a_process() + ParameterSpec::all(model).len();
        let numbers = 6 * 8 + 8 + 1 + 8 * all as u64;
        let has_tied_head = model.tie_word_embeddings;
        let blocks = (model.num_layers, model.blocks());
        Ok(Some(Self { processes, place, has_tied_head, blocks, owned, numbers, known: RefCell::default() }))
    }

    /// Micro-batches of a process, a shard of whose batch has so many samples.
    pub fn micro_batches(&self, samples: usize, levers: &Levers) -> usize {
        self.processes.shards_of_a_process() * levers.micro_batches(samples)
    }

    /// What is sent in a step. A shard of a process's batch has at most `samples` samples.
    ///
    /// A sum for all is added up by all processes, each its share of the elements, which it then sends to the others. One for an owner goes
    /// there, and the changed weights come back: at once, or where each process holds its own ([`Sharding::Weights`]) when they are used.
    pub fn sent(&self, counter: &StepCounter<'_>, samples: usize, levers: &Levers) -> Rc<Sent> {
        // Layer by layer a step sends the same however it is cut.
        let micro_batches = if levers.layer_major.is_some() { 1 } else { self.micro_batches(samples, levers) };
        let mut known = self.known.borrow_mut();
        let count = || Rc::new(self.count(counter, micro_batches, levers));
        Rc::clone(known.entry((levers.layer_major, micro_batches)).or_insert_with(count))
    }

    fn count(&self, counter: &StepCounter<'_>, micro_batches: usize, levers: &Levers) -> Sent {
        let moves = counter.moves(micro_batches, levers);
        let numbers = (self.processes.number as u64 - 1) * self.numbers;
        let mut sent = Sent { alone: numbers, blocks: vec![OfBlock::default(); counter.blocks()], ..Sent::default() };
        // Where each holds everything they send the same.
        let ranks = if self.processes.sharding == Sharding::None { 1 } else { self.processes.number };
        let mut by_rank = vec![numbers; ranks];
        let mut bus_by_rank = vec![0; ranks];
        for owned in &self.owned {
            let moved = Moved { sums: moves.sums(owned.part), brought: moves.brought(owned.part) };
            let moved = Moved { sums: moved.sums + u64::from(self.sums_head_apart(owned.part, levers)), ..moved };
            by_rank.iter_mut().enumerate().for_each(|(rank, bytes)| *bytes += self.bytes_of(rank, owned, moved));
            bus_by_rank
                .iter_mut()
                .enumerate()
                .for_each(|(rank, bytes)| *bytes += self.bus_bytes_of(rank, owned, moved));
            self.put_on_the_line(owned, moved, levers, &mut sent);
        }
        let most = |by_rank: Vec<u64>| by_rank.into_iter().max().unwrap_or(0);
        Sent { bytes: most(by_rank), over_the_bus: most(bus_by_rank), ..sent }
    }

    /// Whether the head's part in the sums of a table is summed by itself.
    fn sums_head_apart(&self, part: Part, levers: &Levers) -> bool {
        let is_apart = self.processes.closes_shards && self.has_tied_head && levers.layer_major.is_some();
        part == Part::Shared && is_apart
    }

    /// What a process sends of the gradients and weights of a part.
    fn bytes_of(&self, rank: usize, owned: &Owned, moved: Moved) -> u64 {
        let Processes { number, sent_sums, sharding, .. } = self.processes;
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let all: u64 = owned.gradient_bytes.iter().sum();
        let gradients = match sharding {
            Sharding::None => all * others / processes * (parts + 1),
            _ => (all - owned.gradient_bytes[rank]) * parts,
        };
        moved.sums * gradients + self.times_of_weights(owned, moved) * others * owned.weight_bytes[rank]
    }

    /// How often the weights of a part go from their owners to the others.
    fn times_of_weights(&self, owned: &Owned, moved: Moved) -> u64 {
        match self.processes.sharding {
            Sharding::None => 0,
            Sharding::Weights if owned.are_matrices => moved.brought,
            _ => 1,
        }
    }

    /// What a process on a card copies to the host and from there, because of the gradients and weights of a part.
    fn bus_bytes_of(&self, rank: usize, owned: &Owned, moved: Moved) -> u64 {
        let Processes { sent_sums, sharding, between_cards, .. } = self.processes;
        if self.place == Place::Host || between_cards.is_some() {
            return 0;
        }
        let all: u64 = owned.gradient_bytes.iter().sum();
        let kept = if sharding == Sharding::None { all } else { owned.gradient_bytes[rank] };
        let weights: u64 = owned.weight_bytes.iter().sum();
        moved.sums * (all * sent_sums as u64 + kept) + self.times_of_weights(owned, moved) * weights
    }

    /// Adds what is on the line of a part's gradients and weights.
    fn put_on_the_line(&self, owned: &Owned, moved: Moved, levers: &Levers, sent: &mut Sent) {
        let Processes { number, sent_sums, sharding, .. } = self.processes;
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let all: u64 = owned.gradient_bytes.iter().sum();
        // An owner receives all that the others send it.
        let gradients = match sharding {
            Sharding::None => all * others / processes * (parts + 1),
            _ => all * others * parts,
        };
        let weights = others * owned.weight_bytes.iter().sum::<u64>();
        let comes = sharding == Sharding::Weights && owned.are_matrices;
        if sharding != Sharding::None && !comes {
            sent.alone += weights;
        }
        let Moved { sums, brought } = moved;
        if let Some(block) = self.place_of(owned.part, sent.blocks.len()) {
            let block = &mut sent.blocks[block];
            block.gradients += gradients;
            block.sums = sums;
            if comes {
                (block.weights, block.brought) = (block.weights + weights, brought);
            }
            return;
        }
        let is_table = owned.part == Part::Shared;
        let apart = u64::from(self.sums_head_apart(owned.part, levers));
        // Tables that go to a file are summed when they are back.
        let is_late = is_table || levers.layer_major.is_some_and(|layers| layers.gradients_on_disk);
        let alone = if is_late { sums - apart } else { 0 };
        sent.alone += alone * gradients;
        sent.before += (sums - alone) * gradients;
        if comes {
            // An embedding asks for the table when it is needed, and a head for its own ahead.
            let ahead = if is_table { brought.min(u64::from(self.has_tied_head)) } else { brought };
            sent.head += ahead * weights;
            sent.alone += (brought - ahead) * weights;
        }
    }

    /// The place of a part among the last `entered` blocks of both stacks.
    fn place_of(&self, part: Part, entered: usize) -> Option<usize> {
        let (of_encoder, all) = self.blocks;
        let place = match part {
            Part::Encoder { block } => block,
            Part::Decoder { block } => of_encoder + block,
            _ => return None,
        };
        place.checked_sub(all.saturating_sub(entered)).filter(|&place| place < entered)
    }

    /// Prices with the time of a multiply-add, some processor's or card's where it was not measured.
    pub fn with_speed(&self, prices: &Prices) -> Prices {
        Prices { multiply_add_ps: Some(self.multiply_add_ps(prices)), ..*prices }
    }

    fn multiply_add_ps(&self, prices: &Prices) -> f64 {
        let built_in = if self.place == Place::Host { MULTIPLY_ADD_PS } else { MULTIPLY_ADD_PS_ON_A_CARD };
        prices.multiply_add_ps.unwrap_or(built_in)
    }

    /// The time of a byte on the line in multiply-adds: the network's, and that of the copies that belong to it.
    pub fn byte(&self, prices: &Prices, sent: &Sent) -> f64 {
        8e12 / self.processes.network.bits_per_second / self.multiply_add_ps(prices) + prices.bus_byte * sent.copied()
    }

    /// The same in seconds.
    pub fn byte_seconds(&self, prices: &Prices, sent: &Sent) -> f64 {
        self.byte(prices, sent) * self.multiply_add_ps(prices) * 1e-12
    }
}

/// How often the gradients of a part are summed, and its weights brought.
#[derive(Clone, Copy)]
struct Moved {
    sums: u64,
    brought: u64,
}

/// The arithmetic of a step, behind which bytes may be on their way.
pub struct Computed<'a> {
    /// The time of all of it, as [`crate::prices::relative_time`] has it.
    pub time: f64,
    /// Of a micro-batch.
    pub arithmetic: &'a Arithmetic,
    pub levers: &'a Levers,
    pub micro_batches: usize,
}

/// A process that computes, and its thread that talks to the others.
#[derive(Default)]
struct Line {
    now: f64,
    /// Until when the thread is busy.
    busy: f64,
    waited: f64,
}

impl Line {
    /// Hands over something that takes so long. Returns when it is through.
    fn send(&mut self, time: f64) -> f64 {
        if time > 0.0 {
            self.busy = self.busy.max(self.now) + time;
            return self.busy;
        }
        self.now
    }

    fn wait(&mut self, until: f64) {
        let time = (until - self.now).max(0.0);
        self.now += time;
        self.waited += time;
    }
}

/// A visit of a block: times of its arithmetic, of its weights and of its gradients.
#[derive(Clone, Copy, Default)]
struct Visit {
    computing: f64,
    weights: f64,
    gradients: f64,
}

impl Computed<'_> {
    /// The time in which nothing is computed because bytes are on their way, each of which takes so much of the same unit.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    pub fn exposed(&self, sent: &Sent, byte: f64) -> f64 {
        if self.levers.layer_major.is_some_and(|layers| !layers.overlaps) {
            return sent.on_the_line() as f64 * byte;
        }
        let by_layer = self.levers.layer_major.is_some();
        // Layer by layer all micro-batches go through a block together.
        let rounds = if by_layer { 1 } else { self.micro_batches.max(1) };
        let round = |is_last: bool| {
            let mut line = Line::default();
            self.forward(&mut line, sent, byte, rounds);
            if is_last {
                line.send(sent.before as f64 * byte);
            }
            for pass in 0..if by_layer { 2 } else { 1 } {
                self.backward(&mut line, sent, (byte, rounds), (is_last, by_layer, pass));
            }
            line.wait(line.busy);
            line.waited
        };
        let others = if rounds > 1 { round(false) * (rounds - 1) as f64 } else { 0.0 };
        others + round(true) + sent.alone as f64 * byte
    }

    /// Forward of both stacks and the head.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn forward(&self, line: &mut Line, sent: &Sent, byte: f64, rounds: usize) {
        let Arithmetic { blocks, head, training } = self.arithmetic;
        let backward: f64 = blocks.iter().map(|block| block.backward).sum();
        let all = (training - backward - head) / training / rounds as f64;
        let visits = blocks.iter().zip(&sent.blocks).map(|(block, sent)| Visit {
            computing: all * block.backward / backward.max(f64::MIN_POSITIVE),
            weights: if sent.brought > 0 { sent.weights as f64 * byte } else { 0.0 },
            gradients: 0.0,
        });
        let of_head = Visit {
            computing: head / training / rounds as f64,
            weights: sent.head as f64 * byte / rounds as f64,
            gradients: 0.0,
        };
        go_through(line, visits.chain([of_head]), false);
    }

    /// Backward through the blocks that pass number `pass` goes through.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn backward(
        &self,
        line: &mut Line,
        sent: &Sent,
        (byte, rounds): (f64, usize),
        (is_last, lags, pass): (bool, bool, u64),
    ) {
        let blocks = &self.arithmetic.blocks;
        let passes = |of: &OfBlock| if lags { of.sums.max(1) } else { 1 };
        let work = |(block, of): (&BlockArithmetic, &OfBlock)| block.backward * passes(of) as f64;
        let all = blocks.iter().zip(&sent.blocks).map(work).sum::<f64>().max(f64::MIN_POSITIVE);
        let unit = self.time_of_backward() / rounds as f64 / all;
        let entered = blocks.iter().zip(&sent.blocks).rev().filter(|(_, of)| pass < passes(of));
        let visits = entered.map(|(block, of)| Visit {
            computing: unit * block.backward,
            weights: if of.brought > 1 { of.weights as f64 * byte } else { 0.0 },
            gradients: if is_last && pass < of.sums { of.gradients as f64 * byte } else { 0.0 },
        });
        go_through(line, visits, lags);
    }

    /// The time of backward, and of all that is computed again in it.
    fn time_of_backward(&self) -> f64 {
        let Arithmetic { blocks, training, .. } = self.arithmetic;
        let backward: f64 = blocks.iter().map(|block| block.backward).sum();
        self.time - (training - backward) / training
    }
}

/// Goes through some blocks. `lags`: none begins before the gradients of the one before the last are through, and the pass ends with those
/// of the last.
fn go_through(line: &mut Line, visits: impl Iterator<Item = Visit>, lags: bool) {
    let mut visits = visits.peekable();
    let mut here = visits.peek().map_or(0.0, |first| line.send(first.weights));
    let mut before = line.now;
    while let Some(visit) = visits.next() {
        if visit.weights > 0.0 {
            line.wait(here);
        }
        here = visits.peek().map_or(0.0, |next| line.send(next.weights));
        line.now += visit.computing;
        let through = line.send(visit.gradients);
        if lags {
            line.wait(before);
        }
        before = through;
    }
    if lags {
        line.wait(before);
    }
}

#[cfg(test)]
mod tests;
