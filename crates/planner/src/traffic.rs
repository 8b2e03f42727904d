//! The bytes that processes send to each other in a step, and the time that they add to the step.
//!
//! Each process has one thread that communicates, one transfer after the other. A block's gradients are sent while the next block is
//! computed. Layer by layer, a block begins only after the gradients of the block before the previous one have been transferred.
//! Micro-batch by micro-batch, only the last micro-batch transfers gradients, and it waits for all of them. A block's weights are received
//! while the previous block is computed. The step waits for all other transfers. So [`OverlapSimulation`] goes through a step block by block.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use memory_policy::MemorySpace;
use t5::step::count::BlockArithmetic;
use t5::{LayerMajor, Levers, ParameterSpec, Part};
use trainer::Sharding;

use crate::counted::{Arithmetic, StepCounter};
use crate::error::Result;
use crate::job::Training;
use crate::prices::Prices;
use crate::processes::Processes;

/// The time of a multiply-add in picoseconds if it was not measured: of a typical processor, and of the card of [`Prices::card`].
const MULTIPLY_ADD_PS: f64 = 20.0;
const MULTIPLY_ADD_PS_ON_A_CARD: f64 = 0.025;

/// The bytes sent in a step. Bytes on the wire keep the communicating thread busy: while one process sends to another, the others wait for
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The bytes that the busiest process sends.
    pub bytes: u64,
    /// On the wire: gradients that are complete before backward enters a block.
    pub before: u64,
    /// On the wire: gradients and weights of each block that backward enters, in the order of [`Arithmetic::blocks`].
    pub blocks: Vec<BlockTraffic>,
    /// On the wire: the weights of a head, which are received while the previous block is computed.
    pub head: u64,
    /// On the wire: tables, and parameters that their owners updated. They are sent when nothing is left to compute.
    pub exposed: u64,
    /// The bytes of all these transfers that a process on a card copies to the host and back.
    pub bus_bytes: u64,
}

/// The bytes of a block on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockTraffic {
    /// Bytes of its gradients.
    pub gradients: u64,
    /// How often its gradients are complete in a step.
    pub sums: u64,
    /// Bytes of its weights, if other processes hold them.
    pub weights: u64,
    /// How often its weights are received in a step.
    pub gathers: u64,
}

