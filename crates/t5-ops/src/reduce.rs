//! Whole-tensor operations of the optimizer: the sum of squares, and setting to zero.

use candle_core::{Result, Tensor};

use crate::dispatch::has_kernel;

/// The sum of the squares of all elements, accumulated in f64 in a fixed order.
pub(crate) fn square_sum(x: &Tensor) -> Result<f64> {
    if has_kernel(&[x]) { kernel::square_sum(x) } else { reference::square_sum(x) }
}

/// Sets every element to zero, in place.
pub fn zero(x: &Tensor) -> Result<()> {
    if has_kernel(&[x]) && x.is_contiguous() { kernel::zero(x) } else { x.zero_set() }
}

pub(crate) mod kernel {
    use candle_core::{Result, Tensor};

    use crate::parallel::{Shared, for_each_part, for_each_rows};
    use crate::storage::{Element, View, update, with_element};
    use crate::vector::{sum, vectorized};

    /// Elements summed in f64 as one part: fixed, so that the result does not depend on the threads.
    const PART: usize = 64 * 1024;
    /// Elements summed in f32.
    const BLOCK: usize = 2048;

    pub(super) fn zero(x: &Tensor) -> Result<()> {
        with_element!(x.dtype(), T, {
            update::<T, _>("zero", x, &[], |data| {
                let (len, data) = (data.len(), Shared::new(data));
                for_each_rows(len, 1, |part| {
                    // SAFETY: each element belongs to one part.
                    unsafe { data.slice(part.start, part.len()) }.fill(T::from_f32(0.0));
                });
                Ok(())
            })
        })
    }

    pub(super) fn square_sum(x: &Tensor) -> Result<f64> {
        let x = x.contiguous()?;
        let view = View::new(&x)?;
        with_element!(x.dtype(), T, Ok(square_sum_of(view.slice::<T>()?)))
    }

    pub(crate) fn square_sum_of<T: Element>(x: &[T]) -> f64 {
        let mut parts = vec![0f64; x.len().div_ceil(PART)];
        let totals = Shared::new(&mut parts);
        for_each_part(x.len().div_ceil(PART), |p| {
            let part = &x[p * PART..x.len().min((p + 1) * PART)];
            // SAFETY: each part has its own element.
            let total = unsafe { totals.slice(p, 1) };
            total[0] = part_square_sum(part);
        });
        parts.iter().sum()
    }

    vectorized! {
        fn part_square_sum<T: Element>(x: &[T]) -> f64 {
            // A loop: the closure of an iterator would be compiled without the instruction set.
            let mut total = 0.0;
            for x in x.chunks(BLOCK) {
                total += f64::from(sum(x, |x| x.to_f32() * x.to_f32()));
            }
            total
        }
    }
}

pub(crate) mod reference {
    use candle_core::{DType, Result, Tensor};

    /// The same, with candle's operations.
    pub fn square_sum(x: &Tensor) -> Result<f64> {
        x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn the_sum_of_squares_is_that_of_the_reference() {
        for shape in [&[1][..], &[7, 65], &[300, 700]] {
            for dtype in [DType::F32, DType::BF16, DType::F64] {
                let x = Numbers::new(3).tensor(shape, dtype);
                let (got, expected) = (square_sum(&x).unwrap(), reference::square_sum(&x).unwrap());
                assert!((got / expected - 1.0).abs() < 1e-6, "{shape:?} {dtype:?}: expected {expected}, got {got}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows_in_the_sum() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut data = vec![1f32; 1000];
            data[777] = bad;
            assert!(!square_sum(&Tensor::new(data, &Device::Cpu).unwrap()).unwrap().is_finite());
        }
    }

    #[test]
    fn zero_clears_in_place() {
        for (shape, dtype) in [((3, 4), DType::F32), ((301, 400), DType::BF16), ((3, 4), DType::F64)] {
            let x = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
            let (same, part) = (x.clone(), x.narrow(0, 1, 1).unwrap());
            zero(&part).unwrap();
            assert_eq!(square_sum(&same).unwrap(), ((shape.0 - 1) * shape.1) as f64);
            zero(&x).unwrap();
            assert_eq!(square_sum(&same).unwrap(), 0.0);
        }
    }
}
