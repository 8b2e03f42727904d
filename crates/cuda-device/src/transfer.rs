//! Copies of tensors to other devices. Only the tensor's own elements are copied; candle would copy all the memory that a view lies in.

use candle_core::{DType, Device, Result, Tensor};

use tensor_storage::with_bytes;

/// Copies a tensor to another device, with memory for its own elements alone; returns the tensor itself if it is there already. Waits until
/// the copy is done.
///
/// # Errors
/// Those of the devices.
pub fn copied_to(x: &Tensor, to: &Device) -> Result<Tensor> {
    if x.device().same_device(to) {
        return Ok(x.clone());
    }
    let has_bytes = matches!(x.dtype(), DType::F32 | DType::F64 | DType::BF16 | DType::F16 | DType::U8);
    match x.device() {
        _ if !has_bytes => x.to_device(to),
        Device::Cpu => with_bytes(x, |bytes| Tensor::from_raw_buffer(bytes, x.dtype(), x.dims(), to))?,
        #[cfg(feature = "cuda")]
        Device::Cuda(card) => cuda::to_host(&x.contiguous()?, card),
        _ => x.to_device(to),
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::result;
    use candle_core::{CudaDevice, Result, Tensor};
    use tensor_storage::from_bytes;

    use crate::launch::address;

    pub fn to_host(x: &Tensor, card: &CudaDevice) -> Result<Tensor> {
        let (at, stream) = (address(x)?, card.cuda_stream());
        let mut copied = Ok(());
        let values = from_bytes(x.shape(), x.dtype(), |bytes| {
            let begun = stream.context().bind_to_thread();
            // SAFETY: the tensor has these bytes on the card, and is kept until the stream has copied them.
            let begun = begun.and_then(|()| unsafe { result::memcpy_dtoh_async(bytes, at, stream.cu_stream()) });
            copied = begun.and_then(|()| stream.synchronize());
        });
        copied.w()?;
        values
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, Storage};

    use super::*;
    use crate::test_device::device;

    /// Elements that the memory of an f32 tensor has room for.
    fn memory(x: &Tensor) -> usize {
        match &*x.storage_and_layout().0 {
            Storage::Cpu(CpuStorage::F32(values)) => values.len(),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => storage.as_cuda_slice::<f32>().unwrap().len(),
            _ => panic!("another kind of tensor"),
        }
    }

    // The host alone: it is one side of each copy.
    #[test]
    fn some_rows_are_copied_alone() {
        let device = device();
        let all = Tensor::arange(0f32, 40.0, &Device::Cpu).unwrap().reshape((8, 5)).unwrap();
        let expected: Vec<f32> = (15..30).map(|i| i as f32).collect();
        let there = copied_to(&all, &device).unwrap();
        let up = copied_to(&all.narrow(0, 3, 3).unwrap(), &device).unwrap();
        let down = copied_to(&there.narrow(0, 3, 3).unwrap(), &Device::Cpu).unwrap();
        for part in [&up, &down] {
            assert_eq!(part.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected);
            // On the CPU no elements are copied.
            assert_eq!(memory(part), if device.is_cpu() { 40 } else { 15 });
        }
        let columns = copied_to(&there.t().unwrap(), &Device::Cpu).unwrap();
        assert_eq!(columns.to_vec2::<f32>().unwrap(), all.t().unwrap().to_vec2::<f32>().unwrap());
        let numbers = Tensor::new(&[7u32, 9], &device).unwrap();
        assert_eq!(copied_to(&numbers, &Device::Cpu).unwrap().to_vec1::<u32>().unwrap(), [7, 9]);
    }
}
