//! Tensors in files: resident while they are used, and in the system's page cache or on the disk while they are not.
//!
//! All of this is about speed and memory. A tensor in a file is read and changed like any other, whether its pages were
//! asked for or not, and to ask about a tensor that is not in a file does nothing.

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

use crate::allocator::{FileMemory, Stretch};
use crate::bytes::{from_bytes, with_bytes};
use crate::dispatch::has_kernel;
use crate::storage::{filled, with_element};

/// When what is written to a file goes to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// When the system sees fit.
    Later,
    /// A few megabytes at a time are waited for: where the system has no room for more, as in a control group whose limit is
    /// the budget, it kills rather than waits itself.
    Now,
}

/// A copy of `x`, on the CPU, that lies in the file if it is large enough to have pages of its own.
///
/// # Errors
/// A file that cannot be written.
pub fn copy_into_file(x: &Tensor, memory: &FileMemory, writes: Writes) -> Result<Tensor> {
    let x = x.contiguous()?;
    if !has_kernel(&[&x]) {
        return memory.allocating(|| x.copy());
    }
    // Its pages are not touched: whole writes are faster, see below.
    let unset = || with_element!(x.dtype(), Value, filled::<Value>(x.shape(), |_| Ok(())));
    let copy = memory.allocating(unset)?;
    if !is_in_file(&copy) {
        return x.copy();
    }
    overwrite_in_file(&copy, &x, writes)?;
    Ok(copy)
}

/// Whether the tensor lies in a file.
pub fn is_in_file(x: &Tensor) -> bool {
    stretch(x).is_some()
}

/// Has the system read what of the tensor is on the disk only, without waiting for it.
pub fn read_ahead(x: &Tensor) {
    stretch(x).iter().for_each(Stretch::read_ahead);
}

/// Makes the tensor resident: cheaper than touching its pages one by one.
pub fn page_in(x: &Tensor) {
    stretch(x).iter().for_each(Stretch::page_in);
}

/// Has the tensor leave the resident set until it is used again.
pub fn page_out(x: &Tensor) {
    stretch(x).iter().for_each(Stretch::page_out);
}

/// A copy in memory of a tensor in a file, whose own pages stay out of it; nothing if it is not in one.
///
/// To change such a tensor, change a copy and [`overwrite_in_file`]: the first write to each page of a file takes the
/// kernel longer than to write them together. Adafactor took 2.6 s for 720 MB of weights in their pages.
///
/// # Errors
/// A file that cannot be read.
pub fn copy_from_file(x: &Tensor) -> Result<Option<Tensor>> {
    let Some(stretch) = stretch(x) else { return Ok(None) };
    let mut done = Ok(());
    let copy = from_bytes(x.shape(), x.dtype(), |bytes| done = stretch.read(bytes))?;
    done?;
    Ok(Some(copy))
}

/// Writes the values of a tensor of the same shape and dtype in the place of `x`, which lies in a file.
///
/// # Errors
/// A file that cannot be written.
pub fn overwrite_in_file(x: &Tensor, values: &Tensor, writes: Writes) -> Result<()> {
    if (x.shape(), x.dtype()) != (values.shape(), values.dtype()) {
        bail!(
            "overwrite_in_file: expected {:?} {:?}, got {:?} {:?}",
            x.dtype(),
            x.dims(),
            values.dtype(),
            values.dims()
        )
    }
    let Some(stretch) = stretch(x) else { bail!("overwrite_in_file: expected a tensor in a file") };
    Ok(with_bytes(values, |bytes| stretch.write(bytes, writes == Writes::Now))??)
}

/// The pages of the tensor's block, if that lies in a file.
fn stretch(x: &Tensor) -> Option<Stretch> {
    let (storage, _) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => Stretch::at(data.as_ptr().addr()),
        Storage::Cpu(CpuStorage::BF16(data)) => Stretch::at(data.as_ptr().addr()),
        Storage::Cpu(CpuStorage::F64(data)) => Stretch::at(data.as_ptr().addr()),
        _ => None,
    }
}
