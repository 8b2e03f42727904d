//! Where tensors lie, and what is carried out there.
//!
//! A device has kernels of its own, and some things lie beside a device alone. The table of levers says which of their values do
//! ([`crate::Lever::works_at`]); the search leaves the others out, and here a job that asks for one is refused.

use memory_policy::{Bytes, CostRow, MemorySnapshot, Place};
use t5::Levers;

use crate::StepChoice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::levers::in_blocks;
use crate::names::{COMMUNICATION, CONTEXT, KERNELS, OFF_THE_CARD, POOL, STAGING};
use crate::processes::Processes;

/// Refuses a job that asks for something that the place of its tensors cannot carry out.
///
/// # Errors
/// [`Error::OnADeviceAlone`], which names it.
pub fn check(job: &Job<'_>) -> Result<()> {
    if let Some((lever, value)) = job.pins.that_fails_at(job.place) {
        let flag = lever.flag.map(|flag| format!(" (`bench --{}`)", flag.long)).unwrap_or_default();
        return Err(Error::OnADeviceAlone { what: format!("`memory.{} = {}`{flag}", lever.name, value.written()) });
    }
    Ok(())
}

/// Bytes in the host's memory and on a device while processes talk.
pub fn communication(place: Place, processes: &Processes) -> Vec<CostRow> {
    let Processes { buffers, between_cards, .. } = *processes;
    let note = match (place, between_cards) {
        (Place::Device, None) => "on its way between cards at a time, through the host's memory",
        _ => "sent to other processes and received at a time",
    };
    let of = |bytes: u64, note: &str, place| (bytes > 0).then(|| CostRow::new(COMMUNICATION, bytes, note).at(place));
    let on_cards = of(between_cards.unwrap_or(0), "received from other cards at a time, for sums in order", place);
    of(buffers, note, Place::Host).into_iter().chain(on_cards).collect()
}

/// The host's part of operands on a device.
pub fn staging(bytes: u64) -> Option<CostRow> {
    (bytes > 0).then(|| CostRow::new(STAGING, bytes, "tensors on their way to or from the device"))
}

/// Bytes of the host's memory that tensors of a device go through on their way to other processes.
pub fn pinned_for_others(place: Place, processes: &Processes) -> u64 {
    if place == Place::Device && processes.number > 1 { t5_ops::STAGING_BYTES } else { 0 }
}

/// Where tensors lie, in words.
pub fn in_memory(place: Place) -> &'static str {
    match place {
        Place::Host => "in memory",
        Place::Device => "on the card",
    }
}

/// Words about weights that are `kept` in files, and how many of them are `here`.
pub(crate) fn note_of_weights(kept: &str, place: Place, levers: &Levers) -> String {
    let here = in_memory(place);
    let (one, of_others) =
        if levers.has_weights_by_matrix() { ("one matrix", "one matrix") } else { ("one block", "one") };
    match levers.weight_blocks_in_memory() {
        0 if levers.copies_overlap() => format!("{kept}; one block at a time {here}, and the next one"),
        0 => format!("{kept}; {one} at a time {here}"),
        blocks => format!("{kept}; {} {here}, and {of_others} at a time of the others", in_blocks(blocks)),
    }
}

/// What is kept in the host's memory beside a device.
pub fn off_the_card(bytes: u64) -> Option<CostRow> {
    let note = "weights, moments, activations and gradients that are off the card";
    (bytes > 0).then(|| CostRow::new(OFF_THE_CARD, bytes, note))
}

/// A card's context with the modules of candle's kernels: an assumption, until a card is opened and its free memory says more.
const ASSUMED_CONTEXT_BYTES: u64 = 384 << 20;
/// The workspace of cuBLAS on a card of compute capability 9.0, which takes most: NVIDIA's documentation of `cublasSetWorkspace`.
const CUBLAS_WORKSPACE_BYTES: u64 = 32 << 20;
/// Buffers of NCCL, which it has for each other card and channel: an assumption.
const ASSUMED_NCCL_BYTES: u64 = 256 << 20;
/// The most that is held beside tensors because memory comes in units, until a card is opened: units of 2 MiB for small and for large tensors.
const ASSUMED_POOL_UNIT: Bytes = Bytes(4 << 20);
/// Room between tensors, because they go in another order than they came. Runs of T5 have 1 to 8 %, but for their limit.
const POOL_PERCENT: u64 = 4;

/// What a device holds beside tensors, whatever is chosen, with NCCL or without. Once it has been opened and a step was rehearsed on it, that is measured.
pub fn context(place: Place, has_nccl: bool, now: &MemorySnapshot) -> Option<CostRow> {
    if place == Place::Host {
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

/// What a device's libraries will load into the host's memory.
pub fn kernels_on_host(place: Place, now: &MemorySnapshot) -> Option<CostRow> {
    let bytes = now.device.as_ref().filter(|_| place == Place::Device)?.kernels_on_host;
    let note = "assumed: those that cuBLAS loads for the sizes of a step";
    (bytes > Bytes::ZERO).then(|| CostRow::new(KERNELS, bytes.0, note))
}

/// Adds what is held on the device beside the tensors of each phase and those of `fixed`.
pub fn add_pool(choice: &mut StepChoice, fixed: &[CostRow], now: &MemorySnapshot) {
    let of_tensors = |rows: &[CostRow]| -> Bytes {
        let on_device = rows.iter().filter(|row| row.place == Place::Device && row.name != CONTEXT);
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

/// The memory that is held on a device beside tensors of this size.
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
    .at(Place::Device)
}

#[cfg(test)]
mod tests;
