//! A tensor's values as bytes in memory order, for files that only this process reads.

use std::cell::Cell;
use std::mem::size_of_val;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};

use crate::elements::assume_filled;

/// Calls `f` with the bytes of a tensor on the CPU, in `F32`, `F64`, `BF16`, `F16` or `U8`.
pub fn with_bytes<R>(x: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + x.elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => Ok(f(bytes(&data[range]))),
        Storage::Cpu(CpuStorage::F64(data)) => Ok(f(bytes(&data[range]))),
        Storage::Cpu(CpuStorage::BF16(data)) => Ok(f(bytes(&data[range]))),
        Storage::Cpu(CpuStorage::F16(data)) => Ok(f(bytes(&data[range]))),
        Storage::Cpu(CpuStorage::U8(data)) => Ok(f(&data[range])),
        _ => bail!("with_bytes: expected F32, F64, BF16, F16 or U8 on the CPU, got {:?}", x.dtype()),
    }
}

/// A tensor on the CPU whose bytes `fill` must set, every one of them: their values are unspecified before.
pub fn from_bytes(shape: &Shape, dtype: DType, fill: impl FnOnce(&mut [u8])) -> Result<Tensor> {
    fn filled<T: WithDType>(shape: &Shape, fill: impl FnOnce(&mut [u8])) -> Result<Tensor> {
        let count = shape.elem_count();
        let mut data = assume_filled(Vec::with_capacity(count)).unwrap_or_else(|| vec![T::zero(); count]);
        data.truncate(count);
        fill(bytes_mut(&mut data));
        Tensor::from_vec(data, shape, &Device::Cpu)
    }
    match dtype {
        DType::F32 => filled::<f32>(shape, fill),
        DType::F64 => filled::<f64>(shape, fill),
        DType::BF16 => filled::<bf16>(shape, fill),
        DType::F16 => filled::<f16>(shape, fill),
        DType::U8 => filled::<u8>(shape, fill),
        _ => bail!("from_bytes: expected F32, F64, BF16, F16 or U8, got {dtype:?}"),
    }
}

/// Calls `f` with the bytes of a contiguous tensor on the CPU, in `F32`, `F64`, `BF16` or `U8`, for changes in place. `f` runs under the tensor's
/// write lock and must not use a tensor in the same memory.
///
/// # Errors
/// Another kind of tensor.
pub fn change_bytes<R>(x: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    struct Change<F, R>(Cell<Option<F>>, Cell<Option<R>>);
    impl<R, F: FnOnce(&mut [u8]) -> R> InplaceOp1 for Change<F, R> {
        fn name(&self) -> &'static str {
            "change_bytes"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("change_bytes: expected a contiguous tensor, got strides {:?}", layout.stride())
            };
            let Some(f) = self.0.take() else { return Ok(()) };
            self.1.set(Some(match storage {
                CpuStorage::F32(data) => f(bytes_mut(&mut data[start..end])),
                CpuStorage::F64(data) => f(bytes_mut(&mut data[start..end])),
                CpuStorage::BF16(data) => f(bytes_mut(&mut data[start..end])),
                CpuStorage::U8(data) => f(&mut data[start..end]),
                other => bail!("change_bytes: expected F32, F64, BF16 or U8 on the CPU, got {:?}", other.dtype()),
            }));
            Ok(())
        }
    }
    let change = Change(Cell::new(Some(f)), Cell::new(None));
    x.inplace_op1(&change)?;
    match change.1.take() {
        Some(result) => Ok(result),
        None => bail!("change_bytes: expected a tensor on the CPU, got one on {:?}", x.device().location()),
    }
}

/// The bytes of elements, which are numbers.
pub fn bytes<T: WithDType>(data: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and the lifetime is that of the borrow.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// Like [`bytes`], for changes in place.
pub fn bytes_mut<T: WithDType>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and borrowed exclusively; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The host alone: it has the bytes.
    #[test]
    fn a_tensor_comes_back_from_its_bytes() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8] {
            let x = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((2, 3, 4)).unwrap();
            let x = x.to_dtype(dtype).unwrap().transpose(0, 1).unwrap();
            let saved = with_bytes(&x, <[u8]>::to_vec).unwrap();
            assert_eq!(saved.len(), 24 * dtype.size_in_bytes());
            let back = from_bytes(x.shape(), dtype, |bytes| bytes.copy_from_slice(&saved)).unwrap();
            let values = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(values(&back), values(&x));
        }
        let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let row = x.narrow(0, 1, 1).unwrap();
        change_bytes(&row, |bytes| bytes.copy_from_slice(&[0, 0, 128, 63].repeat(3))).unwrap();
        assert_eq!(x.to_vec2::<f32>().unwrap(), [[0.0; 3], [1.0; 3]]);
        assert!(change_bytes(&x.t().unwrap(), |_| ()).is_err());
        assert!(with_bytes(&Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap(), <[u8]>::len).is_err());
    }
}
