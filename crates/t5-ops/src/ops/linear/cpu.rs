//! The linear map on the CPU: one matrix product each.

use candle_core::{DType, Error, Result, Tensor};

use super::AddedProduct;
use crate::by_rows::{RowBuffer, WINDOW};
use crate::dispatch::rows_and_width;
use crate::matmul::{
    Factor, Matrix, MatrixMut, Threads, across_bytes, bytes_of_sums, multiply, multiply_plus_product, product_bytes,
    thin_bytes,
};
use crate::needs::{Kept, Needs};
use crate::parallel::Shared;
use crate::quantised::Weight;
use crate::storage::{View, filled, update, with_element};

pub(super) fn linear(x: &Tensor, w: Weight, added: Option<AddedProduct>) -> Result<Tensor> {
    let (n, _) = w.dims2()?;
    product(x, w, n, None, added, true)
}

pub(super) fn linear_backward_input(
    dy: &Tensor,
    w: Weight,
    added: Option<AddedProduct>,
    accumulate: Option<Tensor>,
) -> Result<Tensor> {
    let (_, k) = w.dims2()?;
    product(dy, w, k, accumulate, added, false)
}

/// The product of `x` and a weight, or its transpose if `is_turned`, with `width` columns, plus `added`. With `sum`, the
/// result is added to `sum`, in its memory.
fn product(
    x: &Tensor,
    w: Weight,
    width: usize,
    sum: Option<Tensor>,
    added: Option<AddedProduct>,
    is_turned: bool,
) -> Result<Tensor> {
    fn turned(weight: Factor<'_>, is_turned: bool) -> Factor<'_> {
        if is_turned { weight.t() } else { weight }
    }
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let x = x.contiguous()?;
    let x_view = View::new(&x)?;
    let a = Matrix::new(x_view.operand()?, rows, k);
    let tensors = added.map(|AddedProduct { x, w }| Ok::<_, Error>([x.contiguous()?, w.contiguous()?])).transpose()?;
    let views = tensors.as_ref().map(|[x, w]| Ok::<_, Error>([View::new(x)?, View::new(w)?])).transpose()?;
    let added = match (added, &views) {
        (Some(AddedProduct { w, .. }), Some([x_view, w_view])) => {
            let (height, across) = w.dims2()?;
            let b: Factor = Matrix::new(w_view.operand()?, height, across).into();
            let inner = if is_turned { across } else { height };
            Some((Matrix::new(x_view.operand()?, rows, inner).into(), b))
        }
        _ => None,
    };
    let weight = w.tensor();
    w.with_rows(|w| {
        with_element!(x.dtype(), T, {
            let multiply = |y: &mut [T], accumulate| {
                // Only a product with the transpose has a column for each row of the weight. The other product sums over all rows at once.
                let windows = if is_turned { w.windows() } else { w.whole() };
                let mut buffer = if is_turned { w.buffer(WINDOW) } else { RowBuffer::None };
                let y = Shared::new(y);
                for (number, window) in windows.iter().enumerate() {
                    windows.get(number + 1).into_iter().for_each(|next| w.read_ahead(next.clone()));
                    let columns = if is_turned { window.clone() } else { 0..width };
                    // SAFETY: `y` lives longer than the product, and each window has its own columns.
                    let c = unsafe { MatrixMut::part(y, columns.start, rows, columns.len(), width) };
                    let added = added.map(|(x, w)| {
                        let w = if is_turned { w.some_rows(window.clone()) } else { w };
                        (x, turned(w, is_turned))
                    });
                    let w = turned(w.load_in_parallel(window.clone(), &mut buffer), is_turned);
                    multiply_plus_product(c, (a.into(), w), added, accumulate, Threads::All);
                }
                Ok(())
            };
            let Some(sum) = sum else { return filled::<T>(with_width(&x, width), |y| multiply(y, false)) };
            let sum = sum.contiguous()?;
            let operands: Vec<&Tensor> = [&x, weight].into_iter().chain(tensors.iter().flatten()).collect();
            update::<T, _>("linear", &sum, &operands, |y| multiply(y, true))?;
            Ok(sum)
        })
    })
}

/// A product of `rows` rows with a weight, (R, K) times (K, N), and of an added product with (`added`, N).
pub(super) fn product_needs(rows: usize, (k, added, n): (usize, usize, usize), operands: DType) -> Needs {
    let kept = Kept { weights: product_bytes(rows, (k, added, n), operands), ..Kept::default() };
    let transient = bytes_of_sums((rows, k, n), operands, operands);
    Needs { transient, kept, ..Needs::default() }.with_products(1, (rows, k + added, n))
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
    if let Some(left) = thin_bytes((n, rows, k), operands) {
        return Needs { kept: Kept { larger: left, ..Kept::default() }, ..needs };
    }
    let transient = bytes_of_sums((n, rows, k), operands, dw);
    Needs { transient, kept: across_bytes((n, rows, k), operands), ..needs }
}

/// The shape of `x` with another last dimension.
fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(width);
    shape
}
