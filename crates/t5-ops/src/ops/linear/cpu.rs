//! The linear map on the CPU: one matrix product each.

use candle_core::{Result, Tensor};

use crate::dispatch::rows_and_width;
use crate::matmul::{Matrix, MatrixMut, Threads, multiply};
use crate::storage::{View, filled, update, with_element};

pub(super) fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let n = w.dim(0)?;
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    let (x_view, w_view) = (View::new(&x)?, View::new(&w)?);
    let a = Matrix::new(x_view.operand()?, rows, k);
    let b = Matrix::new(w_view.operand()?, n, k).t();
    with_element!(x.dtype(), T, {
        filled::<T>(with_width(&x, n), |y| {
            multiply(MatrixMut::new(y, rows, n), a, b, false, Threads::All);
            Ok(())
        })
    })
}

pub(super) fn linear_backward_input(dy: &Tensor, w: &Tensor, accumulate: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let k = w.dim(1)?;
    let (dy, w) = (dy.contiguous()?, w.contiguous()?);
    let (dy_view, w_view) = (View::new(&dy)?, View::new(&w)?);
    let a = Matrix::new(dy_view.operand()?, rows, n);
    let b = Matrix::new(w_view.operand()?, n, k);
    with_element!(dy.dtype(), T, {
        let Some(sum) = accumulate else {
            return filled::<T>(with_width(&dy, k), |dx| {
                multiply(MatrixMut::new(dx, rows, k), a, b, false, Threads::All);
                Ok(())
            });
        };
        let sum = sum.contiguous()?;
        update::<T, _>("linear_backward_input", &sum, &[&dy, &w], |dx| {
            multiply(MatrixMut::new(dx, rows, k), a, b, true, Threads::All);
            Ok(())
        })?;
        Ok(sum)
    })
}

pub(super) fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (_, k) = rows_and_width("linear_backward_weight", "x", x)?;
    let (dy, x) = (dy.contiguous()?, x.contiguous()?);
    let (dy_view, x_view) = (View::new(&dy)?, View::new(&x)?);
    let a = Matrix::new(dy_view.operand()?, rows, n).t();
    let b = Matrix::new(x_view.operand()?, rows, k);
    with_element!(dw.dtype(), T, {
        update::<T, _>("linear_backward_weight", dw, &[&dy, &x], |dw| {
            multiply(MatrixMut::new(dw, n, k), a, b, accumulate, Threads::All);
            Ok(())
        })
    })
}

/// The shape of `x` with another last dimension.
fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(width);
    shape
}
