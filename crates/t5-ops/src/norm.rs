//! RMS layer normalisation (Zhang and Sennrich 2019) as T5 uses it: no mean, no bias, statistics in f32.
//!
//! `y = weight * x / sqrt(mean(x²) + eps)`, over the last dimension.
//!
//! Shapes: x, dy (.., D), weight (D), inv_rms (..) without the last dimension.

use candle_core::{DType, Result, Tensor};

use crate::dispatch::{check_accumulator, check_shape, has_kernel, rows_and_width};

/// Normalises the rows of `x`. Returns `y` in the dtype of `x` and `1 / rms` of each row (flat, one per
/// row, `F32` or `F64`), which the backward needs.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let _span = tracing::debug_span!("rms_norm").entered();
    let (_, width) = rows_and_width("rms_norm", "x", x)?;
    check_shape("rms_norm", "weight", weight, &[width])?;
    if has_kernel(&[x, weight]) { kernel::rms_norm(x, weight, eps) } else { reference::rms_norm(x, weight, eps) }
}

/// The gradient with respect to `x`, in its dtype, plus `residual` if given: what reaches `x` beside the norm.
/// Adds the weight's gradient to `dweight` if given.
///
/// `dy` is given up by the caller: its memory may be overwritten with the result, so no other handle to it may be
/// read afterwards.
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    inv_rms: &Tensor,
    dy: Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("rms_norm_backward").entered();
    let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
    check_shape("rms_norm_backward", "weight", weight, &[width])?;
    check_shape("rms_norm_backward", "inv_rms", inv_rms, &[rows])?;
    check_shape("rms_norm_backward", "dy", &dy, x.dims())?;
    if let Some(residual) = residual {
        check_shape("rms_norm_backward", "residual", residual, x.dims())?;
    }
    if let Some(dweight) = dweight {
        check_accumulator("rms_norm_backward", "dweight", dweight, &[width])?;
    }
    // The accumulator of the kernel is f32.
    let accumulates = dweight.is_none_or(|dweight| dweight.dtype() == DType::F32);
    let same = residual.is_none_or(|residual| residual.dtype() == x.dtype() && residual.device().is_cpu());
    if has_kernel(&[x, weight, inv_rms, &dy]) && x.dtype() == dy.dtype() && same && accumulates {
        kernel::rms_norm_backward(x, weight, inv_rms, dy, residual, dweight)
    } else {
        reference::rms_norm_backward(x, weight, inv_rms, &dy, residual, dweight)
    }
}

mod kernel {
    use candle_core::{Result, Tensor};

    use crate::dispatch::rows_and_width;
    use crate::parallel::{Shared, for_each_part, rows_per_part, rows_per_sum};
    use crate::storage::{Element, View, filled, update, with_element};
    use crate::vector::{self, sum, sum_of_three, vectorized};

    pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
        let (rows, width) = rows_and_width("rms_norm", "x", x)?;
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        let (x_view, weight_view) = (View::new(&x)?, View::new(&weight)?);
        let weight = weight_view.to_f32()?;
        let part = rows_per_part(rows, width);
        let mut inv_rms = vec![0f32; rows];
        let inv = Shared::new(&mut inv_rms);
        let y = with_element!(x.dtype(), T, {
            let x_data = x_view.slice::<T>()?;
            filled::<T>(x.shape(), |y| {
                let y = Shared::new(y);
                for_each_part(rows.div_ceil(part), |p| {
                    let (first, count) = (p * part, part.min(rows - p * part));
                    // SAFETY: parts are disjoint ranges of rows.
                    let (y, inv) = unsafe { (y.slice(first * width, count * width), inv.slice(first, count)) };
                    forward(&x_data[first * width..][..count * width], &weight, eps as f32, y, inv);
                });
                Ok(())
            })?
        });
        Ok((y, Tensor::from_vec(inv_rms, rows, x.device())?))
    }

    pub(super) fn rms_norm_backward(
        x: &Tensor,
        weight: &Tensor,
        inv_rms: &Tensor,
        dy: Tensor,
        residual: Option<&Tensor>,
        dweight: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
        let (x, weight, inv_rms, dy) = (x.contiguous()?, weight.contiguous()?, inv_rms.contiguous()?, dy.contiguous()?);
        let residual = residual.map(Tensor::contiguous).transpose()?;
        let (weight_view, inv_view) = (View::new(&weight)?, View::new(&inv_rms)?);
        let (weight_data, inv_data) = (weight_view.to_f32()?, inv_view.to_f32()?);
        let (x_view, residual_view) = (View::new(&x)?, residual.as_ref().map(View::new).transpose()?);
        let part = rows_per_sum(rows, width);
        // Each part sums its own gradient of the weight; they are added in order at the end.
        let mut partial = vec![0f32; rows.div_ceil(part) * width];
        let partials = Shared::new(&mut partial);
        let operands: Vec<&Tensor> = [&x, &weight, &inv_rms].into_iter().chain(&residual).collect();
        with_element!(x.dtype(), T, {
            let x_data = x_view.slice::<T>()?;
            let residual_data = residual_view.as_ref().map(|view| view.slice::<T>()).transpose()?;
            update::<T, _>("rms_norm_backward", &dy, &operands, |dy| {
                let dy = Shared::new(dy);
                for_each_part(rows.div_ceil(part), |p| {
                    let (first, count) = (p * part, part.min(rows - p * part));
                    let range = first * width..(first + count) * width;
                    // SAFETY: parts are disjoint ranges of rows, and each has its own row of partial sums.
                    let (dy, partial) =
                        unsafe { (dy.slice(range.start, range.len()), partials.slice(p * width, width)) };
                    let residual = residual_data.map(|residual| &residual[range.clone()]);
                    let inv = &inv_data[first..first + count];
                    backward(&x_data[range], &weight_data, inv, residual, dy, partial);
                });
                Ok(())
            })?;
        });
        if let Some(dweight) = dweight {
            update::<f32, _>("rms_norm_backward", dweight, &[&x, &weight, &inv_rms], |dweight| {
                for partial in partial.chunks_exact(width.max(1)) {
                    vector::add(dweight, partial);
                }
                Ok(())
            })?;
        }
        Ok(dy)
    }

    vectorized! {
        fn forward<T: Element>(x: &[T], weight: &[f32], eps: f32, y: &mut [T], inv_rms: &mut [f32]) {
            let width = weight.len();
            for (row, inv_rms) in inv_rms.iter_mut().enumerate() {
                let x = &x[row * width..][..width];
                let y = &mut y[row * width..][..width];
                let squares = sum(x, |x| x.to_f32() * x.to_f32());
                let inv = 1.0 / (squares / width as f32 + eps).sqrt();
                for i in 0..width {
                    y[i] = T::from_f32(x[i].to_f32() * inv * weight[i]);
                }
                *inv_rms = inv;
            }
        }

        /// dy becomes residual + inv_rms * (g - n * mean(g * n)) with n = x * inv_rms, g = dy * weight; dweight grows
        /// by dy * n.
        fn backward<T: Element>(
            x: &[T],
            weight: &[f32],
            inv_rms: &[f32],
            residual: Option<&[T]>,
            dy: &mut [T],
            dweight: &mut [f32],
        ) {
            let width = weight.len();
            let dweight = &mut dweight[..width];
            for (row, &inv) in inv_rms.iter().enumerate() {
                let x = &x[row * width..][..width];
                let dy = &mut dy[row * width..][..width];
                let product = sum_of_three(x, dy, weight, |x, dy, weight| x.to_f32() * dy.to_f32() * weight);
                let mean = product * inv * inv / width as f32;
                match residual.map(|residual| &residual[row * width..][..width]) {
                    None => for i in 0..width {
                        let (x, d) = (x[i].to_f32(), dy[i].to_f32());
                        dweight[i] += d * (x * inv);
                        dy[i] = T::from_f32(inv * (d * weight[i] - x * mean));
                    },
                    Some(residual) => for i in 0..width {
                        let (x, d) = (x[i].to_f32(), dy[i].to_f32());
                        dweight[i] += d * (x * inv);
                        dy[i] = T::from_f32(residual[i].to_f32() + inv * (d * weight[i] - x * mean));
                    },
                }
            }
        }
    }
}

pub(crate) mod reference {
    use candle_core::{D, Result, Tensor};

    use crate::dispatch::{add_into, rows_and_width, wide, wide_dtype};

