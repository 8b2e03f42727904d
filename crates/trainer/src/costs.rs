//! The trainer's own memory, as rows of the bill. The model has its own rows.

use std::collections::HashSet;

use candle_core::DType;
use collective::Shards;
use t5::safetensors::writing_bytes;
use t5::{Config, CostRow, ParameterSpec};
use t5_ops::{Needs, Path, SquareSums};

use crate::between_cards;
use crate::error::Result;
use crate::files;
use crate::freeze;
use crate::groups;
use crate::options::TrainerOptions;
use crate::parallel::owners;
use crate::state_file;

/// Memory for saving a checkpoint of several processes: pieces of a tensor in transit, as values and as bytes, and the buffer of a file.
const SAVE_BYTES: u64 = 4 * t5::safetensors::PIECE_BYTES as u64;
/// Bytes of a tensor's entry in the header of its file, as values of JSON and as text.
const DESCRIBED_BYTES: u64 = 2 << 10;
/// Bytes of the run's own state as values of JSON: an estimate.
const STATE_BYTES: u64 = 256 << 10;

/// All parameters: whether each trains, and the number of its group.
struct Named {
    specs: Vec<ParameterSpec>,
    trainable: Vec<bool>,
    groups: Vec<Option<usize>>,
}

fn named(config: &Config, options: &TrainerOptions) -> Result<Named> {
    let specs = ParameterSpec::all(config);
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let trainable = freeze::trainable(names.iter().copied(), &options.freeze, config.lora.as_ref())?;
    let groups = groups::group_of_each(&names, &trainable, &options.groups)?;
    Ok(Named { specs, trainable, groups })
}

/// The bytes of the optimizer's state, which exists from [`crate::Trainer::new`] on: a pure function of configuration and options.
///
/// `parameters` is the dtype of the model's parameters.
///
/// # Errors
/// An unknown item in `freeze`, or everything frozen; an unknown item in a group, or a group without a trained parameter.
pub fn optimizer_state(config: &Config, options: &TrainerOptions, parameters: DType) -> Result<CostRow> {
    let Named { specs, trainable, .. } = named(config, options)?;
    let trained = specs.iter().zip(trainable).filter(|(_, trains)| *trains);
    let bytes = trained.map(|(spec, _)| options.optimizer.state_bytes(&spec.shape, parameters)).sum();
    Ok(CostRow { name: "optimizer state", bytes })
}

/// [`optimizer_state`] of the process with the largest share, where `processes` share it ([`crate::Sharding::Optimizer`]).
///
/// # Errors
/// As [`optimizer_state`].
pub fn optimizer_state_shard(
    config: &Config,
    options: &TrainerOptions,
    parameters: DType,
    processes: usize,
) -> Result<CostRow> {
    let mut held = vec![0; processes];
    for (spec, owner) in sharded_optimizer(config, options, processes)? {
        held[owner] += options.optimizer.state_bytes(&spec.shape, parameters);
    }
    Ok(CostRow { name: "optimizer state", bytes: held.into_iter().max().unwrap_or(0) })
}

/// Bytes on each card where cards of several processes send each other gradients, without NCCL's own. `is_in_order`: shards are
/// summed in a fixed order.
pub fn between_cards(shards: Shards, is_in_order: bool) -> u64 {
    between_cards::buffers(shards, is_in_order)
}

/// The parameters that train, each with the number of the process that updates it.
///
/// # Errors
/// As [`optimizer_state`].
pub fn sharded_optimizer(
    config: &Config,
    options: &TrainerOptions,
    processes: usize,
) -> Result<Vec<(ParameterSpec, usize)>> {
    let Named { specs, trainable, .. } = named(config, options)?;
    let elements = specs.iter().zip(&trainable).map(|(spec, trains)| if *trains { spec.elements() } else { 0 });
    let owners = owners(&elements.collect::<Vec<_>>(), processes);
    let dealt = specs.into_iter().zip(owners).zip(trainable);
    Ok(dealt.filter(|(_, trains)| *trains).map(|(dealt, _)| dealt).collect())
}

