//! Three passes over the gradient (sums of squares, size of the update, update) and two over the parameter. The update is computed twice
//! and not stored. A global norm needs the first pass anyway: the gradient's scale is known only after it, and is factored out of the sums.
//! Row and column sums are combined in f64.

use candle_core::{Result, Tensor, bail};
use tensor_storage::share_storage;

use super::{AdafactorHyper, SecondMoment, SquareSums};
use crate::ops::reduce::cpu::square_sum_of;
use crate::ops::rounding::Rounding;
use crate::parallel::{Shared, for_each_part, rows_per_part, rows_per_sum};
use crate::random_mask::{RowKey, hash};

use crate::storage::{Element, View, update, with_element};
use crate::vector::{LANES, sum_of_two, vectorized};

/// Rows whose columns are summed in f32 before they are added to the sums in f64.
const BLOCK_ROWS: usize = 32;

pub(super) fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    sums: &SquareSums,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let grad = grad.contiguous()?;
    with_element!(grad.dtype(), G, by_gradient::<G>(param, &grad, sums, second, first, h))
}

/// See [`SquareSums::compute`]; for a matrix.
pub(super) fn square_sums_of(grad: &Tensor) -> Result<SquareSums> {
    let (rows, width) = grad.dims2()?;
    let grad = grad.contiguous()?;
    let view = View::new(&grad)?;
    let (row_sums, col_sums) = with_element!(grad.dtype(), G, by_row_and_column(view.slice::<G>()?, rows, width));
    let total = row_sums.iter().map(|&sum| f64::from(sum)).sum();
    Ok(SquareSums::new(total, Some((row_sums, col_sums))))
}

fn by_row_and_column<G: Element>(g: &[G], rows: usize, width: usize) -> (Vec<f32>, Vec<f32>) {
    let part = rows_per_sum(rows, width);
    let parts = rows.div_ceil(part);
    let mut row_sums = vec![0f32; rows];
    let mut col_sums = vec![0f64; parts * width];
    let (row_out, col_out) = (Shared::new(&mut row_sums), Shared::new(&mut col_sums));
    for_each_part(parts, |p| {
        let (start, count) = (p * part, part.min(rows - p * part));
        // SAFETY: each part has its own rows and its own row of partial sums.
        let (row_sums, col_sums) = unsafe { (row_out.slice(start, count), col_out.slice(p * width, width)) };
        square_sums(&g[start * width..][..count * width], row_sums, col_sums);
    });
    let (first, rest) = col_sums.split_at_mut(width);
    for partial in rest.chunks_exact(width) {
        for (total, partial) in first.iter_mut().zip(partial) {
            *total += partial;
        }
    }
    (row_sums, first.iter().map(|&sum| sum as f32).collect())
}

fn by_gradient<G: Element>(
    param: &Tensor,
    grad: &Tensor,
    sums: &SquareSums,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let view = View::new(grad)?;
    let g = view.slice::<G>()?;
    // Several tensors are locked for writing at once, so they are compared before the first lock.
    let state: Vec<&Tensor> = match second {
        SecondMoment::Factored { row, col } => [row, col].into_iter().chain(first).collect(),
        SecondMoment::Full(v) => [v].into_iter().chain(first).collect(),
    };
    for (i, a) in state.iter().enumerate() {
        let others = state[i + 1..].iter().copied().chain([param, grad]);
        if others.into_iter().any(|b| share_storage(a, b)) {
            bail!("adafactor: expected parameter, gradient and moments in separate storage")
        }
    }
    with_element!(param.dtype(), T, {
        update::<T, _>("adafactor", param, &[grad], |p| {
            let lr = if h.scale_parameter {
                h.learning_rate * (square_sum_of(p) / p.len() as f64).sqrt().max(h.eps2)
            } else {
                h.learning_rate
            };
            let (row_factor, col_factor) = factors(g, sums, second, h)?;
            let clip = (update_rms(g, &row_factor, &col_factor) / h.clip_threshold).max(1.0);
            let step = Step {
                lr: (lr / clip) as f32,
                beta1: h.beta1.unwrap_or(0.0) as f32,
                keep: (1.0 - h.weight_decay * lr) as f32,
                rounding: h.rounding,
            };
            match first {
                None => {
                    apply(p, g, None, &row_factor, &col_factor, step);
                    Ok(())
                }
                Some(first) => update::<f32, _>("adafactor", first, &[], |m| {
                    apply(p, g, Some(m), &row_factor, &col_factor, step);
                    Ok(())
                }),
            }
        })
    })
}

