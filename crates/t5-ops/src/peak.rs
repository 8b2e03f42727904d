//! The most that this machine's units give: the rate of the crate's own matrix product where memory is no obstacle.
//!
//! It is measured, not looked up, because no table knows how many cores this process has, how fast they are
//! clocked under these instructions, and who else uses them now.

use std::time::{Duration, Instant};

use candle_core::{DType, Result, bail};
use half::bf16;

use crate::matmul::{Matrix, MatrixMut, Operand, Threads, multiply};

/// Sides of the square products tried: the small ones lie in the first cache, the larger ones spend less of
/// their time on packing. The best of them counts.
const SIDES: [usize; 4] = [64, 128, 192, 256];
/// How long a product is repeated to be timed once, and how often it is timed: the best counts, because other
/// work on the machine only ever takes away.
const ONCE: Duration = Duration::from_millis(4);
const TIMES: usize = 5;

/// The highest rate, in 10^9 floating-point operations a second over all threads, at which matrices of `dtype`
/// (`F32` or `BF16`, sums in f32) are multiplied here. Takes about a tenth of a second.
///
/// # Errors
///
/// For a dtype that has no kernel.
pub fn peak_gflops(dtype: DType) -> Result<f64> {
    let rate = match dtype {
        DType::F32 => best_rate(&vec![0.5f32; SIDES[3] * SIDES[3]]),
        DType::BF16 => best_rate(&vec![bf16::from_f32(0.5); SIDES[3] * SIDES[3]]),
        other => bail!("peak_gflops: expected F32 or BF16, got {other:?}"),
    };
    Ok(rate / 1e9)
}

/// Operations a second, the best of all sides.
fn best_rate<T: Sync>(elements: &[T]) -> f64
where
    for<'a> Operand<'a>: From<&'a [T]>,
{
    // Every thread multiplies its own matrices at the same time: the sum is what all of them give together.
    let rate = |side: usize| rayon::broadcast(|_| thread_rate(elements[..side * side].into(), side)).iter().sum();
    SIDES.into_iter().map(rate).fold(0.0, f64::max)
}

/// Operations a second of this thread on square matrices.
fn thread_rate(elements: Operand, side: usize) -> f64 {
    let matrix = Matrix::new(elements, side, side);
    let mut sum = vec![0f32; side * side];
    let mut best: f64 = 0.0;
    for _ in 0..TIMES {
        let (began, mut products) = (Instant::now(), 0);
        while began.elapsed() < ONCE {
            multiply(MatrixMut::new(&mut sum, side, side), matrix, matrix, false, Threads::One);
            products += 1;
        }
        best = best.max((2 * side * side * side * products) as f64 / began.elapsed().as_secs_f64());
    }
    best
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
