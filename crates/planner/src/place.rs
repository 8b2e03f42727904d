//! The place of tensors, and the settings that it allows.
//!
//! Some kernels, and some values of levers, exist only on a device. The table of levers says which values do ([`crate::Lever::works_at`]).
//! The search leaves the others out, and this module refuses a job that asks for one.

use memory_policy::{Bytes, CostRow, MemorySnapshot, MemorySpace};
use t5::Levers;

use crate::StepChoice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::levers::in_blocks;
use crate::names::{COMMUNICATION, CONTEXT, KERNELS, OFFLOADED_TO_HOST, POOL, STAGING};
use crate::processes::Processes;

/// Refuses a job that asks for a setting that the place of its tensors cannot carry out.
///
/// # Errors
/// [`Error::OnADeviceAlone`], which names the setting.
pub fn check(job: &Job<'_>) -> Result<()> {
    if let Some((lever, value)) = job.pins.that_fails_at(job.place) {
        let flag = lever.flag.map(|flag| format!(" (`bench --{}`)", flag.long)).unwrap_or_default();
        return Err(Error::OnADeviceAlone { what: format!("`memory.{} = {}`{flag}", lever.name, value.written()) });
    }
    Ok(())
}

/// The rows of buffers in the host's memory and on a device for communication between processes.
pub fn communication(place: MemorySpace, processes: &Processes) -> Vec<CostRow> {
    let Processes { buffers, between_cards, .. } = *processes;
    let note = match (place, between_cards) {
        (MemorySpace::Device, None) => "on its way between GPUs at a time, through the host's memory",
        _ => "sent to other processes and received at a time",
    };
    let of = |bytes: u64, note: &str, place| (bytes > 0).then(|| CostRow::new(COMMUNICATION, bytes, note).at(place));
    let on_cards = of(between_cards.unwrap_or(0), "received from other GPUs at a time, for sums in order", place);
    of(buffers, note, MemorySpace::Host).into_iter().chain(on_cards).collect()
}

/// The row of operands on the host for a device.
pub fn staging(bytes: u64) -> Option<CostRow> {
    (bytes > 0).then(|| CostRow::new(STAGING, bytes, "tensors on their way to or from the device"))
}

/// Bytes of pinned host memory through which a device's tensors go to other processes.
pub fn pinned_for_others(place: MemorySpace, processes: &Processes) -> u64 {
    if place == MemorySpace::Device && processes.number > 1 { cuda_device::STAGING_BYTES } else { 0 }
}

/// The place of tensors, in words.
pub fn in_memory(place: MemorySpace) -> &'static str {
    match place {
        MemorySpace::Host => "in memory",
        MemorySpace::Device => "on the GPU",
    }
}

/// A note about weights: where they are `kept`, and how many are in memory at a time.
pub(crate) fn note_of_weights(kept: &str, place: MemorySpace, levers: &Levers) -> String {
    let here = in_memory(place);
    let (one, of_others) =
        if levers.has_weights_by_matrix() { ("one matrix", "one matrix") } else { ("one block", "one") };
    match levers.weight_blocks_in_memory() {
        0 if levers.copies_overlap() => format!("{kept}; one block at a time {here}, and the next one"),
        0 => format!("{kept}; {one} at a time {here}"),
        blocks => format!("{kept}; {} {here}, and {of_others} at a time of the others", in_blocks(blocks)),
    }
}

/// The row of tensors kept in the host's memory beside a device.
pub fn offloaded_to_host(bytes: u64) -> Option<CostRow> {
    let note = "weights, moments, activations and gradients that are off the GPU";
    (bytes > 0).then(|| CostRow::new(OFFLOADED_TO_HOST, bytes, note))
}

/// A card's context with the modules of candle's kernels. It is assumed until a card is opened and its free memory is known.
const ASSUMED_CONTEXT_BYTES: u64 = 384 << 20;
/// The workspace of cuBLAS on a card of compute capability 9.0, which needs most: NVIDIA's documentation of `cublasSetWorkspace`.
const CUBLAS_WORKSPACE_BYTES: u64 = 32 << 20;
/// Buffers of NCCL for the other cards and channels: an assumption.
const ASSUMED_NCCL_BYTES: u64 = 256 << 20;
/// The most memory that is unused because the pool grows by units, until a card is opened: units of 2 MiB for small and for large tensors.
const ASSUMED_POOL_UNIT: Bytes = Bytes(4 << 20);
/// Unused memory between tensors, because they are freed in another order than allocated. Runs of T5 have 1 to 8 %, unless the limit
/// prevents it.
const POOL_PERCENT: u64 = 4;

/// The row of memory that a device holds beside tensors under every plan, with NCCL or without. After a device has been opened and a step
/// rehearsed on it, this memory is measured.
pub fn context(place: MemorySpace, has_nccl: bool, now: &MemorySnapshot) -> Option<CostRow> {
    if place == MemorySpace::Host {
        return None;
    }
    let (nccl, of) = if has_nccl { (ASSUMED_NCCL_BYTES, "cuBLAS, NCCL") } else { (0, "cuBLAS") };
    let measured = now.device.as_ref().map_or(Bytes::ZERO, |device| device.used.saturating_sub(device.pool));
    let row = match measured {
        Bytes::ZERO => {
            let assumed = ASSUMED_CONTEXT_BYTES + CUBLAS_WORKSPACE_BYTES + nccl;
            CostRow::new(CONTEXT, assumed, format!("assumed; a run measures it: context, kernels, {of}"))
        }
        Bytes(measured) => CostRow::new(CONTEXT, measured, format!("measured: context, kernels, {of}")),
    };
    Some(row.at(place))
}

/// The row of kernels that a device's libraries will load into the host's memory.
pub fn kernels_on_host(place: MemorySpace, now: &MemorySnapshot) -> Option<CostRow> {
    let bytes = now.device.as_ref().filter(|_| place == MemorySpace::Device)?.kernels_on_host;
    let note = "assumed: those that cuBLAS loads for the sizes of a step";
    (bytes > Bytes::ZERO).then(|| CostRow::new(KERNELS, bytes.0, note))
}

/// Adds the row of the device's pool to each phase, for the tensors of the phase and of `fixed`.
pub fn add_pool(choice: &mut StepChoice, fixed: &[CostRow], now: &MemorySnapshot) {
    let of_tensors = |rows: &[CostRow]| -> Bytes {
        let on_device = rows.iter().filter(|row| row.place == MemorySpace::Device && row.name != CONTEXT);
        on_device.map(|row| row.bytes).sum()
    };
    let fixed = of_tensors(fixed);
    let phases = choice.other_phases.iter_mut().map(|phase| &mut phase.rows);
    for rows in std::iter::once(&mut choice.rows).chain(phases) {
        let tensors = fixed + of_tensors(rows);
        if tensors > Bytes::ZERO {
            rows.push(pool_beside(tensors, now));
        }
    }
}

/// The row of memory that a device's pool holds beside `tensors` bytes of tensors.
fn pool_beside(tensors: Bytes, now: &MemorySnapshot) -> CostRow {
    let (unit, known) = match now.device.as_ref().map(|device| device.pool_unit) {
        None | Some(Bytes::ZERO) => (ASSUMED_POOL_UNIT, "assumed"),
        Some(measured) => (measured, "measured"),
    };
    let bytes = tensors.percent(POOL_PERCENT) + unit;
    CostRow::new(
        POOL,
        bytes.0,
        format!("{known}: {unit} of units that are not full; assumed: {POOL_PERCENT} % of tensors between them"),
    )
    .at(MemorySpace::Device)
}

#[cfg(test)]
mod tests;
