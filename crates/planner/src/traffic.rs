//! Bytes that processes send each other in a step, and the time that they take beside its arithmetic.
//!
//! What is on its way while something is computed is hidden, as far as that lasts: gradients of a block behind the backward of the blocks
//! after it, weights behind the work on those before them. The rest has to be waited for.

use std::cell::RefCell;
use std::collections::HashMap;

use memory_policy::Place;
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

/// The bytes that the busiest process sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Gradients that are summed while backward goes on.
    pub behind_backward: u64,
    /// Weights that come while others are worked on.
    pub behind_all: u64,
    /// What is sent when nothing is left to compute: tables, and parameters that their owners updated.
    pub alone: u64,
    /// Of a process on a card: the bytes of all these that it copies to the host, and from there.
    pub over_the_bus: u64,
}

impl Sent {
    /// All that are sent.
    pub fn total(self) -> u64 {
        self.behind_backward + self.behind_all + self.alone
    }
}

/// The parameters of a part, or its matrices, by owner.
struct Owned {
    part: Part,
    are_matrices: bool,
    gradient_bytes: Vec<u64>,
    weight_bytes: Vec<u64>,
}

/// What several processes send each other.
pub struct Traffic {
    processes: Processes,
    place: Place,
    has_tied_head: bool,
    owned: Vec<Owned>,
    /// Numbers that all say to all.
    numbers: u64,
    /// Many choices send the same, by their order of a step and its micro-batches.
    known: RefCell<HashMap<(Option<LayerMajor>, usize), Sent>>,
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
        Ok(Some(Self { processes, place, has_tied_head, owned, numbers, known: RefCell::default() }))
    }

    /// Micro-batches of a process, a shard of whose batch has so many samples.
    pub fn micro_batches(&self, samples: usize, levers: &Levers) -> usize {
        self.processes.shards_of_a_process() * samples.div_ceil(levers.micro_batch_samples.max(1))
    }

    /// The bytes that the busiest process sends in a step. A shard of its batch has at most `samples` samples.
    ///
    /// A sum for all is added up by all processes, each its share of the elements, which it then sends to the others. One for an owner goes
    /// there, and the changed weights come back: at once, or where each process holds its own ([`Sharding::Weights`]) when they are used.
    pub fn sent(&self, counter: &StepCounter<'_>, samples: usize, levers: &Levers) -> Sent {
        // Layer by layer a step sends the same however it is cut.
        let micro_batches = if levers.layer_major.is_some() { 1 } else { self.micro_batches(samples, levers) };
        let mut known = self.known.borrow_mut();
        *known.entry((levers.layer_major, micro_batches)).or_insert_with(|| self.count(counter, micro_batches, levers))
    }

    fn count(&self, counter: &StepCounter<'_>, micro_batches: usize, levers: &Levers) -> Sent {
        let moves = counter.moves(micro_batches, levers);
        let of_rank = |rank: usize| {
            let mut sent = Sent { alone: (self.processes.number as u64 - 1) * self.numbers, ..Sent::default() };
            for owned in &self.owned {
                self.add(rank, owned, (moves.sums(owned.part), moves.brought(owned.part)), levers, &mut sent);
            }
            sent
        };
        // Where each holds everything they send the same.
        let ranks = if self.processes.sharding == Sharding::None { 1 } else { self.processes.number };
        (0..ranks).map(of_rank).max_by_key(|sent| sent.total()).unwrap_or_default()
    }

    /// Adds what a process sends of the gradients and weights of a part, which are summed and brought so often.
    fn add(&self, rank: usize, owned: &Owned, (sums, brought): (u64, u64), levers: &Levers, sent: &mut Sent) {
        let Processes { number, sent_sums, sharding, closes_shards, .. } = self.processes;
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let all: u64 = owned.gradient_bytes.iter().sum();
        let of_gradients = match sharding {
            Sharding::None => all * others / processes * (parts + 1),
            _ => (all - owned.gradient_bytes[rank]) * parts,
        };
        let is_table = owned.part == Part::Shared;
        // The head's part in the sums of a table is summed by itself.
        let sums_head = is_table && closes_shards && self.has_tied_head && levers.layer_major.is_some();
        if sums_head {
            sent.behind_backward += of_gradients;
        }
        if self.place == Place::Device && self.processes.between_cards.is_none() {
            let (summed, of_all) = (sums + u64::from(sums_head), owned.weight_bytes.iter().sum::<u64>());
            let kept = if sharding == Sharding::None { all } else { owned.gradient_bytes[rank] };
            let sends = match sharding {
                Sharding::None => 0,
                Sharding::Weights if owned.are_matrices => brought,
                _ => 1,
            };
            sent.over_the_bus += summed * (all * parts + kept) + sends * of_all;
        }
        *(if is_table { &mut sent.alone } else { &mut sent.behind_backward }) += sums * of_gradients;
        let of_weights = owned.weight_bytes[rank] * others;
        match sharding {
            Sharding::None => {}
            Sharding::Weights if owned.are_matrices => {
                // An embedding asks for the table when it is needed, and a head for its own ahead.
                let ahead = if is_table { brought.min(u64::from(self.has_tied_head)) } else { brought };
                sent.behind_all += ahead * of_weights;
                sent.alone += (brought - ahead) * of_weights;
            }
            _ => sent.alone += of_weights,
        }
    }

    /// The time of a byte in multiply-adds.
    pub fn byte(&self, prices: &Prices) -> f64 {
        let built_in = if self.place == Place::Host { MULTIPLY_ADD_PS } else { MULTIPLY_ADD_PS_ON_A_CARD };
        self.seconds(1) * 1e12 / prices.multiply_add_ps.unwrap_or(built_in)
    }

    /// The time of so many bytes.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    pub fn seconds(&self, bytes: u64) -> f64 {
        8.0 * bytes as f64 / self.processes.network.bits_per_second
    }
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

impl Computed<'_> {
    /// The time in which nothing is computed because bytes are on their way, each of which takes so much of the same unit.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a step are far below 2^53")]
    pub fn exposed(&self, sent: Sent, byte: f64) -> f64 {
        let [behind_backward, behind_all, alone] =
            [sent.behind_backward, sent.behind_all, sent.alone].map(|bytes| bytes as f64 * byte);
        if self.levers.layer_major.is_some_and(|layers| !layers.overlaps) {
            return behind_backward + behind_all + alone;
        }
        let backward = self.backward();
        let left = self.time - behind_backward.min(backward);
        alone + (behind_backward - backward).max(0.0) + (behind_all - left).max(0.0)
    }

    /// The time of backward over gradients that are complete: those of the last micro-batch, or layer by layer of all.
    #[expect(clippy::cast_precision_loss, reason = "micro-batches of a step")]
    fn backward(&self) -> f64 {
        let Arithmetic { blocks, training, .. } = self.arithmetic;
        let backward: f64 = blocks.iter().map(|block| block.backward).sum();
        // What is computed again is so in backward.
        let all = self.time - (training - backward) / training;
        if self.levers.layer_major.is_some() { all } else { all / self.micro_batches.max(1) as f64 }
    }
}

#[cfg(test)]
mod tests;
