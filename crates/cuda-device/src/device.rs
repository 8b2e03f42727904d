//! Opens devices, and says what their drivers know of them: names, numbers and the compute capability.

use std::path::PathBuf;

use candle_core::{DType, Device, Result, bail};
#[cfg(feature = "cuda")]
use cuda_kernels::libraries::{self, Library};

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
/// A build without the feature `cuda`; no driver or an old one, no cuBLAS; the driver's error.
pub fn open_card(index: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    cuda::open_libraries()?;
    let device = Device::new_cuda_with_stream(index)?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = &device {
        cuda::prepare(device)?;
    }
    Ok(device)
}

/// Returns the file of cuBLAS, which the program opens when a card is first wanted.
///
/// # Errors
/// A build without the feature `cuda`; no cuBLAS on this machine.
pub fn cublas() -> Result<PathBuf> {
    #[cfg(feature = "cuda")]
    return libraries::open(Library::Blas).map(PathBuf::from).map_err(candle_core::Error::msg);
    #[cfg(not(feature = "cuda"))]
    bail!("this build has no `cuda`")
}

/// Counts the NVIDIA cards that this process sees: 0 without a driver, and in a build without the feature `cuda`.
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
mod cuda {
    use std::ffi::{c_int, c_void};

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::cublas::sys::{cublasMath_t, cublasSetMathMode, cublasSetWorkspace_v2};
    use candle_core::cuda_backend::cudarc::driver::sys::cuDriverGetVersion;
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result};
    use candle_core::{CudaDevice, bail};
    use cuda_kernels::libraries::{self, Library};

    use crate::{allocator, memory};

    pub fn name_and_driver(device: &CudaDevice) -> Result<String, DriverError> {
        let (name, mut version) = (device.cuda_stream().context().name()?, 0);
        // SAFETY: a place for the number.
        unsafe { cuDriverGetVersion(&raw mut version) }.result()?;
        Ok(format!("{name}, driver for CUDA {}", words(version)))
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
        if allocator::begin(device)? {
            return Ok(());
        }
        memory::keep_in_pool(device)
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

    /// Opens the libraries that candle calls for every card.
    pub fn open_libraries() -> candle_core::Result<()> {
        for library in [Library::Driver, Library::Blas] {
            libraries::open(library).map_err(candle_core::Error::msg)?;
        }
        if let Some((of_kernels, of_driver)) = libraries::older_driver() {
            let [of_kernels, of_driver] = [of_kernels, of_driver].map(words);
            bail!(
                "expected a driver for CUDA {of_kernels} or later, whose compiler made this program's kernels, got one for CUDA {of_driver}"
            )
        }
        Ok(())
    }

    /// A version as the driver counts it, in words: 12.8 for 12080.
    fn words(version: c_int) -> String {
        format!("{}.{}", version / 1000, version % 1000 / 10)
    }

    pub fn count() -> candle_core::Result<usize> {
        if libraries::open(Library::Driver).is_err() {
            return Ok(0);
        }
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
        assert_eq!(crate::memory::device_bytes(&Device::Cpu), None);
        assert!(check_dtype(&Device::Cpu, DType::BF16).is_ok());
    }
}
