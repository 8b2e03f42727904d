//! The linear map in plain candle operations.

use candle_core::{DType, Result, Tensor};
use tensor_storage::overwrite;

use super::AddedProduct;

use crate::dispatch::{add_into, matmul_dtype, rows_and_width};
use crate::needs::{Needs, converted, copies, elements, wide_size};
use crate::quantised::Weight;

/// See [`crate::linear`].
pub fn linear<'a>(x: &Tensor, w: impl Into<Weight<'a>>) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let dtype = matmul_dtype(x);
    let w = w.into().dense(dtype)?;
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(w.dim(0)?);
    let y = x.reshape((rows, k))?.to_dtype(dtype)?.matmul(&w.t()?)?;
    y.to_dtype(x.dtype())?.reshape(shape)
}

/// See [`crate::linear_plus_product`].
pub fn linear_plus_product<'a>(x: &Tensor, w: impl Into<Weight<'a>>, added: Option<AddedProduct>) -> Result<Tensor> {
    let y = linear(x, w)?;
    let Some(AddedProduct { x, w }) = added else { return Ok(y) };
    let dtype = matmul_dtype(x);
    (linear(&x.to_dtype(dtype)?, w)? + y.to_dtype(dtype)?)?.to_dtype(x.dtype())
}

/// A product (R, K) times (K, N) on the CPU, which may be added to a tensor, plus an added product of (R, `added`): operands and
/// products in the wide dtype.
pub(super) fn product_needs(
    rows: usize,
    (k, added, n): (usize, usize, usize),
    dtypes: [DType; 2],
    accumulates: bool,
) -> Needs {
    let [x, w] = dtypes;
    let wide = wide_size(x);
    let needs = |k: usize, adds: bool| {
        let operands = converted(elements([rows, k]), x, wide) + converted(elements([k, n]), w, wide);
        // The product if it is converted, and its sum with another tensor.
        let results =
            converted(elements([rows, n]), x, wide) + if adds { copies(1, elements([rows, n]), x) } else { 0 };
        operands + results
    };
    // The added product is computed and summed in the wide dtype, before the sum is converted.
    let of_added = if added > 0 { needs(added, true) + copies(1, elements([rows, n]), x) } else { 0 };
    Needs::bytes(needs(k, accumulates).max(of_added)).with_products(1, (rows, k + added, n))
}

/// The most rows of dy in a slice that candle's products pack.
const PACKED_ROWS: usize = 512;

/// See [`crate::linear_backward_input`].
pub fn linear_backward_input<'a>(dy: &Tensor, w: impl Into<Weight<'a>>, accumulate: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let dtype = matmul_dtype(dy);
    let w = w.into().dense(dtype)?;
    let mut shape = dy.dims().to_vec();
    shape.pop();
    shape.push(w.dim(1)?);
    let dx = dy.reshape((rows, n))?.to_dtype(dtype)?.matmul(&w)?.reshape(shape)?;
    let dx = match accumulate {
        Some(accumulate) => (dx + accumulate.to_dtype(dtype)?)?,
        None => dx,
    };
    dx.to_dtype(dy.dtype())
}

/// See [`crate::linear_backward_input_plus_product`].
pub fn linear_backward_input_plus_product<'a>(
    dy: &Tensor,
    w: impl Into<Weight<'a>>,
    added: Option<AddedProduct>,
    accumulate: Option<Tensor>,
) -> Result<Tensor> {
    let dx = linear_backward_input(dy, w, accumulate)?;
    match added {
        Some(AddedProduct { x, w }) => linear_backward_input(x, w, Some(dx)),
        None => Ok(dx),
    }
}

/// See [`crate::linear_backward_weight`].
pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (_, k) = rows_and_width("linear_backward_weight", "x", x)?;
    let dtype = matmul_dtype(x);
    let dy = dy.reshape((rows, n))?.to_dtype(dtype)?;
    let x = x.reshape((rows, k))?.to_dtype(dtype)?;
    let product = dy.t()?.matmul(&x)?;
    if accumulate { add_into(dw, &product) } else { overwrite(dw, &product) }
}

pub(super) fn backward_weight_needs(rows: usize, (n, k): (usize, usize), [x, dw]: [DType; 2]) -> Needs {
    let wide = wide_size(x);
    let operands = converted(elements([rows, n]), x, wide) + converted(elements([rows, k]), x, wide);
    // The product, the same in the dtype of dw, and its sum with dw.
    let results = elements([n, k, wide + 2 * dw.size_in_bytes()]);
    // On processors with large caches, candle's products pack all of a slice of dy.
    let packed = elements([n, rows.min(PACKED_ROWS), wide]);
    Needs::bytes(operands + results + packed).with_products(1, (rows, n, k))
}
