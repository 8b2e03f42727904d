//! Sums and zeros on the CPU.

use candle_core::{Result, Tensor};

use crate::parallel::{Shared, for_each_part, for_each_rows};
use crate::storage::{Element, View, filled, update, with_element};
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

pub(super) fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    with_element!(sum.dtype(), T, {
        update::<T, _>("add_in_place", sum, &[x], |sum| {
            let view = View::new(x)?;
            let (x, len, sum) = (view.slice::<T>()?, sum.len(), Shared::new(sum));
            for_each_rows(len, 1, |part| {
                // SAFETY: each element belongs to one part.
                let sums = unsafe { sum.slice(part.start, part.len()) };
                sums.iter_mut().zip(&x[part]).for_each(|(sum, x)| *sum = T::from_f32(sum.to_f32() + x.to_f32()));
            });
            Ok(())
        })
    })
}

pub(super) fn scaled(x: &Tensor, scale: f64) -> Result<Tensor> {
    let x = x.contiguous()?;
    let view = View::new(&x)?;
    with_element!(x.dtype(), T, {
        let from = view.slice::<T>()?;
        filled::<T>(x.shape(), |to| {
            let to = Shared::new(to);
            for_each_rows(from.len(), 1, |part| {
                // SAFETY: each element belongs to one part.
                multiply(&from[part.clone()], scale as f32, unsafe { to.slice(part.start, part.len()) });
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
    fn multiply<T: Element>(from: &[T], scale: f32, to: &mut [T]) {
        let from = &from[..to.len()];
        for i in 0..to.len() {
            to[i] = T::from_f32(scale * from[i].to_f32());
        }
    }

    fn part_square_sum<T: Element>(x: &[T]) -> f64 {
        // A loop: the closure of an iterator would be compiled without the instruction set.
        let mut total = 0.0;
        for x in x.chunks(BLOCK) {
            total += f64::from(sum(x, |x| x.to_f32() * x.to_f32()));
        }
        total
    }
}
