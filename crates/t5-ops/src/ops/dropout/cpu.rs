//! Dropout on the CPU.

use candle_core::{Result, Tensor};

use super::{Dropout, batch_rows_width};
use crate::parallel::{Shared, for_each_rows};
use crate::random_mask::RowMask;
use crate::storage::{Element, View, filled, with_element};
use crate::vector::vectorized;

pub(super) fn dropout(x: &Tensor, d: &Dropout) -> Result<Tensor> {
    let (batch, positions, width) = batch_rows_width("dropout", x)?;
    let x = x.contiguous()?;
    let view = View::new(&x)?;
    with_element!(x.dtype(), T, {
        let x_data = view.slice::<T>()?;
        filled::<T>(x.shape(), |y| {
            let y = Shared::new(y);
            for_each_rows(batch * positions, width, |rows| {
                for row in rows {
                    let mask = d.row_mask(row / positions, row % positions);
                    // SAFETY: each row belongs to one part.
                    let y = unsafe { y.slice(row * width, width) };
                    drop_row(&x_data[row * width..][..width], mask, y);
                }
            });
            Ok(())
        })
    })
}

pub(super) fn dropout_add(residual: &Tensor, x: &Tensor, d: &Dropout) -> Result<Tensor> {
    let (batch, positions, width) = batch_rows_width("dropout_add", x)?;
    let (residual, x) = (residual.contiguous()?, x.contiguous()?);
    let (residual_view, view) = (View::new(&residual)?, View::new(&x)?);
    with_element!(x.dtype(), T, {
        let (residual_data, x_data) = (residual_view.slice::<T>()?, view.slice::<T>()?);
        filled::<T>(x.shape(), |y| {
            let y = Shared::new(y);
            for_each_rows(batch * positions, width, |rows| {
                for row in rows {
                    let mask = d.row_mask(row / positions, row % positions);
                    let range = row * width..(row + 1) * width;
                    // SAFETY: each row belongs to one part.
                    let y = unsafe { y.slice(range.start, width) };
                    drop_add_row(&residual_data[range.clone()], &x_data[range], mask, y);
                }
            });
            Ok(())
        })
    })
}

pub(super) fn add(residual: &Tensor, x: &Tensor) -> Result<Tensor> {
    let (residual, x) = (residual.contiguous()?, x.contiguous()?);
    let (residual_view, view) = (View::new(&residual)?, View::new(&x)?);
    with_element!(x.dtype(), T, {
        let (residual_data, x_data) = (residual_view.slice::<T>()?, view.slice::<T>()?);
        filled::<T>(x.shape(), |y| {
            let y = Shared::new(y);
            for_each_rows(x_data.len(), 1, |range| {
                // SAFETY: each element belongs to one part.
                let y = unsafe { y.slice(range.start, range.len()) };
                add_part(&residual_data[range.clone()], &x_data[range], y);
            });
            Ok(())
        })
    })
}

vectorized! {
    fn add_part<T: Element>(residual: &[T], x: &[T], y: &mut [T]) {
        for ((y, x), residual) in y.iter_mut().zip(x).zip(residual) {
            *y = T::from_f32(residual.to_f32() + x.to_f32());
        }
    }

    fn drop_row<T: Element>(x: &[T], mask: RowMask, y: &mut [T]) {
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = T::from_f32(x.to_f32() * mask.factor(i));
        }
    }

    fn drop_add_row<T: Element>(residual: &[T], x: &[T], mask: RowMask, y: &mut [T]) {
        for (i, ((y, x), residual)) in y.iter_mut().zip(x).zip(residual).enumerate() {
            *y = T::from_f32(residual.to_f32() + x.to_f32() * mask.factor(i));
        }
    }
}
