//! Tensors in files: resident while they are used, and otherwise in the system's page cache or on the disk.
//!
//! This is only about speed and memory. A tensor in a file is read and changed like any other, whether its pages were asked for or not.
//! Asking for pages of a tensor that is not in a file does nothing.
//!
//! Invariants: advice about a contiguous view covers its own elements, and advice about a strided view all of its storage. The file is
//! written under the tensor's write lock, so that no reader of the tensor sees it change.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

use half::{bf16, f16};
use heap::{Extent, ExtentMut, FileMemory};

use crate::bytes::{bytes, bytes_mut, from_bytes, with_bytes};
use crate::elements::{assume_filled, elements, overwrite, share_storage};

/// When bytes written to a file go to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// When the system chooses.
    Later,
    /// At once: a few megabytes are written at a time, and each piece is waited for. In a control group whose limit is the budget, the
    /// system has no room for more, and would kill the process instead of waiting.
    Now,
}

/// Copies `x`, which is on the CPU, into the file if it is large enough to have pages of its own.
///
/// # Errors
/// A file that cannot be written.
pub fn copy_into_file(x: &Tensor, memory: &FileMemory, writes: WritePolicy) -> Result<Tensor> {
    let x = x.contiguous()?;
    if !x.device().is_cpu() || !matches!(x.dtype(), DType::F32 | DType::F64 | DType::BF16) {
        return memory.allocating(|| x.copy());
    }
    // These pages are not touched: whole writes are faster, as [`copy_from_file`] explains.
    let copy = memory.allocating(|| from_bytes(x.shape(), x.dtype(), |_| ()))?;
    if !is_in_file(&copy) {
        return x.copy();
    }
    overwrite_in_file(&copy, &x, writes)?;
    Ok(copy)
}

/// Whether [`tensor_in_file`] takes this dtype here.
pub fn can_read_in_place(dtype: DType) -> bool {
    let has_order =
        cfg!(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_endian = "little", not(miri)));
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::U8) && has_order
}

/// Returns a tensor whose elements are the bytes of a file from `offset` on, without a copy. `None` where the bytes cannot be used in
/// place: too few elements, a misaligned offset, a dtype without kernels, or a processor with another byte order. The file must be mapped
/// for reading, and the tensor must not be changed: the system kills a process that writes there.
///
/// # Errors
/// A shape that has too many elements.
pub fn tensor_in_file(memory: &FileMemory, offset: usize, shape: &[usize], dtype: DType) -> Result<Option<Tensor>> {
    let shape = Shape::from(shape);
    elements(&shape)?;
    if !can_read_in_place(dtype) {
        return Ok(None);
    }
    fn view<T: WithDType>(memory: &FileMemory, offset: usize, shape: Shape) -> Result<Option<Tensor>> {
        let data = memory.block_at::<T>(offset, shape.elem_count()).and_then(assume_filled);
        data.map(|data| Tensor::from_vec(data, shape, &Device::Cpu)).transpose()
    }
    match dtype {
        DType::BF16 => view::<bf16>(memory, offset, shape),
        DType::F16 => view::<f16>(memory, offset, shape),
        DType::U8 => view::<u8>(memory, offset, shape),
        _ => view::<f32>(memory, offset, shape),
    }
}

/// Whether the tensor lies in a file.
pub fn is_in_file(x: &Tensor) -> bool {
    with_extent(x, |_| ()).is_some()
}

/// Has the system read those pages of the tensor that are on the disk only, without waiting.
pub fn read_ahead(x: &Tensor) {
    with_extent(x, |extent| extent.read_ahead());
}

/// Makes the tensor resident. Cheaper than touching its pages one by one.
pub fn page_in(x: &Tensor) {
    with_extent(x, |extent| extent.page_in());
}

/// Removes the tensor's pages from the resident set until it is used again.
pub fn page_out(x: &Tensor) {
    with_extent(x, |extent| extent.page_out());
}

