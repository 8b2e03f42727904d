//! The values of tensors as bytes of a file: how they are written, and whether they are finite.

use candle_core::{DType, Tensor};

use crate::error::Result;

/// Whether all of these values, of a dtype of floats, are finite. Values of other dtypes are.
pub(super) fn are_finite(bytes: &[u8], dtype: DType) -> bool {
    // The exponent of infinities, and of what is no number, has only ones.
    let of_16 = |exponent: u16| {
        let is_any = |found, value: &[u8; 2]| found | (u16::from_le_bytes(*value) & exponent == exponent);
        !bytes.as_chunks().0.iter().fold(false, is_any)
    };
    match dtype {
        DType::F16 => of_16(0x7c00),
        DType::BF16 => of_16(0x7f80),
        DType::F32 => {
            let is_any = |found, value: &[u8; 4]| found | (u32::from_le_bytes(*value) & 0x7f80_0000 == 0x7f80_0000);
            !bytes.as_chunks().0.iter().fold(false, is_any)
        }
        DType::F64 => {
            const EXPONENT: u64 = 0x7ff0 << 48;
            let is_any = |found, value: &[u8; 8]| found | (u64::from_le_bytes(*value) & EXPONENT == EXPONENT);
            !bytes.as_chunks().0.iter().fold(false, is_any)
        }
        _ => true,
    }
}

/// safetensors' word for a dtype.
pub(super) fn dtype_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F64 => Ok("F64"),
        DType::F32 => Ok("F32"),
        DType::BF16 => Ok("BF16"),
        DType::F16 => Ok("F16"),
        DType::U32 => Ok("U32"),
        DType::U8 => Ok("U8"),
        other => Err(candle_core::Error::Msg(format!("no safetensors name for {other:?} here")).into()),
    }
}

pub(super) fn little_endian(values: &Tensor, dtype: DType) -> Result<Vec<u8>> {
    let values = if values.dtype() == dtype { values.clone() } else { values.to_dtype(dtype)? };
    Ok(match dtype {
        DType::F64 => values.to_vec1::<f64>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::U32 => values.to_vec1::<u32>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F32 => values.to_vec1::<f32>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        // A bf16 is the upper half of the f32 with the same value.
        DType::BF16 => {
            let values = values.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        DType::U8 => values.to_vec1::<u8>()?,
        DType::F16 => {
            let mut bytes = Vec::with_capacity(2 * values.elem_count());
            values.write_bytes(&mut bytes)?;
            bytes
        }
        other => return Err(candle_core::Error::Msg(format!("{other:?} cannot be written")).into()),
    })
}
