//! Bytes that processes send each other in a step, and the time that they take beside its arithmetic.
//!
//! What is on its way while something is computed is hidden, as far as that lasts: gradients of a block behind the backward of the blocks
//! after it, weights behind the work on those before them. The rest has to be waited for.

use t5::{Levers, ParameterSpec, Part};
use trainer::Sharding;

use crate::counted::{Arithmetic, StepCounter};
use crate::error::Result;
use crate::job::Training;
use crate::prices::Prices;
use crate::processes::Processes;

/// The time of a multiply-add in picoseconds where it was not measured: some processor's.
const MULTIPLY_ADD_PS: f64 = 20.0;

/// The bytes that the busiest process sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Gradients that are summed while backward goes on.
    pub behind_backward: u64,
    /// Weights that come while others are worked on.
    pub behind_all: u64,
    /// What is sent when nothing is left to compute: tables, and parameters that their owners updated.
    pub alone: u64,
}

impl Sent {
    /// All of them.
    pub fn total(self) -> u64 {
        self.behind_backward + self.behind_all + self.alone
    }
}

/// What several processes send each other.
pub struct Traffic {
    processes: Processes,
    weight_bytes: u64,
    has_tied_head: bool,
    dealt: Vec<(ParameterSpec, usize)>,
    /// Numbers that all say to all.
    numbers: u64,
}

impl Traffic {
    /// That of a job; none where one process trains alone.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn of(model: &t5::Config, training: &Training<'_>) -> Result<Option<Self>> {
        let processes = training.processes;
        if processes.number == 1 {
            return Ok(None);
        }
        // Samples and tokens, the sums of losses, and the square sums of all parameters with their length.
        let all = processes.shards_of_a_process() + ParameterSpec::all(model).len();
        Ok(Some(Self {
            processes,
            weight_bytes: training.options.parameter_dtype().size_in_bytes() as u64,
            has_tied_head: model.tie_word_embeddings,
            dealt: trainer::costs::dealt_out(model, training.options, processes.number)?,
            numbers: 6 * 8 + 8 + 1 + 8 * all as u64,
        }))
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
        let Processes { number, sent_sums, sharding, closes_shards, .. } = self.processes;
        let moves = counter.moves(self.micro_batches(samples, levers), levers);
        let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
        let add = |rank: usize, sent: &mut Sent, spec: &ParameterSpec, owner: usize| {
            // The head's part in the sums of a table is summed by itself.
            let is_twice = closes_shards && self.has_tied_head && levers.layer_major.is_some();
            let of_head = if is_twice && spec.part == Part::Shared { 1 } else { 0 };
            let (gradient, sums) = (spec.gradient_bytes(counter.gradients()), moves.sums(spec.part));
            let of_gradient = match sharding {
                Sharding::None => gradient * others / processes * (parts + 1),
                _ if owner != rank => gradient * parts,
                _ => 0,
            };
            sent.behind_backward += of_head * of_gradient;
            *(if spec.part == Part::Shared { &mut sent.alone } else { &mut sent.behind_backward }) +=
                sums * of_gradient;
            if sharding == Sharding::None || owner != rank {
                return;
            }
            let weights = self.weight_bytes * spec.elements() * others;
            if sharding == Sharding::Weights && t5::is_matrix(&spec.name, spec.shape.len()) {
                sent.behind_all += moves.brought(spec.part) * weights;
            } else {
                sent.alone += weights;
            }
        };
        let of_rank = |rank: usize| {
            let mut sent = Sent { alone: others * self.numbers, ..Sent::default() };
            self.dealt.iter().for_each(|(spec, owner)| add(rank, &mut sent, spec, *owner));
            sent
        };
        (0..number).map(of_rank).max_by_key(|sent| sent.total()).unwrap_or_default()
    }

    /// The time of a byte in multiply-adds.
    pub fn byte(&self, prices: &Prices) -> f64 {
        self.seconds(1) * 1e12 / prices.multiply_add_ps.unwrap_or(MULTIPLY_ADD_PS)
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