    /// See [`crate::rms_norm`].
    pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
        let (rows, _) = rows_and_width("rms_norm", "x", x)?;
        let wide_x = wide(x)?;
        let inv_rms = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
        let y = wide_x.broadcast_mul(&inv_rms)?.broadcast_mul(&weight.to_dtype(wide_dtype(x))?)?;
        Ok((y.to_dtype(x.dtype())?, inv_rms.reshape(rows)?))
    }

    /// See [`crate::rms_norm_backward`].
    pub fn rms_norm_backward(
        x: &Tensor,
        weight: &Tensor,
        inv_rms: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        dweight: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (rows, width) = rows_and_width("rms_norm_backward", "x", x)?;
        let inv_rms = inv_rms.reshape((rows, 1))?;
        let normalised = wide(x)?.reshape((rows, width))?.broadcast_mul(&inv_rms)?;
        let wide_dy = wide(dy)?.reshape((rows, width))?;
        if let Some(dweight) = dweight {
            add_into(dweight, &(&wide_dy * &normalised)?.sum(0)?)?;
        }
        // With n = x * inv_rms and g = dy * weight: dx = inv_rms * (g - n * mean(g * n)).
        let g = wide_dy.broadcast_mul(&weight.to_dtype(wide_dtype(x))?)?;
        let mean = (&g * &normalised)?.mean_keepdim(1)?;
        let dx = (g - normalised.broadcast_mul(&mean)?)?.broadcast_mul(&inv_rms)?;
        let dx = dx.reshape(x.shape())?;
        match residual {
            None => dx,
            Some(residual) => (wide(residual)? + dx)?,
        }
        .to_dtype(x.dtype())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, assert_close, autograd, check_gradient, tolerance, weighted};

    const EPS: f64 = 1e-6;

    #[test]
    fn the_reference_agrees_with_finite_differences_and_autograd() {
        let mut numbers = Numbers::new(2);
        let [x, weight, dy] = [&[2, 3, 5][..], &[5], &[2, 3, 5]].map(|shape| numbers.tensor(shape, DType::F64));
        let (_, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
        let dweight = weight.zeros_like().unwrap();
        let dx = rms_norm_backward(&x, &weight, &inv_rms, dy.clone(), None, Some(&dweight)).unwrap();
        check_gradient("dx", &x, &dx, |x| weighted(&rms_norm(x, &weight, EPS)?.0, &dy));
        check_gradient("dweight", &weight, &dweight, |w| weighted(&rms_norm(&x, w, EPS)?.0, &dy));
        let expected = autograd(&[&x, &weight], &dy, |t| Ok(reference::rms_norm(&t[0], &t[1], EPS)?.0));
        assert_close("dx", &dx, &expected[0], 1e-12);
        assert_close("dweight", &dweight, &expected[1], 1e-12);
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        for (rows, width) in [(1, 1), (7, 65), (65, 7), (3, 512), (700, 96)] {
            for (dtype, weight_dtype) in
                [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)]
            {
                let mut numbers = Numbers::new(rows as u64);
                let x = numbers.tensor(&[width, rows], dtype).t().unwrap();
                let dy = numbers.tensor(&[width, rows], dtype).t().unwrap();
                let weight = numbers.tensor(&[width], weight_dtype);
                let dweight = numbers.tensor(&[width], DType::F32);
                let expected_dweight = dweight.copy().unwrap();
                let (y, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
                let (expected_y, expected_inv) = reference::rms_norm(&x, &weight, EPS).unwrap();
                let close = |name, got: &Tensor, expected: &Tensor, tolerance| {
                    assert_eq!(got.dtype(), expected.dtype());
                    assert_close(&format!("({rows}, {width}) {dtype:?} {name}"), got, expected, tolerance);
                };
                close("y", &y, &expected_y, tolerance(dtype));
                close("inv_rms", &inv_rms, &expected_inv, 1e-5);
                let residual = numbers.tensor(&[rows, width], dtype);
                for residual in [None, Some(&residual)] {
                    let given = dy.copy().unwrap();
                    let dx = rms_norm_backward(&x, &weight, &inv_rms, given, residual, Some(&dweight)).unwrap();
                    let expected =
                        reference::rms_norm_backward(&x, &weight, &inv_rms, &dy, residual, Some(&expected_dweight))
                            .unwrap();
                    // With a single channel the gradient is a difference of equals.
                    close("dx", &dx, &expected, if width == 1 { 1.0 } else { tolerance(dtype) });
                    close("dweight", &dweight, &expected_dweight, 1e-4);
                }
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_finite() {
        let x = Tensor::zeros((2, 8), DType::F32, &candle_core::Device::Cpu).unwrap();
        let weight = x.get(0).unwrap().ones_like().unwrap();
        let (y, inv_rms) = rms_norm(&x, &weight, EPS).unwrap();
        assert_eq!(y.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
        let dx = rms_norm_backward(&x, &weight, &inv_rms, y.ones_like().unwrap(), None, None).unwrap();
        assert!(dx.sum_all().unwrap().to_scalar::<f32>().unwrap().is_finite());
    }
}
