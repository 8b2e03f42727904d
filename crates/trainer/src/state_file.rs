//! A file for the optimizer's large moments, so that memory holds only a few of their rows.
//!
//! The moments are tensors like any others. An update reads some rows into memory, changes them and writes them back: each byte is
//! read once and written once in a step. The file has no name: a run keeps its checkpoints only.
//!
//! With a device, the host's memory may take the place of the file. The rows are then changed on the device.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor, TensorId};
use cuda_device::copies::WriteBack;
use cuda_device::page_locked::PageLocked;
use cuda_device::{copies, copy_waits};
use heap::{FileMemory, LARGE_BYTES};
use t5::Files;
use t5::safetensors::PIECE_BYTES;
use tensor_storage::WritePolicy;

use crate::error::{Error, Result};
use crate::rule::Changed;

/// Bytes of a moment that are in memory while its parameter is updated.
const UPDATED_BYTES: usize = 4 << 20;

/// Rows of a parameter that are updated at a time. A vector is one row.
fn rows_at_a_time(shape: &[usize], size: usize) -> usize {
    match shape {
        [_, columns @ ..] if !columns.is_empty() => (UPDATED_BYTES / (columns.iter().product::<usize>() * size)).max(1),
        _ => usize::MAX,
    }
}

/// Bytes of a moment of a parameter of this shape that are in memory at a time.
pub(crate) fn resident_bytes(shape: &[usize], size: usize) -> u64 {
    let whole = shape.iter().product::<usize>() * size;
    let row = whole / shape.first().copied().unwrap_or(1).max(1);
    (rows_at_a_time(shape, size).saturating_mul(row)).min(whole) as u64
}

/// The number of a moment's rows that are read at a time for saving.
pub(crate) fn saved_rows(shape: &[usize]) -> usize {
    let columns = shape[1..].iter().product::<usize>().max(1);
    (PIECE_BYTES / size_of::<f32>() / columns).max(1)
}

/// Bytes of a moment of a parameter of this shape that are read at a time for saving.
pub(crate) fn saved_bytes(shape: &[usize], size: usize) -> u64 {
    let whole = shape.iter().product::<usize>();
    (saved_rows(shape).min(shape[0]) * (whole / shape[0].max(1)) * size) as u64
}

/// The file, or host memory, for the moments of one optimizer.
#[derive(Debug)]
pub(crate) struct StateFile {
    /// `None`: the host's memory.
    memory: Option<FileMemory>,
    /// The device of the parameters.
    device: Device,
    /// Whether the system has room for changed moments.
    writes: WritePolicy,
    /// Named in messages.
    path: PathBuf,
    /// Page locks of moments in the host's memory that were updated, for copies that the host takes no part in.
    locks: RefCell<HashMap<TensorId, Option<PageLocked>>>,
}

impl StateFile {
    /// Room for moments of these sizes, whose parameters are on `device`.
    ///
    /// # Errors
    /// [`t5::Error::Offload`], for example where the disk is full.
    pub fn create(files: &Files, sizes: &[usize], device: &Device) -> Result<StateFile> {
        let path = heap::shown_path(&files.directory);
        let create = || FileMemory::create(&files.directory, sizes.iter().copied());
        let memory = (!files.in_host_memory).then(create).transpose();
        let memory = memory.map_err(|source| t5::Error::Offload { path: path.clone(), source })?;
        let has_room = sizes.iter().map(|&bytes| bytes as u64).sum::<u64>() <= files.unwritten_bytes;
        let writes = if has_room { WritePolicy::Later } else { WritePolicy::Now };
        Ok(StateFile { memory, device: device.clone(), writes, path, locks: RefCell::default() })
    }

    /// Whether the moments of this file are in the kind of memory that `files` asks for: the host's, or a file.
    pub fn is_as_in(&self, files: &Files) -> bool {
        self.memory.is_none() == files.in_host_memory
    }

    /// Whether a moment is here, rather than on its parameter's device.
    pub fn holds(&self, moment: &Tensor) -> bool {
        tensor_storage::is_in_file(moment) || moment.device().is_cpu() != self.device.is_cpu()
    }

    /// Moves a large moment to the file, and out of memory. A smaller one stays on its parameter's device.
    ///
    /// # Errors
    /// [`t5::Error::Offload`].
    pub fn place(&self, moment: &Tensor) -> Result<Tensor> {
        let failed = |error| self.error(error);
        if moment.elem_count() * moment.dtype().size_in_bytes() < LARGE_BYTES {
            return moment.to_device(&self.device).map_err(failed);
        }
        let moment = moment.to_device(&Device::Cpu).map_err(failed)?;
        let Some(memory) = &self.memory else {
            return Ok(tensor_storage::copy_from_file(&moment).map_err(failed)?.unwrap_or(moment));
        };
        let placed = tensor_storage::copy_into_file(&moment, memory, self.writes).map_err(failed)?;
        tensor_storage::page_out(&placed);
        Ok(placed)
    }

