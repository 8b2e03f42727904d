//! The linear map on a card, by cuBLAS: operands of bf16, sums in f32, added to what is there without another tensor.

use candle_core::{Result, Tensor};

use super::Beside;
use crate::cuda::{Factor, multiplies, multiply, unwritten};
use crate::dispatch::rows_and_width;
use crate::quantised::Weight;

/// Whether the operands of both products are on one card, the weight in numbers.
pub(super) fn takes(x: &Tensor, w: Weight, beside: Option<Beside>) -> bool {
    let takes_beside = |Beside { x, w }: Beside| crate::cuda::takes([x, w]);
    matches!(w, Weight::Dense(_)) && crate::cuda::takes([x, w.tensor()]) && beside.is_none_or(takes_beside)
}

/// Whether there is a product of these operands into this gradient.
pub(super) fn takes_gradient(dy: &Tensor, x: &Tensor, dw: &Tensor) -> bool {
    crate::cuda::takes_alike([dy, x]) && crate::cuda::takes([x, dw]) && multiplies(x.dtype(), dw.dtype())
}

/// `x Wᵀ`, plus the product beside it.
pub(super) fn linear(x: &Tensor, w: &Tensor, beside: Option<Beside>) -> Result<Tensor> {
    let y = output(x, w, None)?;
    match beside {
        Some(Beside { x, w }) => output(x, w, Some(y)),
        None => Ok(y),
    }
}

/// `dy W`, plus the product beside it, added to `sum` if that is given, in its memory.
pub(super) fn linear_backward_input(
    dy: &Tensor,
    w: &Tensor,
    beside: Option<Beside>,
    sum: Option<Tensor>,
) -> Result<Tensor> {
    let dx = gradient_of_input(dy, w, sum)?;
    match beside {
        Some(Beside { x, w }) => gradient_of_input(x, w, Some(dx)),
        None => Ok(dx),
    }
}

fn output(x: &Tensor, w: &Tensor, sum: Option<Tensor>) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let n = w.dim(0)?;
    let (x, w) = (x.contiguous()?, w.to_dtype(x.dtype())?.contiguous()?);
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(n);
    let (y, beta) = target(sum, shape, &x)?;
    multiply(Factor::plain(&x), Factor::transposed(&w), &y, (rows, k, n), 1.0, beta)?;
    Ok(y)
}

fn gradient_of_input(dy: &Tensor, w: &Tensor, sum: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let k = w.dim(1)?;
    let (dy, w) = (dy.contiguous()?, w.to_dtype(dy.dtype())?.contiguous()?);
    let mut shape = dy.dims().to_vec();
    shape.pop();
    shape.push(k);
    let (dx, beta) = target(sum, shape, &dy)?;
    multiply(Factor::plain(&dy), Factor::plain(&w), &dx, (rows, n, k), 1.0, beta)?;
    Ok(dx)
}

/// `dw = dyᵀ x`, or `dw += dyᵀ x`.
pub(super) fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (_, k) = rows_and_width("linear_backward_weight", "x", x)?;
    let (dy, x) = (dy.contiguous()?, x.contiguous()?);
    let beta = if accumulate { 1.0 } else { 0.0 };
    multiply(Factor::transposed(&dy), Factor::plain(&x), dw, (n, rows, k), 1.0, beta)
}

/// What a product is written to, and the factor of what that holds already.
fn target(sum: Option<Tensor>, shape: Vec<usize>, like: &Tensor) -> Result<(Tensor, f32)> {
    match sum {
        Some(sum) => Ok((sum.contiguous()?, 1.0)),
        None => Ok((unwritten(shape, like.dtype(), like.device())?, 0.0)),
    }
}