/// The process that holds most in a step, if each process of [`sharded_optimizer`] holds its own gradients. Every process also holds the
/// gradients of the tables until backward is over.
pub fn fullest(dealt: &[(ParameterSpec, usize)]) -> usize {
    let processes = dealt.iter().map(|(_, owner)| owner + 1).max().unwrap_or(0);
    let held = |rank: usize| -> u64 {
        let held = dealt.iter().filter(|(spec, owner)| *owner == rank || spec.part.is_table());
        held.map(|(spec, _)| spec.elements()).sum()
    };
    // The first of several such processes.
    (0..processes).rev().max_by_key(|&rank| held(rank)).unwrap_or(0)
}

/// The parameters that process `rank` of `processes` does not hold, where each holds its own ([`crate::Sharding::Weights`]).
///
/// # Errors
/// As [`optimizer_state`].
pub fn weights_elsewhere(
    config: &Config,
    options: &TrainerOptions,
    rank: usize,
    processes: usize,
) -> Result<HashSet<String>> {
    if config.lora.is_some() {
        return Ok(HashSet::new());
    }
    let is_elsewhere =
        |(spec, owner): &(ParameterSpec, usize)| *owner != rank && t5::is_matrix(&spec.name, spec.shape.len());
    let dealt = sharded_optimizer(config, options, processes)?.into_iter();
    Ok(dealt.filter(is_elsewhere).map(|(spec, _)| spec.name).collect())
}

/// The optimizer's state where its large moments are in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateOnDisk {
    /// Bytes in memory: the small moments, and the rows of large ones that are being updated.
    pub resident: u64,
    /// Bytes in memory while a checkpoint is read: the small moments, and the largest one in transit.
    pub loading: u64,
    /// Bytes that a step reads and writes.
    pub written: u64,
}

/// [`optimizer_state`] with its large moments in a file. `None` if no moment would be there.
///
/// # Errors
/// As [`optimizer_state`].
pub fn optimizer_state_on_disk(
    config: &Config,
    options: &TrainerOptions,
    parameters: DType,
) -> Result<Option<StateOnDisk>> {
    if !options.optimizer.rule().has_state_by_element() {
        return Ok(None);
    }
    let state = options.optimizer.rule().state(&[1]);
    let (tensors, width) = (state.len() as u64, state[0].dtype(parameters).size_in_bytes());
    let Named { specs, trainable, .. } = named(config, options)?;
    let trained = specs.iter().zip(trainable).filter(|(_, trains)| *trains).map(|(spec, _)| spec);
    let bytes = |spec: &&ParameterSpec| spec.elements() * width as u64;
    let (large, small): (Vec<_>, Vec<_>) = trained.partition(|spec| bytes(spec) >= heap::LARGE_BYTES as u64);
    let small: u64 = small.iter().map(bytes).sum();
    let at_a_time = large.iter().map(|spec| state_file::resident_bytes(&spec.shape, width)).max();
    let largest = large.iter().map(bytes).max();
    Ok(at_a_time.zip(largest).map(|(at_a_time, largest)| StateOnDisk {
        resident: tensors * (small + at_a_time),
        loading: tensors * small + largest,
        written: tensors * large.iter().map(bytes).sum::<u64>(),
    }))
}

/// The number of elements of the parameters that train.
///
/// # Errors
/// As [`optimizer_state`].
pub fn trained_elements(config: &Config, options: &TrainerOptions) -> Result<u64> {
    let Named { specs, trainable, .. } = named(config, options)?;
    Ok(specs.iter().zip(trainable).filter(|(_, trains)| *trains).map(|(spec, _)| spec.elements()).sum())
}

