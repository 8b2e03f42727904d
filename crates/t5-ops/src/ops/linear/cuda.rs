//! The linear map on a card, by cuBLAS: operands of bf16, sums in f32, added to the existing result without another tensor.
//!
//! A weight in codes is converted to numbers part by part. Each part gives whole columns of the result, so the result is rounded once. Few
//! rows are multiplied with the codes directly.

use candle_core::{Result, Tensor};
use cuda_device::launch::recording::Temporaries;
use cuda_device::launch::{Factor, cast, multiplies, multiply, multiply_into_columns, unwritten};

use super::AddedProduct;
use crate::dispatch::rows_and_width;
use crate::quantised::cuda::takes_weight;
use crate::quantised::{MAX_SMALL_M, Weight, in_panels};

/// Whether the operands of both products are on one card.
pub(super) fn takes(x: &Tensor, w: Weight, added: Option<AddedProduct>) -> bool {
    let takes_added = |AddedProduct { x, w }: AddedProduct| cuda_device::launch::takes([x, w]);
    takes_weight(x, w) && added.is_none_or(takes_added)
}

/// Whether there is a product of these operands into this gradient.
pub(super) fn takes_gradient(dy: &Tensor, x: &Tensor, dw: &Tensor) -> bool {
    cuda_device::launch::takes_alike([dy, x])
        && cuda_device::launch::takes([x, dw])
        && multiplies(x.dtype(), dw.dtype())
}

/// `scale · x Wᵀ`, plus the added product.
pub(super) fn linear(x: &Tensor, w: Weight, scale: f64, added: Option<AddedProduct>) -> Result<Tensor> {
    let y = output(x, w, scale as f32, None)?;
    match added {
        Some(AddedProduct { x, w }) => output(x, w.into(), 1.0, Some(y)),
        None => Ok(y),
    }
}

/// `scale · dy W`, plus the added product, summed in place to `sum` if given.
pub(super) fn linear_backward_input(
    dy: &Tensor,
    w: Weight,
    scale: f64,
    added: Option<AddedProduct>,
    sum: Option<Tensor>,
) -> Result<Tensor> {
    let dx = gradient_of_input(dy, w, scale as f32, sum)?;
    match added {
        Some(AddedProduct { x, w }) => gradient_of_input(x, w.into(), 1.0, Some(dx)),
        None => Ok(dx),
    }
}

/// `alpha · x Wᵀ`, added to `sum` if given.
fn output(x: &Tensor, w: Weight, alpha: f32, sum: Option<Tensor>) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let (n, _) = w.dims2()?;
    let x = x.contiguous()?;
    let (y, beta) = target(sum, n, &x)?;
    let _numbers = Temporaries::begin();
    match w {
        Weight::Dense(w) | Weight::ByRows(w) => {
            let w = cast(w, x.dtype())?.contiguous()?;
            multiply(Factor::plain(&x), Factor::transposed(&w), &y, (rows, k, n), alpha, beta)?;
        }
        Weight::Quantised(w) if rows <= MAX_SMALL_M && alpha == 1.0 && beta == 0.0 => w.multiply_few(&x, &y, rows)?,
        Weight::Quantised(w) => {
            for panel in in_panels(n, k, x.dtype().size_in_bytes()) {
                let _numbers = Temporaries::begin();
                let (first, size) = (panel.start, (rows, k, panel.len()));
                let part = w.part_on_card(panel, 0..k, x.dtype())?;
                let into = (&y, first, n);
                multiply_into_columns(Factor::plain(&x), Factor::transposed(&part), into, size, alpha, beta)?;
            }
        }
    }
    Ok(y)
}

/// `alpha · dy W`, added to `sum` if given.
fn gradient_of_input(dy: &Tensor, w: Weight, alpha: f32, sum: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let (_, k) = w.dims2()?;
    let dy = dy.contiguous()?;
    let (dx, beta) = target(sum, k, &dy)?;
    match w {
        Weight::Dense(w) | Weight::ByRows(w) => {
            let w = cast(w, dy.dtype())?.contiguous()?;
            multiply(Factor::plain(&dy), Factor::plain(&w), &dx, (rows, n, k), alpha, beta)?;
        }
        Weight::Quantised(w) => {
            for panel in in_panels(k, n, dy.dtype().size_in_bytes()) {
                let (first, size) = (panel.start, (rows, n, panel.len()));
                let part = w.part_on_card(0..n, panel, dy.dtype())?;
                let into = (&dx, first, k);
                multiply_into_columns(Factor::plain(&dy), Factor::plain(&part), into, size, alpha, beta)?;
            }
        }
    }
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

/// The tensor that a product of `x` with this many columns is written to, and the factor of its old values.
fn target(sum: Option<Tensor>, width: usize, x: &Tensor) -> Result<(Tensor, f32)> {
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(width);
    match sum {
        Some(sum) => Ok((sum.contiguous()?, 1.0)),
        None => Ok((unwritten(shape, x.dtype(), x.device())?, 0.0)),
    }
}
