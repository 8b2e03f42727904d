//! Tensors whose values are somewhere else for a while, as in the memory of another process, or in the host's beside a device: their
//! storage is empty meanwhile.
//!
//! Invariants: a tensor keeps its shape and dtype; whoever reads values that are absent panics or fails, and reads no other memory.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Tensor, bail};

use crate::dispatch::overwrite;

/// Frees the memory of a tensor, of all its views and of all that share its storage. Until [`provide`] or [`bring`] nobody may use its
/// values.
///
/// # Errors
/// A tensor that is not in F32, F64, BF16, F16 or U8.
pub fn release(x: &Tensor) -> Result<()> {
    x.inplace_op1(&Resize { name: "release", elements: 0 })
}

/// Gives a tensor that was released its memory back: zeros. One that has its values keeps them.
///
/// # Errors
/// Those of [`release`]; a view.
pub fn provide(x: &Tensor) -> Result<()> {
    if !x.is_contiguous() || x.layout().start_offset() != 0 {
        bail!("provide: expected a tensor with storage of its own, got a view with strides {:?}", x.stride());
    }
    x.inplace_op1(&Resize { name: "provide", elements: x.elem_count() })
}

/// A tensor without values, of the shape and dtype of `home`.
///
/// # Errors
/// Those of the device.
pub fn absent_like(home: &Tensor, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(card) => cuda::absent(home.shape(), home.dtype(), card),
        _ => {
            let x = Tensor::zeros(home.shape(), home.dtype(), device)?;
            release(&x)?;
            Ok(x)
        }
    }
}

/// Gives a tensor that was released the values of `home`, which lies on the CPU and has its shape and dtype.
///
/// # Errors
/// Another shape or dtype; memory that the device does not have.
pub fn bring(x: &Tensor, home: &Tensor) -> Result<()> {
    check_alike("bring", x, home)?;
    match x.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            crate::copy_waits::note_to_card(home);
            crate::copy_waits::waiting(x.device(), || cuda::bring(x, home))
        }
        _ => {
            provide(x)?;
            overwrite(x, home)
        }
    }
}

/// Refuses values of another shape or dtype.
pub(crate) fn check_alike(name: &str, x: &Tensor, home: &Tensor) -> Result<()> {
    if (x.shape(), x.dtype()) != (home.shape(), home.dtype()) {
        let (expected, got) = ((x.dtype(), x.dims()), (home.dtype(), home.dims()));
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
                // A new vector of zeros has pages that nobody has touched.
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
    use candle_core::{
        CpuStorage, CudaDevice, CudaStorage, DType, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
    };

    /// Elements of what stands for an empty storage: a driver gives no memory of 0 bytes.
    const EMPTY: usize = 1;

    pub fn absent(shape: &Shape, dtype: DType, card: &CudaDevice) -> Result<Tensor> {
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

    /// Elements that there is memory for.
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

    pub fn bring(x: &Tensor, home: &Tensor) -> Result<()> {
        let home = home.contiguous()?;
        let (storage, layout) = home.storage_and_layout();
        let Storage::Cpu(values) = &*storage else { bail!("bring: expected values on the CPU") };
        let from = layout.start_offset();
        x.inplace_op1(&Bring { values, from, elements: home.elem_count() })
    }

    /// Puts a new storage with these values in the place of a tensor's.
    struct Bring<'a> {
        values: &'a CpuStorage,
        from: usize,
        elements: usize,
    }

    impl InplaceOp1 for Bring<'_> {
        fn name(&self) -> &'static str {
            "bring"
        }

        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
            bail!("bring: expected a tensor on a card")
        }

        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            let card = storage.device.clone();
            let range = self.from..self.from + self.elements;
            fn of<T: WithDType>(card: &CudaDevice, values: &[T]) -> Result<CudaStorage> {
                card.storage_from_slice(values)
            }
            // What the old one held is free before the new one is asked for.
            resize(storage, 0)?;
            *storage = match self.values {
                CpuStorage::F32(values) => of(&card, &values[range])?,
                CpuStorage::F64(values) => of(&card, &values[range])?,
                CpuStorage::BF16(values) => of(&card, &values[range])?,
                CpuStorage::F16(values) => of(&card, &values[range])?,
                CpuStorage::U8(values) => of(&card, &values[range])?,
                other => bail!("bring: expected F32, F64, BF16, F16 or U8, got {:?}", other.dtype()),
            };
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use candle_core::{DType, Device};

    use super::*;
    use crate::{change_bytes, with_bytes};

    // The host alone: a card has no pages to release.
    #[test]
    fn what_was_released_comes_back_as_zeros_for_all_who_hold_it() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Tensor::ones((300, 70), dtype, &Device::Cpu).unwrap();
            let other = x.clone();
            let home = x.copy().unwrap();
            release(&x).unwrap();
            let read = AssertUnwindSafe(|| with_bytes(&other, <[u8]>::len));
            assert!(std::panic::catch_unwind(read).is_err(), "no other memory is read");
            provide(&other).unwrap();
            let sum = |x: &Tensor| x.to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
            assert_eq!(sum(&x), 0.0);
            change_bytes(&x, |bytes| bytes.fill(1)).unwrap();
            provide(&x).unwrap();
            assert_ne!(sum(&other), 0.0, "values that are there stay");
            release(&x).unwrap();
            bring(&other, &home).unwrap();
            assert_eq!(sum(&x), 21_000.0);
            let absent = absent_like(&home, &Device::Cpu).unwrap();
            bring(&absent, &home).unwrap();
            assert_eq!((sum(&absent), absent.dims()), (21_000.0, &[300, 70][..]));
            assert!(bring(&absent, &home.narrow(0, 0, 7).unwrap()).is_err());
        }
        assert!(provide(&Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap()).is_err());
    }
}