/// Updates the second moment. Returns the factors of rows (the gradient's scale included) and columns
/// whose product with the gradient is the update before clipping.
fn factors<G: Element>(
    g: &[G],
    sums: &SquareSums,
    second: &SecondMoment,
    h: &AdafactorHyper,
) -> Result<(Vec<f32>, Vec<f32>)> {
    match second {
        SecondMoment::Factored { row, col } => {
            let Some(sums) = &sums.factored else {
                bail!("adafactor: expected the sums of a matrix, got those of a vector")
            };
            if (sums.0.len(), sums.1.len()) != (row.elem_count(), col.elem_count()) {
                bail!("adafactor: expected the sums of this gradient, got those of {} x {}", sums.0.len(), sums.1.len())
            }
            update::<f32, _>("adafactor", row, &[], |row| {
                update::<f32, _>("adafactor", col, &[], |col| Ok(factored(sums, row, col, h)))
            })
        }
        SecondMoment::Full(v) => {
            let factor = update::<f32, _>("adafactor", v, &[], |v| {
                decay(v, g, h.beta2, h.gradient_scale, h.eps1);
                Ok(v.iter().map(|v| v.sqrt().recip()).collect::<Vec<f32>>())
            })?;
            // One row, with a factor for each column; the gradient's scale is the factor of the row.
            Ok((vec![h.gradient_scale as f32], factor))
        }
    }
}

/// As [`factors`], for a factored second moment.
fn factored(
    (row_sums, col_sums): &(Vec<f32>, Vec<f32>),
    row: &mut [f32],
    col: &mut [f32],
    h: &AdafactorHyper,
) -> (Vec<f32>, Vec<f32>) {
    let (rows, width) = (row.len(), col.len());
    // The statistics are of the scaled gradient.
    let square = h.gradient_scale * h.gradient_scale;
    let moved = |moment: f32, total: f32, n: usize| {
        (h.beta2 * f64::from(moment) + (1.0 - h.beta2) * (f64::from(total) * square / n as f64 + h.eps1)) as f32
    };
    for (row, &total) in row.iter_mut().zip(row_sums) {
        *row = moved(*row, total, width);
    }
    for (col, &total) in col.iter_mut().zip(col_sums) {
        *col = moved(*col, total, rows);
    }
    let mean = row.iter().map(|&r| f64::from(r)).sum::<f64>() / rows as f64;
    let row_factor = row.iter().map(|&r| (h.gradient_scale * (mean / f64::from(r)).sqrt()) as f32).collect();
    let col_factor = col.iter().map(|&c| (1.0 / f64::from(c).sqrt()) as f32).collect();
    (row_factor, col_factor)
}

/// The root mean square of `g * row_factor * col_factor`.
fn update_rms<G: Element>(g: &[G], row_factor: &[f32], col_factor: &[f32]) -> f64 {
    let (rows, width) = (row_factor.len(), col_factor.len());
    let part = rows_per_sum(rows, width);
    let mut totals = vec![0f64; rows.div_ceil(part)];
    let out = Shared::new(&mut totals);
    for_each_part(rows.div_ceil(part), |p| {
        let (start, count) = (p * part, part.min(rows - p * part));
        // SAFETY: each part has its own element.
        let total = unsafe { out.slice(p, 1) };
        let g = &g[start * width..][..count * width];
        total[0] = update_square_sum(g, &row_factor[start..start + count], col_factor);
    });
    (totals.iter().sum::<f64>() / g.len() as f64).sqrt()
}

#[derive(Clone, Copy)]
struct Step {
    lr: f32,
    beta1: f32,
    /// The factor of weight decay.
    keep: f32,
    rounding: Rounding,
}

fn apply<T: Element, G: Element>(
    p: &mut [T],
    g: &[G],
    first: Option<&mut [f32]>,
    row_factor: &[f32],
    col_factor: &[f32],
    step: Step,
) {
    let (rows, width) = (row_factor.len(), col_factor.len());
    let part = rows_per_part(rows, width);
    let (p, first) = (Shared::new(p), first.map(Shared::new));
    for_each_part(rows.div_ceil(part), |i| {
        let (start, count) = (i * part, part.min(rows - i * part));
        let range = start * width..(start + count) * width;
        // SAFETY: parts are disjoint ranges of rows.
        let p = unsafe { p.slice(range.start, range.len()) };
        // SAFETY: as above.
        let first = first.map(|first| unsafe { first.slice(range.start, range.len()) });
        apply_rows(p, &g[range], first, start, &row_factor[start..start + count], col_factor, step);
    });
}

