//! The linear map `y = x Wᵀ` without a bias, and its two gradients.
//!
//! Shapes: x (.., K), w (N, K), y (.., N). The leading dimensions are rows: R is their product.

use candle_core::{Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape, rows_and_width};

/// `x Wᵀ`: (.., K) times the transpose of (N, K) gives (.., N), in the dtype of `x`.
pub fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let _span = tracing::debug_span!("linear").entered();
    let (_, k) = rows_and_width("linear", "x", x)?;
    let (n, _) = w.dims2()?;
    check_shape("linear", "weight", w, &[n, k])?;
    reference::linear(x, w)
}

/// The gradient with respect to the input: `dy W`, plus `accumulate` if given.
///
/// dy (.., N), w (N, K), result (.., K) in the dtype of `dy`. `accumulate` is given up by the caller: its
/// memory may be overwritten with the result, so no other handle to it may be read afterwards.
pub fn linear_backward_input(dy: &Tensor, w: &Tensor, accumulate: Option<Tensor>) -> Result<Tensor> {
    let _span = tracing::debug_span!("linear_backward_input").entered();
    let (_, n) = rows_and_width("linear_backward_input", "dy", dy)?;
    let (_, k) = w.dims2()?;
    check_shape("linear_backward_input", "weight", w, &[n, k])?;
    if let Some(accumulate) = &accumulate {
        let mut expected = dy.dims().to_vec();
        expected.pop();
        expected.push(k);
        check_shape("linear_backward_input", "accumulate", accumulate, &expected)?;
        if accumulate.dtype() != dy.dtype() {
            bail!("linear_backward_input: accumulate: expected {:?}, got {:?}", dy.dtype(), accumulate.dtype())
        }
    }
    reference::linear_backward_input(dy, w, accumulate)
}

/// The gradient with respect to the weight: `dw += dyᵀ x`, in place.
///
/// dy (.., N), x (.., K), dw (N, K).
pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
    let _span = tracing::debug_span!("linear_backward_weight").entered();
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (x_rows, k) = rows_and_width("linear_backward_weight", "x", x)?;
    if rows != x_rows {
        bail!("linear_backward_weight: expected as many rows in dy as in x, got {rows} and {x_rows}")
    }
    check_accumulator("linear_backward_weight", "dw", dw, &[n, k])?;
    reference::linear_backward_weight(dy, x, dw)
}

pub(crate) mod reference {
    use candle_core::{Result, Tensor};

    use crate::dispatch::{add_into, matmul_dtype, rows_and_width};

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
    pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<()> {
        let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
        let (_, k) = rows_and_width("linear_backward_weight", "x", x)?;
        let dtype = matmul_dtype(x);
        let dy = dy.reshape((rows, n))?.to_dtype(dtype)?;
        let x = x.reshape((rows, k))?.to_dtype(dtype)?;
        add_into(dw, &dy.t()?.matmul(&x)?)
    }
}