    /// The update of a parameter whose state is in the file, some rows at a time: [`UPDATED_BYTES`] of each tensor of state are in memory.
    ///
    /// # Errors
    /// [`t5::Error::Offload`], and the errors of `update`.
    pub fn update(&self, changed: &Changed, update: impl Fn(Changed) -> Result<()>) -> Result<()> {
        let failed = |error| self.error(error);
        let &Changed { values, gradient, state, .. } = changed;
        state.iter().for_each(|moment| self.lock(moment));
        let rows = rows_at_a_time(values.dims(), state[0].dtype().size_in_bytes());
        for first_row in (0..values.dims()[0]).step_by(rows) {
            let count = rows.min(values.dims()[0] - first_row);
            let part = |x: &Tensor| x.narrow(0, first_row, count).map_err(failed);
            let moments = state.iter().map(part).collect::<Result<Vec<_>>>()?;
            let read = |moment: &Tensor| -> Result<Tensor> {
                let copy = tensor_storage::copy_from_file(moment).map_err(failed)?;
                // Rows on the host are copied once: to the device or, on the CPU, to other memory.
                match copy {
                    Some(copy) => copy_waits::moved(&copy, &self.device),
                    None if self.device.is_cpu() => moment.copy(),
                    None => copy_waits::moved(moment, &self.device),
                }
                .map_err(failed)
            };
            let copies = moments.iter().map(read).collect::<Result<Vec<_>>>()?;
            let (values, gradient) = (part(values)?, part(gradient)?);
            let part = Changed { values: &values, gradient: &gradient, state: &copies, first_row, ..*changed };
            update(part).map_err(|error| match error {
                Error::Tensor(error) => failed(error),
                error => error,
            })?;
            for (moment, copy) in moments.iter().zip(&copies) {
                self.write(moment, copy)?;
            }
        }
        Ok(())
    }

    /// Page-locks a moment at its first update.
    fn lock(&self, moment: &Tensor) {
        if self.memory.is_none() && !self.device.is_cpu() && moment.device().is_cpu() {
            let mut locks = self.locks.borrow_mut();
            locks.entry(moment.id()).or_insert_with(|| PageLocked::lock(moment, &self.device));
        }
    }

    /// Writes a changed copy over the moment.
    ///
    /// # Errors
    /// [`t5::Error::Offload`].
    pub fn write(&self, moment: &Tensor, changed: &Tensor) -> Result<()> {
        let write_back = copies::write_back(changed, moment, self.writes);
        let is_there = write_back.and_then(|write_back| write_back.map_or(Ok(()), WriteBack::complete));
        is_there.map_err(|error| self.error(error))
    }

    /// Converts an operation's error: an I/O error becomes an error of the file.
    fn error(&self, error: candle_core::Error) -> Error {
        match error {
            candle_core::Error::Io(source) => t5::Error::Offload { path: self.path.clone(), source }.into(),
            error => t5::Error::Tensor(error).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use t5_ops::{AdamwHyper, Rounding};

    use super::*;
    use crate::test_device::device;

    #[test]
    fn a_parameter_that_is_updated_some_rows_at_a_time_has_the_bits_of_one_that_is_updated_whole() {
        // Two parts and a remainder.
        let shape = [2 * UPDATED_BYTES / 4 / 512 + 7, 512];
        let of = |offset: f32, dtype| {
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| (i as f32 * 0.37 + offset).sin()).collect();
            Tensor::from_vec(values, shape.as_slice(), &device()).unwrap().to_dtype(dtype).unwrap()
        };
        assert_eq!(resident_bytes(&shape, 4), UPDATED_BYTES as u64);
        assert_eq!(resident_bytes(&[70_000], 4), 280_000);
        let hyper = AdamwHyper { rounding: Rounding::Stochastic { key: 5 }, update: 3, ..AdamwHyper::default() };
        let state = || [of(0.0, DType::BF16), of(1.0, DType::F32), of(2.0, DType::F32).abs().unwrap()];
        let gradient = of(3.0, DType::BF16);
        let [whole, parts] = [state(), state()];
        t5_ops::adamw(&whole[0], &gradient, &whole[1], &whole[2], &hyper).unwrap();
        let rows = rows_at_a_time(&shape, 4);
        for first_row in (0..shape[0]).step_by(rows) {
            let part = |x: &Tensor| x.narrow(0, first_row, rows.min(shape[0] - first_row)).unwrap();
            let hyper = AdamwHyper { first_row, ..hyper };
            t5_ops::adamw(&part(&parts[0]), &part(&gradient), &part(&parts[1]), &part(&parts[2]), &hyper).unwrap();
        }
        let bits = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (whole, parts) in whole.iter().zip(&parts) {
            assert!(bits(whole) == bits(parts));
        }
    }
}
