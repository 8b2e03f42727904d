//! The norm on the CPU, a row at a time.

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
                let (dy, partial) = unsafe { (dy.slice(range.start, range.len()), partials.slice(p * width, width)) };
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
