//! The peak rate of this machine's units: the rate of a product's kernel where memory is no obstacle.
//!
//! It is measured and not looked up: no table knows how many cores this process has, how fast they are clocked
//! under these instructions, and which other processes use them now.

use candle_core::{DType, Result, bail};

use crate::matmul::kernel_rate;

/// The highest rate, in 10^9 floating-point operations a second over all threads, at which blocks of matrices of
/// `dtype` (`F32` or `BF16`, sums in f32) are multiplied here, from the first-level cache and packed already. Takes
/// a few hundredths of a second.
///
/// # Errors
///
/// For a dtype that has no kernel.
pub fn peak_gflops(dtype: DType) -> Result<f64> {
    let bf16 = match dtype {
        DType::F32 => false,
        DType::BF16 => true,
        other => bail!("peak_gflops: expected F32 or BF16, got {other:?}"),
    };
    // All threads multiply at the same time, and their rates are added.
    Ok(rayon::broadcast(|_| kernel_rate(bf16)).iter().sum::<f64>() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_comes_for_every_dtype_that_has_a_kernel() {
        for dtype in [DType::F32, DType::BF16] {
            let gflops = peak_gflops(dtype).unwrap();
            assert!(gflops.is_finite() && gflops > 0.0, "{dtype:?}: {gflops}");
        }
        assert!(peak_gflops(DType::F64).unwrap_err().to_string().contains("expected F32 or BF16, got F64"));
    }
}