/// Copies a tensor in a file to memory, and keeps its own pages out of memory. Returns `None` if the tensor is not in a file. A view that
/// is not contiguous is copied through its pages.
///
/// To change such a tensor, change a copy and [`overwrite_in_file`]. The kernel takes longer for the first write to each page of a file
/// than for writing the pages together: Adafactor took 2.6 s for 720 MB of weights in their pages.
///
/// # Errors
/// A file that cannot be read, or that was shortened.
pub fn copy_from_file(x: &Tensor) -> Result<Option<Tensor>> {
    if !x.is_contiguous() {
        return if is_in_file(x) { x.contiguous().map(Some) } else { Ok(None) };
    }
    let copied = with_extent(x, |extent| {
        let mut done = Ok(());
        let copy = from_bytes(x.shape(), x.dtype(), |bytes| done = extent.read(bytes))?;
        done?;
        Ok(copy)
    });
    copied.transpose()
}

/// Overwrites `x`, which lies in a file, with the values of a tensor of the same shape and dtype.
///
/// Waits until no reader holds `x`, like every operation that changes a tensor in place. A thread that holds a guard of its storage must
/// not call this.
///
/// # Errors
/// A file that cannot be written, or that was shortened. A view that is not contiguous. `values` that share storage with `x`.
pub fn overwrite_in_file(x: &Tensor, values: &Tensor, writes: WritePolicy) -> Result<()> {
    struct Overwrite<'a> {
        values: &'a [u8],
        waits: bool,
    }
    impl InplaceOp1 for Overwrite<'_> {
        fn name(&self) -> &'static str {
            "overwrite_in_file"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("overwrite_in_file: expected a contiguous tensor, got strides {:?}", layout.stride())
            };
            let elements = match storage {
                CpuStorage::F32(data) => bytes_mut(&mut data[start..end]),
                CpuStorage::F64(data) => bytes_mut(&mut data[start..end]),
                CpuStorage::BF16(data) => bytes_mut(&mut data[start..end]),
                CpuStorage::F16(data) => bytes_mut(&mut data[start..end]),
                CpuStorage::U8(data) => bytes_mut(&mut data[start..end]),
                _ => &mut [],
            };
            match ExtentMut::find(elements) {
                Some(mut extent) => Ok(extent.write(self.values, self.waits)?),
                None => bail!("overwrite_in_file: expected a tensor in a file"),
            }
        }
    }

    if (x.shape(), x.dtype()) != (values.shape(), values.dtype()) {
        bail!(
            "overwrite_in_file: expected {:?} {:?}, got {:?} {:?}",
            x.dtype(),
            x.dims(),
            values.dtype(),
            values.dims()
        )
    }
    if share_storage(x, values) {
        bail!("overwrite_in_file: the values share their storage with the tensor to be changed")
    }
    with_bytes(values, |values| x.inplace_op1(&Overwrite { values, waits: writes == WritePolicy::Now }))?
}

/// Overwrites `x`, which lies on the CPU in a file or in memory, with the values of a tensor of the same shape and dtype.
///
/// # Errors
/// Those of [`overwrite_in_file`].
pub fn overwrite_in_place(x: &Tensor, values: &Tensor, writes: WritePolicy) -> Result<()> {
    if is_in_file(x) { overwrite_in_file(x, values, writes) } else { overwrite(x, values) }
}

/// Calls `f` with the part of a file in which the tensor's elements lie, if any. For a strided view, this is all of its storage.
pub fn with_extent<R>(x: &Tensor, f: impl FnOnce(&Extent) -> R) -> Option<R> {
    fn extent_of_slice<T>(data: &[T], range: Option<Range<usize>>) -> Option<Extent<'_>>
    where
        T: WithDType,
    {
        // Values of an unallocated tensor lie nowhere.
        Extent::find(bytes(range.map_or(Some(data), |range| data.get(range))?))
    }
    let (storage, layout) = x.storage_and_layout();
    let range = layout.contiguous_offsets().map(|(start, end)| start..end);
    let extent = match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => extent_of_slice(data, range),
        Storage::Cpu(CpuStorage::F64(data)) => extent_of_slice(data, range),
        Storage::Cpu(CpuStorage::BF16(data)) => extent_of_slice(data, range),
        Storage::Cpu(CpuStorage::F16(data)) => extent_of_slice(data, range),
        Storage::Cpu(CpuStorage::U8(data)) => extent_of_slice(data, range),
        _ => None,
    };
    extent.as_ref().map(f)
}