/// Replaces each parameter of a row by `value` of it and its item.
#[inline(always)]
fn replace<T: Element, I>(
    p: &mut [T],
    items: impl Iterator<Item = I>,
    noise: Option<RowKey>,
    value: impl Fn(f32, I) -> f32,
) {
    match noise {
        None => {
            for (p, item) in p.iter_mut().zip(items) {
                *p = T::from_f32(value(p.to_f32(), item));
            }
        }
        Some(key) => {
            for (channel, (p, item)) in p.iter_mut().zip(items).enumerate() {
                *p = T::from_f32_stochastic(value(p.to_f32(), item), hash(key, channel as u32));
            }
        }
    }
}

vectorized! {
    /// Adds the squares of rows of `g` by row and by column.
    fn square_sums<G: Element>(g: &[G], row_sums: &mut [f32], col_sums: &mut [f64]) {
        let width = col_sums.len();
        let mut block = vec![0f32; width];
        for (g, row_sums) in g.chunks(BLOCK_ROWS * width).zip(row_sums.chunks_mut(BLOCK_ROWS)) {
            block.fill(0.0);
            for (g, row_sum) in g.chunks_exact(width).zip(row_sums) {
                let mut lanes = [0f32; LANES];
                let (g, g_rest) = g.as_chunks::<LANES>();
                let (cols, cols_rest) = block.as_chunks_mut::<LANES>();
                for (g, cols) in g.iter().zip(cols) {
                    for lane in 0..LANES {
                        let square = g[lane].to_f32() * g[lane].to_f32();
                        cols[lane] += square;
                        lanes[lane] += square;
                    }
                }
                let mut total = lanes.iter().sum::<f32>();
                for (g, col) in g_rest.iter().zip(cols_rest) {
                    let square = g.to_f32() * g.to_f32();
                    *col += square;
                    total += square;
                }
                *row_sum = total;
            }
            for (total, block) in col_sums.iter_mut().zip(&block) {
                *total += f64::from(*block);
            }
        }
    }

    fn update_square_sum<G: Element>(g: &[G], row_factor: &[f32], col_factor: &[f32]) -> f64 {
        let width = col_factor.len();
        let mut total = 0.0;
        for (g, &row) in g.chunks_exact(width).zip(row_factor) {
            let squares = sum_of_two(g, col_factor, |g, col| {
                let u = g.to_f32() * row * col;
                u * u
            });
            total += f64::from(squares);
        }
        total
    }

    /// Rows from `first_row` on.
    fn apply_rows<T: Element, G: Element>(
        p: &mut [T],
        g: &[G],
        first: Option<&mut [f32]>,
        first_row: usize,
        row_factor: &[f32],
        col_factor: &[f32],
        step: Step,
    ) {
        let width = col_factor.len();
        let is_rounded = size_of::<T>() < size_of::<f32>();
        let noise = |row: usize| if is_rounded { step.rounding.row(first_row + row) } else { None };
        let rows = p.chunks_exact_mut(width).zip(g.chunks_exact(width)).zip(row_factor).enumerate();
        match first {
            None => for (i, ((p, g), &row)) in rows {
                replace(p, g.iter().zip(col_factor), noise(i), |p, (g, col)| p * step.keep - g.to_f32() * row * col * step.lr);
            },
            Some(first) => for ((i, ((p, g), &row)), m) in rows.zip(first.chunks_exact_mut(width)) {
                replace(p, g.iter().zip(col_factor).zip(m), noise(i), |p, ((g, col), m)| {
                    *m = *m * step.beta1 + g.to_f32() * row * col * step.lr * (1.0 - step.beta1);
                    p * step.keep - *m
                });
            },
        }
    }

    /// Updates a full second moment.
    fn decay<G: Element>(v: &mut [f32], g: &[G], beta2: f64, scale: f64, eps1: f64) {
        for (v, &g) in v.iter_mut().zip(g) {
            let g = f64::from(g.to_f32()) * scale;
            *v = (f64::from(*v) * beta2 + (1.0 - beta2) * (g * g + eps1)) as f32;
        }
    }
}
