//! The linear map on the CPU: one matrix product each.

use candle_core::{DType, Result, Tensor};

use crate::dispatch::rows_and_width;
use crate::matmul::{
    Matrix, MatrixMut, Threads, bytes_of_sums, multiply, multiply_as_a, packed_bytes, product_bytes, thin_bytes,
};
use crate::needs::{Kept, Needs, elements};
use crate::quantised::Weight;
use crate::storage::{View, filled, update, with_element};

pub(super) fn linear(x: &Tensor, w: Weight) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let (n, _) = w.dims2()?;
    let x = x.contiguous()?;
    let x_view = View::new(&x)?;
    let a = Matrix::new(x_view.operand()?, rows, k);
    w.with_factor(|w| {
        with_element!(x.dtype(), T, {
            filled::<T>(with_width(&x, n), |y| {
                multiply_as_a(MatrixMut::new(y, rows, n), a, w.t(), false, Threads::All);
                Ok(())
            })
        })
    })
}

pub(super) fn linear_add(x: &Tensor, w: &Tensor, sum: Tensor) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear_add", "x", x)?;
    let n = w.dim(0)?;
    let (x, w, sum) = (x.contiguous()?, w.contiguous()?, sum.contiguous()?);
    let (x_view, w_view) = (View::new(&x)?, View::new(&w)?);
    let a = Matrix::new(x_view.operand()?, rows, k);
    let b = Matrix::new(w_view.operand()?, n, k).t();
    with_element!(x.dtype(), T, {
        update::<T, _>("linear_add", &sum, &[&x, &w], |y| {
            multiply_as_a(MatrixMut::new(y, rows, n), a, b, true, Threads::All);
            Ok(())
        })?;
    });
    Ok(sum)
}

/// A product of `rows` rows with a weight, (R, K) times (K, N).
pub(super) fn product_needs(rows: usize, (k, n): (usize, usize), operands: DType) -> Needs {
    let kept = Kept { weights: product_bytes(k, n, operands), ..Kept::default() };
    let transient = bytes_of_sums((rows, k, n), operands, operands);
    Needs { transient, kept, ..Needs::default() }.with_products(1, (rows, k, n))
}

pub(super) fn linear_backward_input(dy: &Tensor, w: Weight, accumulate: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let (_, k) = w.dims2()?;
    let dy = dy.contiguous()?;
    let dy_view = View::new(&dy)?;
    let a = Matrix::new(dy_view.operand()?, rows, n);
    w.with_factor(|b| {
        with_element!(dy.dtype(), T, {
            let Some(sum) = accumulate else {
                return filled::<T>(with_width(&dy, k), |dx| {
                    multiply_as_a(MatrixMut::new(dx, rows, k), a, b, false, Threads::All);
                    Ok(())
                });
            };
            let sum = sum.contiguous()?;
            update::<T, _>("linear_backward_input", &sum, &[&dy, w.tensor()], |dx| {
                multiply_as_a(MatrixMut::new(dx, rows, k), a, b, true, Threads::All);
                Ok(())
            })?;
            Ok(sum)
        })
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

pub(super) fn backward_weight_needs(rows: usize, (n, k): (usize, usize), [operands, dw]: [DType; 2]) -> Needs {
    let needs = Needs::default().with_products(1, (rows, n, k));
    if let Some(left) = thin_bytes((n, rows, k)) {
        return Needs { kept: Kept { left, ..Kept::default() }, ..needs };
    }
    let transient = bytes_of_sums((n, rows, k), operands, dw);
    let [left, right] = [n, k].map(|width| packed_bytes(elements([rows, width]), operands));
    let kept = Kept { left, right, ..Kept::default() };
    Needs { transient, kept, ..needs }
}

/// The shape of `x` with another last dimension.
fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(width);
    shape
}
