//! Tensors whose values are elsewhere for a while, for example in the memory of another process, or in the host's memory beside a device.
//! Their storage is empty meanwhile.
//!
//! Invariants: a tensor keeps its shape and dtype. Code that reads unallocated values panics or returns an error, and reads no other memory.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Tensor, bail};

/// Frees the memory of a tensor, of all its views and of all tensors that share its storage. Until [`materialize`] nothing may use its
/// values.
///
/// # Errors
/// A tensor that is not in F32, F64, BF16, F16 or U8.
pub fn release(x: &Tensor) -> Result<()> {
    x.inplace_op1(&Resize { name: "release", elements: 0 })
}

/// Gives a released tensor its memory back, filled with zeros. A tensor that has its values keeps them.
///
/// # Errors
/// Those of [`release`]; `x` is a view.
pub fn materialize(x: &Tensor) -> Result<()> {
    if !x.is_contiguous() || x.layout().start_offset() != 0 {
        bail!("materialize: expected a tensor with storage of its own, got a view with strides {:?}", x.stride());
    }
    x.inplace_op1(&Resize { name: "materialize", elements: x.elem_count() })
}

/// A tensor without values, of the shape and dtype of `host_copy`.
///
/// # Errors
/// Those of the device.
pub fn unallocated_like(host_copy: &Tensor, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(card) => cuda::unallocated(host_copy.shape(), host_copy.dtype(), card),
        _ => {
            let x = Tensor::zeros(host_copy.shape(), host_copy.dtype(), device)?;
            release(&x)?;
            Ok(x)
        }
    }
}

/// Refuses values of another shape or dtype, in the name of an operation.
///
/// # Errors
/// A message with both.
pub fn check_alike(name: &str, x: &Tensor, host_copy: &Tensor) -> Result<()> {
    if (x.shape(), x.dtype()) != (host_copy.shape(), host_copy.dtype()) {
        let (expected, got) = ((x.dtype(), x.dims()), (host_copy.dtype(), host_copy.dims()));
        bail!("{name}: expected {:?} {:?}, got {:?} {:?}", expected.0, expected.1, got.0, got.1);
    }
    Ok(())
}

struct Resize {
    name: &'static str,
    elements: usize,
}

impl InplaceOp1 for Resize {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        fn resize<T: Clone + Default>(data: &mut Vec<T>, elements: usize) {
            if data.len() != elements {
                // A new vector of zeros has pages that were never touched.
                *data = vec![T::default(); elements];
            }
        }
        match storage {
            CpuStorage::F32(data) => resize(data, self.elements),
            CpuStorage::F64(data) => resize(data, self.elements),
            CpuStorage::BF16(data) => resize(data, self.elements),
            CpuStorage::F16(data) => resize(data, self.elements),
            CpuStorage::U8(data) => resize(data, self.elements),
            other => bail!("{}: expected F32, F64, BF16, F16 or U8, got {:?}", self.name, other),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        cuda::resize(storage, self.elements)
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::backend::{BackendDevice, BackendStorage};
    use candle_core::op::BackpropOp;
    use candle_core::{CudaDevice, CudaStorage, DType, Result, Shape, Storage, Tensor, bail};

    /// Elements of an empty storage: a driver allocates no memory of 0 bytes.
    const EMPTY: usize = 1;

    pub fn unallocated(shape: &Shape, dtype: DType, card: &CudaDevice) -> Result<Tensor> {
        let storage = Storage::Cuda(card.zeros_impl(&Shape::from(EMPTY), dtype)?);
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
    }

    pub fn resize(storage: &mut CudaStorage, elements: usize) -> Result<()> {
        let elements = elements.max(EMPTY);
        if length(storage)? != elements {
            let (card, dtype) = (storage.device.clone(), storage.dtype());
            *storage = card.zeros_impl(&Shape::from(elements), dtype)?;
        }
        Ok(())
    }

    /// Elements that the storage has memory for.
    fn length(storage: &CudaStorage) -> Result<usize> {
        Ok(match storage.dtype() {
            DType::F32 => storage.as_cuda_slice::<f32>()?.len(),
            DType::F64 => storage.as_cuda_slice::<f64>()?.len(),
            DType::BF16 => storage.as_cuda_slice::<half::bf16>()?.len(),
            DType::F16 => storage.as_cuda_slice::<half::f16>()?.len(),
            DType::U8 => storage.as_cuda_slice::<u8>()?.len(),
            other => bail!("expected F32, F64, BF16, F16 or U8, got {other:?}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use candle_core::{DType, Device};

    use super::*;
    use crate::bytes::{change_bytes, with_bytes};
    use crate::elements::overwrite;

    // The host alone: a card has no pages to release.
    #[test]
    fn what_was_released_comes_back_as_zeros_for_all_who_hold_it() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Tensor::ones((300, 70), dtype, &Device::Cpu).unwrap();
            let other = x.clone();
            let host_copy = x.copy().unwrap();
            release(&x).unwrap();
            let read = AssertUnwindSafe(|| with_bytes(&other, <[u8]>::len));
            assert!(std::panic::catch_unwind(read).is_err(), "no other memory is read");
            materialize(&other).unwrap();
            let sum = |x: &Tensor| x.to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            assert_eq!(sum(&x), 0.0);
            change_bytes(&x, |bytes| bytes.fill(1)).unwrap();
            materialize(&x).unwrap();
            assert_ne!(sum(&other), 0.0, "values that are there stay");
            let unallocated = unallocated_like(&host_copy, &Device::Cpu).unwrap();
            materialize(&unallocated).unwrap();
            overwrite(&unallocated, &host_copy).unwrap();
            assert_eq!((sum(&unallocated), unallocated.dims()), (21_000.0, &[300, 70][..]));
        }
        assert!(materialize(&Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap()).is_err());
    }
}
