//! DoRA on the CPU. The square of a row of `W + s B A` is expanded, so that A is multiplied by W in one product of r rows:
//! `|w|² + 2 s b·(A w) + s² b·(A Aᵀ b)`.

use candle_core::{Result, Tensor};

use crate::dispatch::rows_and_width;
use crate::parallel::{Shared, for_each_part, for_each_rows, rows_per_sum};
use crate::quantised::Weight;
use crate::storage::{Element, View, filled, update, with_element};
use crate::vector::{sum, vectorized};

pub(super) fn adapted_row_norms(weight: Weight, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let (n, k) = weight.dims2()?;
    let rank = a.dim(0)?;
    let a = a.to_dtype(candle_core::DType::F32)?;
    // (r, N) and (r, r).
    let (of_weight, of_a) = (crate::linear(&a, weight)?, crate::linear(&a, &a)?);
    let b = b.contiguous()?;
    let b_view = View::new(&b)?;
    let (of_weight_view, of_a_view) = (View::new(&of_weight)?, View::new(&of_a)?);
    let (b, of_weight, of_a) = (b_view.to_f32()?, of_weight_view.slice::<f32>()?, of_a_view.slice::<f32>()?);
    weight.with_factor(|weight| {
        filled::<f32>(n, |lengths| {
            let lengths = Shared::new(lengths);
            for_each_rows(n, k, |rows| {
                // SAFETY: parts are disjoint ranges of rows.
                let lengths = unsafe { lengths.slice(rows.start, rows.len()) };
                let mut row_of_weight = vec![0f32; k];
                for (row, length) in rows.clone().zip(lengths.iter_mut()) {
                    weight.widen_row(row, &mut row_of_weight);
                    *length = square(&row_of_weight);
                }
                for (row, length) in rows.zip(lengths) {
                    let b = &b[row * rank..(row + 1) * rank];
                    let (mut once, mut twice) = (0.0, 0.0);
                    for (i, &b_i) in b.iter().enumerate() {
                        let b_i = f64::from(b_i);
                        once += b_i * f64::from(of_weight[i * n + row]);
                        let of_a = &of_a[i * rank..(i + 1) * rank];
                        twice += b_i * b.iter().zip(of_a).map(|(&b, &a)| f64::from(b) * f64::from(a)).sum::<f64>();
                    }
                    let square = f64::from(*length) + 2.0 * scale * once + scale * scale * twice;
                    *length = square.max(0.0).sqrt() as f32;
                }
            });
            Ok(())
        })
    })
}

pub(super) fn scale_columns(y: Tensor, factors: &Tensor) -> Result<Tensor> {
    let (rows, width) = rows_and_width("scale_columns", "y", &y)?;
    let factors = factors.contiguous()?;
    let factors_view = View::new(&factors)?;
    let of_columns = factors_view.to_f32()?;
    with_element!(y.dtype(), T, {
        update::<T, _>("scale_columns", &y, &[&factors], |data| {
            let data = Shared::new(data);
            for_each_rows(rows, width, |rows| {
                // SAFETY: parts are disjoint ranges of rows.
                multiply_rows(unsafe { data.slice(rows.start * width, rows.len() * width) }, &of_columns);
            });
            Ok(())
        })?;
    });
    Ok(y)
}

pub(super) fn magnitude_backward(dy: &Tensor, z: &Tensor, lengths: &Tensor, dmagnitude: &Tensor) -> Result<()> {
    let (rows, width) = rows_and_width("magnitude_backward", "dy", dy)?;
    let (dy, z, lengths) = (dy.contiguous()?, z.contiguous()?, lengths.contiguous()?);
    let (dy_view, z_view, lengths_view) = (View::new(&dy)?, View::new(&z)?, View::new(&lengths)?);
    let lengths = lengths_view.to_f32()?;
    let part = rows_per_sum(rows, width);
    // Each part has its own sums; they are added in order at the end.
    let mut partial = vec![0f32; rows.div_ceil(part) * width];
    let partials = Shared::new(&mut partial);
    with_element!(dy.dtype(), T, {
        let (dy, z) = (dy_view.slice::<T>()?, z_view.slice::<T>()?);
        for_each_part(rows.div_ceil(part), |p| {
            let range = p * part * width..rows.min((p + 1) * part) * width;
            // SAFETY: each part has its own row of sums.
            add_products(&dy[range.clone()], &z[range], unsafe { partials.slice(p * width, width) });
        });
    });
    update::<f32, _>("magnitude_backward", dmagnitude, &[], |dmagnitude| {
        for partial in partial.chunks_exact(width.max(1)) {
            for ((sum, &partial), &length) in dmagnitude.iter_mut().zip(partial).zip(lengths.iter()) {
                *sum += partial / length;
            }
        }
        Ok(())
    })
}

vectorized! {
    fn square(row: &[f32]) -> f32 {
        sum(row, |x| x * x)
    }

    fn multiply_rows<T: Element>(rows: &mut [T], factors: &[f32]) {
        for row in rows.chunks_exact_mut(factors.len().max(1)) {
            for i in 0..factors.len() {
                row[i] = T::from_f32(row[i].to_f32() * factors[i]);
            }
        }
    }

    fn add_products<T: Element>(dy: &[T], z: &[T], sums: &mut [f32]) {
        let width = sums.len();
        for row in 0..dy.len() / width.max(1) {
            let (dy, z) = (&dy[row * width..][..width], &z[row * width..][..width]);
            for i in 0..width {
                sums[i] += dy[i].to_f32() * z[i].to_f32();
            }
        }
    }
}