impl Sent {
    /// Bytes that the communicating thread copies over the bus for each byte on the wire.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn copied(&self) -> f64 {
        self.bus_bytes as f64 / self.wire_bytes().max(1) as f64
    }

    /// All bytes on the wire.
    pub fn wire_bytes(&self) -> u64 {
        let of_block = |block: &BlockTraffic| block.sums * block.gradients + block.gathers * block.weights;
        self.before + self.head + self.exposed + self.blocks.iter().map(of_block).sum::<u64>()
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

/// The traffic between several processes.
pub struct Traffic {
    processes: Processes,
    place: MemorySpace,
    has_tied_head: bool,
    /// The number of blocks of the encoder, and of both stacks.
    blocks: (usize, usize),
    owned: Vec<Owned>,
    /// Bytes of the numbers that every process sends to all others.
    numbers: u64,
    /// Counts made so far, by layer-major levers and number of micro-batches: many choices send the same bytes.
    known: RefCell<Known>,
}

impl Traffic {
    /// The traffic of a job; `None` for a single process.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn total(model: &t5::Config, training: &Training<'_>, place: MemorySpace) -> Result<Option<Self>> {
        let (processes, options) = (training.processes, training.options);
        if processes.number == 1 {
            return Ok(None);
        }
        let weight_bytes = options.parameter_dtype().size_in_bytes() as u64;
        let mut owned: Vec<Owned> = Vec::new();
        for (spec, owner) in trainer::costs::sharded_optimizer(model, options, processes.number)? {
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

    /// Micro-batches of a process, if a shard of its batch has `samples` samples.
    pub fn micro_batches(&self, samples: usize, levers: &Levers) -> usize {
        self.processes.shards_of_a_process() * levers.micro_batches(samples)
    }

    /// The bytes sent in a step. A shard of a process's batch has at most `samples` samples.
    ///
    /// For a sum that all processes need, each process adds up its share of the elements and sends it to the others. A sum for one owner is
    /// sent to the owner, which sends the updated weights back: at once, or, if each process holds only its own ([`Sharding::Weights`]),
    /// when they are used.
    pub fn sent(&self, counter: &StepCounter<'_>, samples: usize, levers: &Levers) -> Rc<Sent> {
        // Layer by layer, a step sends the same bytes with any micro-batches.
        let micro_batches = if levers.layer_major.is_some() { 1 } else { self.micro_batches(samples, levers) };
        let mut known = self.known.borrow_mut();
        let count = || Rc::new(self.count(counter, micro_batches, levers));
        Rc::clone(known.entry((levers.layer_major, micro_batches)).or_insert_with(count))
    }

    fn count(&self, counter: &StepCounter<'_>, micro_batches: usize, levers: &Levers) -> Sent {
        let moves = counter.moves(micro_batches, levers);
        let numbers = (self.processes.number as u64 - 1) * self.numbers;
        let mut sent =
            Sent { exposed: numbers, blocks: vec![BlockTraffic::default(); counter.blocks()], ..Sent::default() };
        // If each process holds all parameters, all processes send the same bytes.
        let ranks = if self.processes.sharding == Sharding::None { 1 } else { self.processes.number };
        let mut by_rank = vec![numbers; ranks];
        let mut bus_by_rank = vec![0; ranks];
        for owned in &self.owned {
            let moved = TransferCounts { sums: moves.sums(owned.part), gathers: moves.gathers(owned.part) };
            let moved =
                TransferCounts { sums: moved.sums + u64::from(self.sums_head_apart(owned.part, levers)), ..moved };
            by_rank.iter_mut().enumerate().for_each(|(rank, bytes)| *bytes += self.bytes_of(rank, owned, moved));
            bus_by_rank
                .iter_mut()
                .enumerate()
                .for_each(|(rank, bytes)| *bytes += self.bus_bytes_of(rank, owned, moved));
            self.add_wire_bytes(owned, moved, levers, &mut sent);
        }
        let most = |by_rank: Vec<u64>| by_rank.into_iter().max().unwrap_or(0);
        Sent { bytes: most(by_rank), bus_bytes: most(bus_by_rank), ..sent }
    }

    /// Whether the head's share of a table's gradient is summed separately.
    fn sums_head_apart(&self, part: Part, levers: &Levers) -> bool {
        let is_apart = self.processes.closes_shards && self.has_tied_head && levers.layer_major.is_some();
        part == Part::Shared && is_apart
    }

    /// Bytes that a process sends of the gradients and weights of a part.
    fn bytes_of(&self, rank: usize, owned: &Owned, moved: TransferCounts) -> u64 {
        let Processes { number, sent_sums, sharding, .. } = self.processes;
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let all: u64 = owned.gradient_bytes.iter().sum();
        let gradients = match sharding {
            Sharding::None => all * others / processes * (parts + 1),
            _ => (all - owned.gradient_bytes[rank]) * parts,
        };
        moved.sums * gradients + self.times_of_weights(owned, moved) * others * owned.weight_bytes[rank]
    }

    /// How often the weights of a part are sent from their owners to the others.
    fn times_of_weights(&self, owned: &Owned, moved: TransferCounts) -> u64 {
        match self.processes.sharding {
            Sharding::None => 0,
            Sharding::Weights if owned.are_matrices => moved.gathers,
            _ => 1,
        }
    }

    /// Bytes that a process on a card copies to the host and back for the gradients and weights of a part.
    fn bus_bytes_of(&self, rank: usize, owned: &Owned, moved: TransferCounts) -> u64 {
        let Processes { sent_sums, sharding, between_cards, .. } = self.processes;
        if self.place == MemorySpace::Host || between_cards.is_some() {
            return 0;
        }
        let all: u64 = owned.gradient_bytes.iter().sum();
        let kept = if sharding == Sharding::None { all } else { owned.gradient_bytes[rank] };
        let weights: u64 = owned.weight_bytes.iter().sum();
        moved.sums * (all * sent_sums as u64 + kept) + self.times_of_weights(owned, moved) * weights
    }

    /// Adds a part's gradients and weights to the bytes on the wire.
    fn add_wire_bytes(&self, owned: &Owned, moved: TransferCounts, levers: &Levers, sent: &mut Sent) {
        let Processes { number, sent_sums, sharding, .. } = self.processes;
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let all: u64 = owned.gradient_bytes.iter().sum();
        // An owner receives the gradients of all other processes.
        let gradients = match sharding {
            Sharding::None => all * others / processes * (parts + 1),
            _ => all * others * parts,
        };
        let weights = others * owned.weight_bytes.iter().sum::<u64>();
        let comes = sharding == Sharding::Weights && owned.are_matrices;
        if sharding != Sharding::None && !comes {
            sent.exposed += weights;
        }
        let TransferCounts { sums, gathers } = moved;
        if let Some(block) = self.place_of(owned.part, sent.blocks.len()) {
            let block = &mut sent.blocks[block];
            block.gradients += gradients;
            block.sums = sums;
            if comes {
                (block.weights, block.gathers) = (block.weights + weights, gathers);
            }
            return;
        }
        let is_table = owned.part == Part::Shared;
        let apart = u64::from(self.sums_head_apart(owned.part, levers));
        // Tables whose gradients go to a file are summed after they are read back.
        let is_late = is_table || levers.layer_major.is_some_and(|layers| layers.gradients_on_disk);
        let exposed = if is_late { sums - apart } else { 0 };
        sent.exposed += exposed * gradients;
        sent.before += (sums - exposed) * gradients;
        if comes {
            // An embedding requests the table when it needs it; a head requests its own weights ahead of time.
            let ahead = if is_table { gathers.min(u64::from(self.has_tied_head)) } else { gathers };
            sent.head += ahead * weights;
            sent.exposed += (gathers - ahead) * weights;
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

    /// Prices with the time of a multiply-add: the built-in time if it was not measured.
    pub fn with_speed(&self, prices: &Prices) -> Prices {
        Prices { multiply_add_ps: Some(self.multiply_add_ps(prices)), ..*prices }
    }

    fn multiply_add_ps(&self, prices: &Prices) -> f64 {
        let built_in = if self.place == MemorySpace::Host { MULTIPLY_ADD_PS } else { MULTIPLY_ADD_PS_ON_A_CARD };
        prices.multiply_add_ps.unwrap_or(built_in)
    }

    /// The time of a byte on the wire in multiply-adds: the network's time, and the time of its copies over the bus.
    pub fn byte(&self, prices: &Prices, sent: &Sent) -> f64 {
        8e12 / self.processes.network.bits_per_second / self.multiply_add_ps(prices) + prices.bus_byte * sent.copied()
    }

    /// The time of a byte on the wire in seconds.
    pub fn byte_seconds(&self, prices: &Prices, sent: &Sent) -> f64 {
        self.byte(prices, sent) * self.multiply_add_ps(prices) * 1e-12
    }
}

/// How often the gradients of a part are summed, and how often its weights are received.
#[derive(Clone, Copy)]
struct TransferCounts {
    sums: u64,
    gathers: u64,
}

/// The arithmetic of a step, which transfers may overlap with.
pub struct Computed<'a> {
    /// The time of the arithmetic, as returned by [`crate::prices::relative_time`].
    pub time: f64,
    /// The arithmetic of a micro-batch.
    pub arithmetic: &'a Arithmetic,
    pub levers: &'a Levers,
    pub micro_batches: usize,
}

/// A process that computes, and its communicating thread.
#[derive(Default)]
struct OverlapSimulation {
    now: f64,
    /// The time until which the thread is busy.
    busy: f64,
    waited: f64,
}

impl OverlapSimulation {
    /// Submits a transfer that takes `time`. Returns the time at which it ends.
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

/// A visit of a block: the times of its arithmetic, its weights and its gradients.
#[derive(Clone, Copy, Default)]
struct Visit {
    computing: f64,
    weights: f64,
    gradients: f64,
}

impl Computed<'_> {
    /// The time in which nothing is computed because of transfers. `byte` is the time of a byte in the same unit.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    pub fn exposed(&self, sent: &Sent, byte: f64) -> f64 {
        if self.levers.layer_major.is_some_and(|layers| !layers.overlaps) {
            return sent.wire_bytes() as f64 * byte;
        }
        let by_layer = self.levers.layer_major.is_some();
        // Layer by layer, all micro-batches go through a block together.
        let rounds = if by_layer { 1 } else { self.micro_batches.max(1) };
        let round = |is_last: bool| {
            let mut line = OverlapSimulation::default();
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
        others + round(true) + sent.exposed as f64 * byte
    }

    /// Forward of both stacks and the head.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn forward(&self, line: &mut OverlapSimulation, sent: &Sent, byte: f64, rounds: usize) {
        let Arithmetic { blocks, head, training } = self.arithmetic;
        let backward: f64 = blocks.iter().map(|block| block.backward).sum();
        let all = (training - backward - head) / training / rounds as f64;
        let visits = blocks.iter().zip(&sent.blocks).map(|(block, sent)| Visit {
            computing: all * block.backward / backward.max(f64::MIN_POSITIVE),
            weights: if sent.gathers > 0 { sent.weights as f64 * byte } else { 0.0 },
            gradients: 0.0,
        });
        let of_head = Visit {
            computing: head / training / rounds as f64,
            weights: sent.head as f64 * byte / rounds as f64,
            gradients: 0.0,
        };
        simulate_blocks(line, visits.chain([of_head]), false);
    }

    /// Backward through the blocks of pass number `pass`.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    fn backward(
        &self,
        line: &mut OverlapSimulation,
        sent: &Sent,
        (byte, rounds): (f64, usize),
        (is_last, lags, pass): (bool, bool, u64),
    ) {
        let blocks = &self.arithmetic.blocks;
        let passes = |of: &BlockTraffic| if lags { of.sums.max(1) } else { 1 };
        let work = |(block, of): (&BlockArithmetic, &BlockTraffic)| block.backward * passes(of) as f64;
        let all = blocks.iter().zip(&sent.blocks).map(work).sum::<f64>().max(f64::MIN_POSITIVE);
        let unit = self.time_of_backward() / rounds as f64 / all;
        let entered = blocks.iter().zip(&sent.blocks).rev().filter(|(_, of)| pass < passes(of));
        let visits = entered.map(|(block, of)| Visit {
            computing: unit * block.backward,
            weights: if of.gathers > 1 { of.weights as f64 * byte } else { 0.0 },
            gradients: if is_last && pass < of.sums { of.gradients as f64 * byte } else { 0.0 },
        });
        simulate_blocks(line, visits, lags);
    }

    /// The time of backward, including all recomputation.
    fn time_of_backward(&self) -> f64 {
        let Arithmetic { blocks, training, .. } = self.arithmetic;
        let backward: f64 = blocks.iter().map(|block| block.backward).sum();
        self.time - (training - backward) / training
    }
}

/// Goes through some blocks. With `lags`, a block begins only after the gradients of the block before the previous one have been
/// transferred. The pass then ends with the transfer of the last block's gradients.
fn simulate_blocks(line: &mut OverlapSimulation, visits: impl Iterator<Item = Visit>, lags: bool) {
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
