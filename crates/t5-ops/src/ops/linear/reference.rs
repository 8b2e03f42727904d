//! The linear map in plain candle operations.

use candle_core::{Result, Tensor};

use crate::dispatch::{add_into, matmul_dtype, overwrite, rows_and_width};

/// See [`crate::linear`].
pub fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (rows, k) = rows_and_width("linear", "x", x)?;
    let dtype = matmul_dtype(x);
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(w.dim(0)?);
    let y = x.reshape((rows, k))?.to_dtype(dtype)?.matmul(&w.to_dtype(dtype)?.t()?)?;
    y.to_dtype(x.dtype())?.reshape(shape)
}

/// See [`crate::linear_backward_input`].
pub fn linear_backward_input(dy: &Tensor, w: &Tensor, accumulate: Option<Tensor>) -> Result<Tensor> {
    let (rows, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let dtype = matmul_dtype(dy);
    let mut shape = dy.dims().to_vec();
    shape.pop();
    shape.push(w.dim(1)?);
    let dx = dy.reshape((rows, n))?.to_dtype(dtype)?.matmul(&w.to_dtype(dtype)?)?.reshape(shape)?;
    let dx = match accumulate {
        Some(accumulate) => (dx + accumulate.to_dtype(dtype)?)?,
        None => dx,
    };
    dx.to_dtype(dy.dtype())
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
