//! A device as its driver describes it: its memory, a part of which holds tensors of this process, and its compute capability.

use candle_core::{DType, Device, Result, bail};

/// Bytes of a device at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceBytes {
    /// The driver's name of the device.
    pub name: String,
    /// All of its memory.
    pub total: u64,
    /// Memory that no process holds.
    pub free: u64,
    /// Memory that this process holds for tensors.
    pub pool: u64,
    /// The most that this process held for tensors.
    pub pool_peak: u64,
    /// The part of `pool` that tensors take.
    pub tensors: u64,
    /// The most that tensors took.
    pub tensors_peak: u64,
}

/// The memory of a device now. `None`: the device is the CPU, or its driver does not say.
pub fn device_bytes(device: &Device) -> Option<DeviceBytes> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::bytes(device).ok(),
        _ => None,
    }
}

/// Returns the driver's name of a card and the version of the driver, as a label for measurements. `None` on the CPU.
pub fn card_and_driver(device: &Device) -> Option<String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::name_and_driver(device).ok(),
        _ => None,
    }
}

/// Opens an NVIDIA card by its number, with one stream for all computation. This process keeps memory of dropped tensors.
///
/// # Errors
/// A build without the feature `cuda`; the driver's error.
pub fn open_card(index: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(index)?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = &device {
        cuda::prepare(device)?;
    }
    Ok(device)
}

/// Counts the NVIDIA cards that this process sees: 0 in a build without the feature `cuda`.
///
/// # Errors
/// The driver's.
pub fn cards() -> Result<usize> {
    #[cfg(feature = "cuda")]
    return cuda::count();
    #[cfg(not(feature = "cuda"))]
    Ok(0)
}

/// Returns an identifier of a card that is the same in every process. `None` on the CPU, or where the driver does not say.
pub fn card_id(device: &Device) -> Option<String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::id(device),
        _ => None,
    }
}

/// Returns the most memory that is held besides tensors and the places between them, because memory comes in units. `None` if the device is
/// the CPU, or if its driver allocates for tensors and does not say.
pub fn pool_unit(device: &Device) -> Option<u64> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::card_memory::unit(device).map(|bytes| bytes as u64),
        _ => None,
    }
}

/// Limits the memory that is held for tensors of a device to `most` bytes. An allocation beyond the limit fails with the driver's error, as
/// on a card of that size. This thread drops its lists on the card and uploads them again later, so that the memory is given back if there
/// are no tensors. No recording may exist yet. Does nothing on the CPU.
///
/// # Errors
/// The driver's, and an error where the driver itself allocates for tensors.
pub fn limit_device(device: &Device, most: u64) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::limit(device, most),
        _ => {
            let _ = most;
            Ok(())
        }
    }
}

/// Gives the device the memory back that is held besides tensors, and resets the peak. Does nothing on the CPU.
///
/// # Errors
/// The driver's.
pub fn release_unused_of_device(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::release_unused(device),
        _ => Ok(()),
    }
}

/// Drops everything that this thread keeps of the cards that it has used: lists, pinned memory, streams and events. A card is closed when
/// the last of these and of its tensors is gone. The memory of the process that the card's context takes is then free.
pub fn release_thread_caches() {
    #[cfg(feature = "cuda")]
    {
        forget_lists();
        crate::waiting::forget();
        crate::copies::drop_copy_streams();
        crate::copy_waits::forget_pending();
        crate::card_memory::release_unused();
    }
}

/// Drops the tensors that this thread keeps on cards for later calls.
#[cfg(feature = "cuda")]
fn forget_lists() {
    crate::cuda::forget_lists();
    crate::ops::adafactor::cuda::forget_totals();
}

/// Whether an error says that a device had no memory left: the driver's or cuBLAS's error, found by its name in the text.
pub fn is_out_of_device_memory(error: &str) -> bool {
    ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|name| error.contains(name))
}

/// The lowest compute capability whose kernels multiply bf16: Ampere's.
const BF16_FROM: (i32, i32) = (8, 0);

