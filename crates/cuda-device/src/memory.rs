//! The memory of a device: what it has, and what this process holds of it. Tensors come from the allocator of this program
//! ([`crate::allocator`]), or from the driver's pool where the driver cannot back addresses by memory.

use candle_core::{Device, Result};

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

/// Returns the most memory that is held besides tensors and the places between them, because memory comes in units. `None` if the device is
/// the CPU, or if its driver allocates for tensors and does not say.
pub fn pool_unit(device: &Device) -> Option<u64> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::allocator::unit(device).map(|bytes| bytes as u64),
        _ => None,
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

/// Whether an error says that a device had no memory left: the driver's or cuBLAS's error, found by its name in the text.
pub fn is_out_of_device_memory(error: &str) -> bool {
    ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|name| error.contains(name))
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::{keep_in_pool, limit, trim};

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute as Attribute, CUmemoryPool};
    use candle_core::cuda_backend::cudarc::driver::{DriverError, result};
    use candle_core::{CudaDevice, bail};

    use super::DeviceBytes;
    use crate::allocator::{self, Count};

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

    /// Has the driver's pool keep the memory of dropped tensors. Unless it is told otherwise, a pool gives everything back whenever a thread
    /// waits for the device.
    pub fn keep_in_pool(device: &CudaDevice) -> candle_core::Result<()> {
        pool(device).and_then(|pool| set(pool, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)).w()
    }

    pub fn bytes(device: &CudaDevice) -> Result<DeviceBytes, DriverError> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let (free, total) = context.mem_get_info()?;
        let count = allocator::count(device).map_or_else(|| count_of_pool(device), Ok)?;
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

    /// Limits the memory that is held for tensors.
    pub fn limit(device: &CudaDevice, most: u64) -> candle_core::Result<()> {
        trim(device)?;
        let Some(()) = allocator::limit(device, usize::try_from(most).unwrap_or(usize::MAX)) else {
            bail!("it cannot back addresses by memory, so its own pool has the tensors")
        };
        Ok(())
    }

    /// Gives memory that no tensor uses back to the device.
    pub fn trim(device: &CudaDevice) -> candle_core::Result<()> {
        device.cuda_stream().synchronize().w()?;
        // SAFETY: a pool of an open device.
        let of_driver = || unsafe { result::mem_pool::trim_to(pool(device)?, 0) };
        allocator::trim(device).unwrap_or_else(of_driver).w()
    }

    pub fn release_unused(device: &CudaDevice) -> candle_core::Result<()> {
        trim(device)?;
        if allocator::count(device).is_some() {
            allocator::reset_peaks(device);
            return Ok(());
        }
        let pool = pool(device).w()?;
        // Zero resets the peak to the memory that is held now.
        set(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0).w()?;
        set(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0).w()
    }
}
