//! A device as its driver describes it: its memory, of which tensors of this process are a part, and what it can compute.

use candle_core::{DType, Device, Result, bail};

/// Bytes of a device at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceBytes {
    /// The driver's name of the device.
    pub name: String,
    /// All of its memory.
    pub total: u64,
    /// What nobody holds.
    pub free: u64,
    /// What the pool holds from which this process takes tensors.
    pub pool: u64,
    /// The most that the pool held.
    pub pool_most: u64,
}

/// The memory of a device now. `None`: the device is the CPU, or its driver does not say.
pub fn device_bytes(device: &Device) -> Option<DeviceBytes> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::bytes(device).ok(),
        _ => None,
    }
}

/// The least compute capability whose kernels multiply bf16: Ampere's.
const BF16_FROM: (i32, i32) = (8, 0);

/// Refuses a dtype of activations that a device cannot compute in.
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
mod cuda {
    use candle_core::CudaDevice;
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute as Attribute;
    use candle_core::cuda_backend::cudarc::driver::{DriverError, result};

    use super::DeviceBytes;

    pub fn bytes(device: &CudaDevice) -> Result<DeviceBytes, DriverError> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let (free, total) = context.mem_get_info()?;
        // SAFETY: the number is that of a device which is open.
        let pool = unsafe { result::device::get_default_mem_pool(context.cu_device()) }?;
        let of_pool = |attribute: Attribute| -> Result<u64, DriverError> {
            let mut bytes = 0u64;
            // SAFETY: the device's own pool lives as long as the device; both attributes are 64 bits.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }?;
            Ok(bytes)
        };
        Ok(DeviceBytes {
            name: context.name()?,
            total: total as u64,
            free: free as u64,
            pool: of_pool(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            pool_most: of_pool(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        })
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
        assert_eq!(device_bytes(&Device::Cpu), None);
        assert!(check_dtype(&Device::Cpu, DType::BF16).is_ok());
    }
}