/// Refuses an activation dtype that a device cannot compute in.
///
/// # Errors
/// bf16 on a card older than Ampere; the driver's error.
pub fn check_dtype(device: &Device, dtype: DType) -> Result<()> {
    let capability = match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Some(cuda::capability(device)?),
        _ => None,
    };
    capability.map_or(Ok(()), |capability| check_capability(capability, dtype))
}

fn check_capability((major, minor): (i32, i32), dtype: DType) -> Result<()> {
    if dtype == DType::BF16 && (major, minor) < BF16_FROM {
        let (from, _) = BF16_FROM;
        bail!("bf16 needs a card of compute capability {from}.0 (Ampere) or later, got {major}.{minor}")
    }
    Ok(())
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::trim;

#[cfg(feature = "cuda")]
mod cuda {
    use std::ffi::c_void;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::cublas::sys::{cublasMath_t, cublasSetMathMode, cublasSetWorkspace_v2};
    use candle_core::cuda_backend::cudarc::driver::sys::{
        CUmemPool_attribute as Attribute, CUmemoryPool, cuDriverGetVersion,
    };
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result};
    use candle_core::{CudaDevice, bail};

    use super::DeviceBytes;
    use crate::card_memory::{self, Count};

    /// The driver's pool, from which tensors come where this program does not allocate itself.
    fn pool(device: &CudaDevice) -> Result<CUmemoryPool, DriverError> {
        // SAFETY: the number is that of an open device.
        unsafe { result::device::get_mem_pool(device.cuda_stream().context().cu_device()) }
    }

    fn set(pool: CUmemoryPool, attribute: Attribute, mut bytes: u64) -> Result<(), DriverError> {
        // SAFETY: a pool of an open device; these attributes are 64 bits.
        unsafe { result::mem_pool::set_attribute(pool, attribute, (&raw mut bytes).cast()) }
    }

    fn get(pool: CUmemoryPool, attribute: Attribute) -> Result<usize, DriverError> {
        let mut bytes = 0usize;
        // SAFETY: a pool of an open device; these attributes are 64 bits, as pointers are where there are cards.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }?;
        Ok(bytes)
    }

    fn count_of_pool(device: &CudaDevice) -> Result<Count, DriverError> {
        let pool = pool(device)?;
        Ok(Count {
            held: get(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            held_peak: get(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            tensors: get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            tensors_peak: get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        })
    }

    pub fn bytes(device: &CudaDevice) -> Result<DeviceBytes, DriverError> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let (free, total) = context.mem_get_info()?;
        let count = card_memory::count(device).map_or_else(|| count_of_pool(device), Ok)?;
        Ok(DeviceBytes {
            name: context.name()?,
            total: total as u64,
            free: free as u64,
            pool: count.held as u64,
            pool_peak: count.held_peak as u64,
            tensors: count.tensors as u64,
            tensors_peak: count.tensors_peak as u64,
        })
    }

    pub fn name_and_driver(device: &CudaDevice) -> Result<String, DriverError> {
        let (name, mut version) = (device.cuda_stream().context().name()?, 0);
        // SAFETY: a place for the number.
        unsafe { cuDriverGetVersion(&raw mut version) }.result()?;
        Ok(format!("{name}, driver for CUDA {}.{}", version / 1000, version % 1000 / 10))
    }

    pub fn prepare(device: &CudaDevice) -> candle_core::Result<()> {
        if !device.cuda_stream().context().has_async_alloc() {
            // Without pools, each tensor that is freed would wait for the card.
            bail!("expected a card whose driver has memory pools (`cuMemAllocAsync`); some virtual cards have none")
        }
        // SAFETY: memory is allocated, used and freed in the order of one stream. Copies on other streams keep a tensor's memory until they
        // are done, or until this stream waits for them (`crate::copies`).
        unsafe { device.disable_event_tracking() };
        set_workspace(device)?;
        disallow_reduced_precision_sums(device)?;
        if card_memory::begin(device)? {
            return Ok(());
        }
        // Unless it is told otherwise, a pool gives everything back whenever a thread waits for the device.
        pool(device).and_then(|pool| set(pool, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)).w()
    }

    /// Bytes of cuBLAS's workspace, as its documentation recommends: for Hopper and the data centre's Blackwell, for other Blackwell cards,
    /// and for all others.
    fn workspace_bytes(major: i32) -> usize {
        let mib = match major {
            9..12 => 32,
            12.. => 12,
            _ => 4,
        };
        mib << 20
    }

    /// Gives cuBLAS a workspace that lives as long as the process. Otherwise cuBLAS would allocate a workspace from the driver while
    /// launches are recorded, which would be memory of the graph. All products share this workspace, so that recorded products have the
    /// same bits.
    fn set_workspace(device: &CudaDevice) -> candle_core::Result<()> {
        let bytes = workspace_bytes(capability(device)?.0);
        let blas = device.cublas_handle();
        device.cuda_stream().context().bind_to_thread().w()?;
        // SAFETY: memory of this many bytes, which nothing else uses and which is never freed. It is no tensor's memory: the bill counts it
        // as part of the context.
        unsafe {
            let workspace = result::malloc_sync(bytes).w()?;
            cublasSetWorkspace_v2(*blas.handle(), workspace as *mut c_void, bytes).result().w()
        }
    }

    /// Has products computed with sums in f32 at least. Otherwise cuBLAS may split a product along its sums, and round the parts to the
    /// dtype of the result before it adds them. Before Ampere it may also multiply f32 in f16 where a call names tensor cores, as candle's
    /// calls do.
    fn disallow_reduced_precision_sums(device: &CudaDevice) -> candle_core::Result<()> {
        let mode = match capability(device)? < super::BF16_FROM {
            true => cublasMath_t::CUBLAS_PEDANTIC_MATH,
            false => cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION,
        };
        // SAFETY: the handle of an open device, whose context `set_workspace` has made this thread's.
        unsafe { cublasSetMathMode(*device.cublas_handle().handle(), mode) }.result().w()
    }

    pub fn limit(device: &CudaDevice, most: u64) -> candle_core::Result<()> {
        super::forget_lists();
        trim(device)?;
        let Some(()) = card_memory::limit(device, usize::try_from(most).unwrap_or(usize::MAX)) else {
            bail!("it cannot back addresses by memory, so its own pool has the tensors")
        };
        Ok(())
    }

    /// Gives memory that no tensor uses back to the device.
    pub fn trim(device: &CudaDevice) -> candle_core::Result<()> {
        device.cuda_stream().synchronize().w()?;
        // SAFETY: a pool of an open device.
        let of_driver = || unsafe { result::mem_pool::trim_to(pool(device)?, 0) };
        card_memory::trim(device).unwrap_or_else(of_driver).w()
    }

    pub fn release_unused(device: &CudaDevice) -> candle_core::Result<()> {
        trim(device)?;
        if card_memory::count(device).is_some() {
            card_memory::reset_peaks(device);
            return Ok(());
        }
        let pool = pool(device).w()?;
        // Zero resets the peak to the memory that is held now.
        set(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0).w()?;
        set(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0).w()
    }

    pub fn count() -> candle_core::Result<usize> {
        let count = CudaContext::device_count().w()?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub fn id(device: &CudaDevice) -> Option<String> {
        let id = device.cuda_stream().context().uuid().ok()?;
        Some(id.bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn capability(device: &CudaDevice) -> candle_core::Result<(i32, i32)> {
        device.cuda_stream().context().compute_capability().w()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_for_ampere_and_later_and_f32_for_every_card() {
        for (capability, dtype, is_taken) in [
            ((7, 5), DType::BF16, false),
            ((7, 5), DType::F32, true),
            ((8, 0), DType::BF16, true),
            ((8, 9), DType::BF16, true),
            ((12, 0), DType::BF16, true),
        ] {
            assert_eq!(check_capability(capability, dtype).is_ok(), is_taken, "{capability:?} {dtype:?}");
        }
        let text = check_capability((6, 1), DType::BF16).unwrap_err().to_string();
        assert!(text.contains("compute capability 8.0 (Ampere) or later, got 6.1"), "{text}");
    }

    #[test]
    fn the_cpu_has_no_memory_of_its_own_and_computes_in_every_dtype() {
        // The host alone: its own memory and dtypes are tested.
        assert_eq!(device_bytes(&Device::Cpu), None);
        assert!(check_dtype(&Device::Cpu, DType::BF16).is_ok());
    }
}