/// The number of trained elements of each group of parameters.
///
/// # Errors
/// As [`optimizer_state`].
pub fn elements_of_groups(config: &Config, options: &TrainerOptions) -> Result<Vec<u64>> {
    let Named { specs, groups, .. } = named(config, options)?;
    let mut elements = vec![0; options.groups.len()];
    for (spec, group) in specs.iter().zip(groups) {
        group.into_iter().for_each(|group| elements[group] += spec.elements());
    }
    Ok(elements)
}

/// The needs of an update of these parameters together on a device: to measure their gradients, and to apply them.
pub fn update_on_device(options: &TrainerOptions, specs: &[&ParameterSpec]) -> [Needs; 2] {
    let size = |spec: &&ParameterSpec| match *spec.shape {
        [rows, width] => (rows, width),
        _ => (1, spec.elements() as usize),
    };
    let sizes: Vec<(usize, usize)> = specs.iter().map(size).collect();
    let dtypes = specs.iter().map(|spec| spec.dtype(options.parameter_dtype()));
    let rule = options.optimizer.rule();
    let mut applied = rule.needs(&sizes.iter().copied().zip(dtypes).collect::<Vec<_>>());
    if rule.least_step_scale().is_some() {
        let read = SquareSums::totals_needs(Path::Device, sizes.len());
        applied = Needs::most([t5_ops::square_sums_needs(Path::Device, &sizes), read, applied]);
    }
    let measured = t5_ops::square_sums_needs(Path::Device, &sizes);
    // If gradients stay until they are applied, their update is made ready when they are measured.
    [Needs { transient: measured.transient.max(applied.transient), ..measured }, applied]
}

/// Memory for saving, beside that of training, where several processes train. It does not depend on the model's size.
pub fn saving_of_several() -> CostRow {
    CostRow { name: "save buffers", bytes: SAVE_BYTES }
}

/// Where the tensors of a checkpoint are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedFrom {
    /// On a device. They are copied from it a piece at a time.
    pub device: bool,
    /// Whether large moments are in a file.
    pub moments_in_file: bool,
}

/// Memory for saving, beside that of training: a piece of the largest tensor, the header of its file, a buffer.
///
/// # Errors
/// As [`optimizer_state`].
pub fn saving(config: &Config, options: &TrainerOptions, parameters: DType, from: SavedFrom) -> Result<CostRow> {
    let Named { specs, trainable, .. } = named(config, options)?;
    let is_saved = |spec: &&ParameterSpec| config.lora.as_ref().is_none_or(|lora| lora.trains(&spec.name));
    let weights = specs.iter().filter(is_saved).map(|spec| {
        let dtype = spec.dtype(parameters);
        let is_bf16 = dtype == DType::BF16 && config.lora.is_none();
        writing_bytes(spec.elements(), dtype, if is_bf16 { DType::BF16 } else { DType::F32 }, from.device)
    });
    let trained = specs.iter().zip(trainable).filter(|(_, trains)| *trains);
    let state = trained.flat_map(|(spec, _)| options.optimizer.rule().state(&spec.shape));
    let moments = state.map(|tensor| {
        let dtype = tensor.dtype(parameters);
        let is_in_file = from.moments_in_file && tensor.bytes(parameters) >= heap::LARGE_BYTES as u64;
        let piece = if is_in_file { state_file::saved_bytes(&tensor.shape, dtype.size_in_bytes()) } else { 0 };
        // A moment that is read from a file is on the host.
        piece + writing_bytes(tensor.elements(), dtype, dtype, from.device && !is_in_file)
    });
    let largest = |tensors: &mut dyn Iterator<Item = u64>, times: u64| {
        let (count, largest) = tensors.fold((0, 0), |(count, most): (u64, u64), bytes| (count + 1, most.max(bytes)));
        times * count * DESCRIBED_BYTES + largest
    };
    // Two, because a tied head's table may be saved twice.
    let most = largest(&mut { weights }, 2).max(largest(&mut { moments }, 1));
    Ok(CostRow { name: "save buffers", bytes: STATE_BYTES + files::BUFFER_BYTES as u64 + most })
}
