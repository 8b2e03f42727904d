//! Bytes that processes send each other in a step.

use t5::{Levers, ParameterSpec};
use trainer::Sharding;

use crate::counted::StepCounter;
use crate::error::Result;
use crate::job::Training;
use crate::processes::Processes;

/// The bytes that the busiest process sends in a step. A shard of its batch has at most `samples` samples.
///
/// A sum for all is added up by all processes, each its share of the elements, which it then sends to the others. One for an owner goes
/// there, and the changed weights come back: at once, or where each process holds its own ([`Sharding::Weights`]) when they are used.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen.
pub fn sent(
    model: &t5::Config,
    training: &Training<'_>,
    counter: &StepCounter<'_>,
    samples: usize,
    levers: &Levers,
) -> Result<u64> {
    let Processes { number, most_shards, sent_sums, sharding, closes_shards, .. } = training.processes;
    if number == 1 {
        return Ok(0);
    }
    let shards = if closes_shards { most_shards } else { 1 };
    let moves = counter.moves(shards * samples.div_ceil(levers.micro_batch_samples.max(1)), levers);
    let (processes, others, parts) = (number as u64, number as u64 - 1, sent_sums as u64);
    let weight_bytes = training.options.parameter_dtype().size_in_bytes() as u64;
    let dealt = trainer::costs::dealt_out(model, training.options, number)?;
    let of_parameter = |rank: usize, spec: &ParameterSpec, owner: usize| -> u64 {
        let (gradient, sums) = (spec.gradient_bytes(counter.gradients()), moves.sums(spec.part));
        if sharding == Sharding::None {
            return sums * gradient * others / processes * (parts + 1);
        }
        if owner != rank {
            return sums * gradient * parts;
        }
        let is_brought = sharding == Sharding::Weights && t5::is_matrix(&spec.name, spec.shape.len());
        let times = if is_brought { moves.brought(spec.part) } else { 1 };
        times * weight_bytes * spec.elements() * others
    };
    let of_rank = |rank: usize| dealt.iter().map(|(spec, owner)| of_parameter(rank, spec, *owner)).sum::<u64>();
    // Numbers that all say to all: samples and tokens, the sums of losses, and the square sums of all parameters with their length.
    let numbers = 6 * 8 + 8 + 1 + 8 * (shards + ParameterSpec::all(model).len()) as u64;
    Ok((0..number).map(of_rank).max().unwrap_or(0) + others * numbers)
}
