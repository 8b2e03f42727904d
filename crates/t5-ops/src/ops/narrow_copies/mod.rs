//! Copies of f32 weights in bf16: one launch for all of them, so that products need no casts of their own.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use tensor_storage::overwrite;

use crate::dispatch::Path;
use crate::needs::{Calls, Needs};

/// Bytes of an entry of the table that is uploaded.
const TABLE_BYTES: u64 = 32;

/// Overwrites the second tensor (BF16) of each pair with the first (F32), of the same shape, rounded to nearest: the bits of a cast.
///
/// # Errors
/// Other dtypes, or two shapes.
pub fn narrow_each(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    for (from, to) in pairs {
        let dtypes = (from.dtype(), to.dtype());
        if from.dims() != to.dims() || dtypes != (DType::F32, DType::BF16) {
            let (dims, other) = (from.dims(), to.dims());
            bail!("narrow_each: expected F32 and BF16 of one shape, got {dtypes:?} of {dims:?} and {other:?}")
        }
    }
    match pairs {
        [] => Ok(()),
        #[cfg(feature = "cuda")]
        [(from, to), ..] if cuda_device::launch::takes([*from, *to]) => cuda::narrow_each(pairs),
        _ => pairs.iter().try_for_each(|(from, to)| overwrite(to, from)),
    }
}

/// Returns the needs of [`narrow_each`] for this many tensors.
pub fn narrow_each_needs(path: Path, tensors: usize) -> Needs {
    match path {
        Path::Device if tensors > 0 => {
            Needs::bytes(tensors as u64 * TABLE_BYTES).with_calls(Calls { launches: 1, uploads: 1, ..Calls::default() })
        }
        _ => Needs::default(),
    }
}
