//! A tensor's values as bytes in memory order, for files that only this process reads.

use std::mem::size_of_val;

use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};

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

/// A tensor on the CPU whose bytes `fill` sets; it is given zeros.
pub fn from_bytes(shape: &Shape, dtype: DType, fill: impl FnOnce(&mut [u8])) -> Result<Tensor> {
    fn of<T: WithDType>(shape: &Shape, fill: impl FnOnce(&mut [u8])) -> Result<Tensor> {
        let mut data = vec![T::zero(); shape.elem_count()];
        fill(bytes_mut(&mut data));
        Tensor::from_vec(data, shape, &Device::Cpu)
    }
    match dtype {
        DType::F32 => of::<f32>(shape, fill),
        DType::F64 => of::<f64>(shape, fill),
        DType::BF16 => of::<bf16>(shape, fill),
        DType::F16 => of::<f16>(shape, fill),
        DType::U8 => of::<u8>(shape, fill),
        _ => bail!("from_bytes: expected F32, F64, BF16, F16 or U8, got {dtype:?}"),
    }
}

/// The bytes of elements, which are numbers.
pub(crate) fn bytes<T: WithDType>(data: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and the lifetime is that of the borrow.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// As [`bytes`], to be changed: all bytes are values of a number.
pub(crate) fn bytes_mut<T: WithDType>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, alone borrowed; every bit pattern of a number is a value.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(with_bytes(&Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap(), <[u8]>::len).is_err());
    }
}
