//! The linear map `y = x Wᵀ` without a bias, and its two gradients.
//!
//! Shapes: x (.., K), w (N, K), y (.., N). The leading dimensions are rows: R is their product.

use candle_core::{Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape, has_kernel, rows_and_width};

/// `x Wᵀ`: (.., K) times the transpose of (N, K) gives (.., N), in the dtype of `x`.
pub fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let _span = tracing::debug_span!("linear", flops = 2 * x.elem_count() * w.dim(0)?).entered();
    let (_, k) = rows_and_width("linear", "x", x)?;
    let (n, _) = w.dims2()?;
    check_shape("linear", "weight", w, &[n, k])?;
    if has_kernel(&[x, w]) { kernel::linear(x, w) } else { reference::linear(x, w) }
}

/// The gradient with respect to the input: `dy W`, plus `accumulate` if given.
///
/// dy (.., N), w (N, K), result (.., K) in the dtype of `dy`. `accumulate` is given up by the caller: its
/// memory may be overwritten with the result, so no other handle to it may be read afterwards.
pub fn linear_backward_input(dy: &Tensor, w: &Tensor, accumulate: Option<Tensor>) -> Result<Tensor> {
    let _span = tracing::debug_span!("linear_backward_input", flops = 2 * dy.elem_count() * w.dim(1)?).entered();
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
    if has_kernel(&[dy, w]) {
        kernel::linear_backward_input(dy, w, accumulate)
    } else {
        reference::linear_backward_input(dy, w, accumulate)
    }
}

/// The gradient with respect to the weight, in place: `dw += dyᵀ x` with `accumulate`, else `dw = dyᵀ x`,
/// whatever `dw` held.
///
/// dy (.., N), x (.., K), dw (N, K). The sum over rows is in f32; where `dw` is bf16 it is rounded to nearest once a call.
pub fn linear_backward_weight(dy: &Tensor, x: &Tensor, dw: &Tensor, accumulate: bool) -> Result<()> {
    let _span = tracing::debug_span!("linear_backward_weight", flops = 2 * dy.elem_count() * dw.dim(1)?).entered();
    let (rows, n) = rows_and_width("linear_backward_weight", "dy", dy)?;
    let (x_rows, k) = rows_and_width("linear_backward_weight", "x", x)?;
    if rows != x_rows {
        bail!("linear_backward_weight: expected as many rows in dy as in x, got {rows} and {x_rows}")
    }
    check_accumulator("linear_backward_weight", "dw", dw, &[n, k])?;
    if has_kernel(&[dy, x, dw]) {
        kernel::linear_backward_weight(dy, x, dw, accumulate)
    } else {
        reference::linear_backward_weight(dy, x, dw, accumulate)
    }
}

mod kernel {
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
}

pub(crate) mod reference {
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
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::testing::{Numbers, assert_close, autograd, check_gradient, tolerance, weighted};

    #[test]
    fn the_reference_agrees_with_finite_differences_and_autograd() {
        let mut numbers = Numbers::new(1);
        let [x, w, dy] = [&[2, 3, 5][..], &[4, 5], &[2, 3, 4]].map(|shape| numbers.tensor(shape, DType::F64));
        let dx = linear_backward_input(&dy, &w, None).unwrap();
        let dw = w.zeros_like().unwrap();
        linear_backward_weight(&dy, &x, &dw, true).unwrap();
        check_gradient("dx", &x, &dx, |x| weighted(&linear(x, &w)?, &dy));
        check_gradient("dw", &w, &dw, |w| weighted(&linear(&x, w)?, &dy));
        let expected = autograd(&[&x, &w], &dy, |t| reference::linear(&t[0], &t[1]));
        assert_close("dx", &dx, &expected[0], 1e-12);
        assert_close("dw", &dw, &expected[1], 1e-12);
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        for (case, (b, t, n, k)) in
            [(1, 1, 1, 1), (2, 7, 65, 33), (3, 65, 1, 7), (1, 100, 96, 64), (2, 128, 300, 257)].into_iter().enumerate()
        {
            for (dtype, weight_dtype) in
                [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
            {
                let mut numbers = Numbers::new(case as u64);
                let x = numbers.tensor(&[t, b, k], dtype).transpose(0, 1).unwrap();
                let dy = numbers.tensor(&[t, b, n], dtype).transpose(0, 1).unwrap();
                let w = numbers.tensor(&[k, n], weight_dtype).t().unwrap();
                let sum = numbers.tensor(&[b, t, k], dtype);
                let dws = [numbers.tensor(&[n, k], DType::F32), numbers.tensor(&[n, k], DType::BF16)];
                let what = format!("({b}, {t}, {n}, {k}) {dtype:?}");
                let close = |name, got: &Tensor, expected: &Tensor| {
                    assert_eq!(got.dtype(), expected.dtype());
                    assert_close(&format!("{what} {name}"), got, expected, tolerance(dtype));
                };
                close("y", &linear(&x, &w).unwrap(), &reference::linear(&x, &w).unwrap());
                let expected = reference::linear_backward_input(&dy, &w, None).unwrap();
                close("dx", &linear_backward_input(&dy, &w, None).unwrap(), &expected);
                let expected = reference::linear_backward_input(&dy, &w, Some(sum.clone())).unwrap();
                close("dx +=", &linear_backward_input(&dy, &w, Some(sum)).unwrap(), &expected);
                for dw in dws {
                    let expected = dw.copy().unwrap();
                    for (name, accumulate) in [("dw +=", true), ("dw =", false)] {
                        reference::linear_backward_weight(&dy, &x, &expected, accumulate).unwrap();
                        linear_backward_weight(&dy, &x, &dw, accumulate).unwrap();
                        assert_eq!(dw.dtype(), expected.dtype());
                        let loosest = if dw.dtype() == DType::BF16 { DType::BF16 } else { dtype };
                        assert_close(&format!("{what} {name}"), &dw, &expected, tolerance(loosest));
                    }
                }
            }
        }
    }

    #[test]
    fn accumulating_twice_adds_twice() {
        for dtype in [DType::F32, DType::F64] {
            let mut numbers = Numbers::new(7);
            let (x, dy) = (numbers.tensor(&[6, 3], dtype), numbers.tensor(&[6, 2], dtype));
            let (once, twice) =
                (Tensor::zeros((2, 3), dtype, x.device()).unwrap(), Tensor::zeros((2, 3), dtype, x.device()).unwrap());
            linear_backward_weight(&dy, &x, &once, true).unwrap();
            linear_backward_weight(&dy, &x, &twice, true).unwrap();
            linear_backward_weight(&dy, &x, &twice, true).unwrap();
            assert_close("twice", &twice, &(once * 2.0).unwrap(), tolerance(dtype));
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let mut numbers = Numbers::new(3);
        let (x, w) = (numbers.tensor(&[2, 3], DType::F32), numbers.tensor(&[4, 5], DType::F32));
        let message = linear(&x, &w).unwrap_err().to_string();
        assert!(message.contains("expected shape [4, 3], got [4, 5]"), "{message}");
        assert!(linear_backward_input(&x, &w, None).is_err());
        assert!(linear_backward_weight(&x, &x, &w, true).is_err());
        let square = numbers.tensor(&[3, 3], DType::F32);
        assert!(linear_backward_weight(&square, &square, &square, true).is_err(), "an accumulator that is an operand");
        assert!(linear_backward_weight(&square, &x.t().unwrap(), &w.t().unwrap(), true).is_err());
    }
}
