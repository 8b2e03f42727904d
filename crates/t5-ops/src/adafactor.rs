//! Adafactor (Shazeer and Stern 2018): one parameter's update, in place.
//!
//! The formula is that of `transformers.optimization.Adafactor`, with `lr` the learning rate after
//! `scale_parameter`, RMS(x) = sqrt(mean(x²)), g the gradient times `gradient_scale`:
//!
//! ```text
//! lr  = learning_rate * max(eps2, RMS(p))                      (learning_rate without scale_parameter)
//! row = beta2 * row + (1 - beta2) * mean over columns of (g² + eps1)     two or more dimensions
//! col = beta2 * col + (1 - beta2) * mean over rows of (g² + eps1)
//! u   = g / sqrt(row / mean(row)) / sqrt(col)
//! v   = beta2 * v + (1 - beta2) * (g² + eps1);  u = g / sqrt(v)          one dimension
//! u   = lr * u / max(1, RMS(u) / clip_threshold)
//! m   = beta1 * m + (1 - beta1) * u;  u = m                              with a first moment
//! p   = p - weight_decay * lr * p - u
//! ```
//!
//! Shapes: parameter and gradient (.., N, K); row (.., N); col (.., K).

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::{check_accumulator, check_shape, has_kernel};
use crate::rounding::Rounding;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdafactorHyper {
    /// The step's learning rate: the relative step already resolved, `scale_parameter` not yet applied.
    pub learning_rate: f64,
    /// Decay of the second moment at this step: `1 - step^decay_rate`.
    pub beta2: f64,
    /// Added to the squared gradient.
    pub eps1: f64,
    /// The least RMS of a parameter that `scale_parameter` reckons with.
    pub eps2: f64,
    /// The update's RMS is clipped to this, before the learning rate.
    pub clip_threshold: f64,
    /// Multiplies the learning rate by the parameter's RMS.
    pub scale_parameter: bool,
    /// Decay of the first moment, if there is one.
    pub beta1: Option<f64>,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// Multiplies the gradient: the clipping factor of the global norm.
    pub gradient_scale: f64,
    /// How a parameter in bf16 is rounded; everything before that is in f32.
    pub rounding: Rounding,
}

/// The running second moment of the gradient.
#[derive(Clone, Debug)]
pub enum SecondMoment {
    /// Of a parameter of two or more dimensions (.., N, K).
    Factored {
        /// Means over columns: (.., N).
        row: Tensor,
        /// Means over rows: (.., K).
        col: Tensor,
    },
    /// Of a parameter of one dimension: the parameter's shape.
    Full(Tensor),
}

/// Updates `param`, `second` and `first` in place from `grad`, which is not changed.
pub fn adafactor(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let _span = tracing::debug_span!("adafactor").entered();
    check(param, grad, second, first, h)?;
    let is_f32 = |t: &Tensor| t.device().is_cpu() && t.dtype() == DType::F32;
    let moments = match second {
        SecondMoment::Factored { row, col } => param.rank() == 2 && is_f32(row) && is_f32(col),
        SecondMoment::Full(v) => is_f32(v),
    };
    if has_kernel(&[param]) && is_f32(grad) && moments && first.is_none_or(is_f32) && param.elem_count() > 0 {
        kernel::adafactor(param, grad, second, first, h)
    } else {
        reference::adafactor(param, grad, second, first, h)
    }
}

fn check(
    param: &Tensor,
    grad: &Tensor,
    second: &SecondMoment,
    first: Option<&Tensor>,
    h: &AdafactorHyper,
) -> Result<()> {
    let shape = param.dims();
    check_accumulator("adafactor", "param", param, shape)?;
    check_shape("adafactor", "grad", grad, shape)?;
    match (second, shape) {
        (SecondMoment::Full(v), _) => check_accumulator("adafactor", "second moment", v, shape)?,
        (SecondMoment::Factored { row, col }, [outer @ .., n, k]) => {
            check_accumulator("adafactor", "row", row, &[outer, &[*n]].concat())?;
            check_accumulator("adafactor", "col", col, &[outer, &[*k]].concat())?;
        }
        (SecondMoment::Factored { .. }, _) => {
            bail!("adafactor: expected a full second moment for a parameter of shape {shape:?}, got a factored one")
        }
    }
    if h.beta1.is_some() != first.is_some() {
        bail!("adafactor: expected a first moment exactly when beta1 is set, got beta1 {:?}", h.beta1)
    }
    first.map_or(Ok(()), |m| check_accumulator("adafactor", "first moment", m, shape))
}

/// Three passes over the gradient (statistics, size of the update, update) and two over the parameter; the
/// update is computed twice instead of stored. Row and column sums are combined in f64.
mod kernel {
    use candle_core::{Result, Tensor, bail};

    use super::{AdafactorHyper, SecondMoment};
    use crate::dropout::{RowKey, hash};
    use crate::parallel::{Shared, for_each_part, rows_per_part};
    use crate::reduce::kernel::square_sum_of;
    use crate::rounding::Rounding;
    use crate::storage::{Element, View, share_storage, update, with_element};
    use crate::vector::{LANES, sum_of_two, vectorized};

    /// Rows whose columns are summed in f32 before they are added to the sums in f64.
    const BLOCK_ROWS: usize = 32;

    pub(super) fn adafactor(
        param: &Tensor,
        grad: &Tensor,
        second: &SecondMoment,
        first: Option<&Tensor>,
        h: &AdafactorHyper,
    ) -> Result<()> {
        let grad = grad.contiguous()?;
        let view = View::new(&grad)?;
        let g = view.slice::<f32>()?;
        // Several tensors are locked for writing at once, so they are compared before the first lock.
        let state: Vec<&Tensor> = match second {
            SecondMoment::Factored { row, col } => [row, col].into_iter().chain(first).collect(),
            SecondMoment::Full(v) => [v].into_iter().chain(first).collect(),
        };
        for (i, a) in state.iter().enumerate() {
            let others = state[i + 1..].iter().copied().chain([param, &grad]);
            if others.into_iter().any(|b| share_storage(a, b)) {
                bail!("adafactor: expected parameter, gradient and moments in separate storage")
            }
        }
        with_element!(param.dtype(), T, {
            update::<T, _>("adafactor", param, &[&grad], |p| {
                let lr = if h.scale_parameter {
                    h.learning_rate * (square_sum_of(p) / p.len() as f64).sqrt().max(h.eps2)
                } else {
                    h.learning_rate
                };
                let (row_factor, col_factor) = factors(&grad, g, second, h)?;
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

    /// Moves the second moment on. Returns the factors of rows (the gradient's scale included) and columns
    /// whose product with the gradient is the update before clipping.
    fn factors(grad: &Tensor, g: &[f32], second: &SecondMoment, h: &AdafactorHyper) -> Result<(Vec<f32>, Vec<f32>)> {
        match second {
            SecondMoment::Factored { row, col } => {
                let (rows, width) = grad.dims2()?;
                update::<f32, _>("adafactor", row, &[], |row| {
                    update::<f32, _>("adafactor", col, &[], |col| Ok(factored(g, rows, width, row, col, h)))
                })
            }
            SecondMoment::Full(v) => {
                let factor = update::<f32, _>("adafactor", v, &[], |v| {
                    decay(v, g, h.beta2, h.gradient_scale, h.eps1);
                    Ok(v.iter().map(|v| v.sqrt().recip()).collect::<Vec<f32>>())
                })?;
                // One row whose columns have a factor each; the gradient's scale is the factor of the row.
                Ok((vec![h.gradient_scale as f32], factor))
            }
        }
    }

    /// As [`factors`], for a factored second moment.
    fn factored(
        g: &[f32],
        rows: usize,
        width: usize,
        row: &mut [f32],
        col: &mut [f32],
        h: &AdafactorHyper,
    ) -> (Vec<f32>, Vec<f32>) {
        let part = rows_per_part(rows, width);
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
        // The statistics are of the scaled gradient.
        let square = h.gradient_scale * h.gradient_scale;
        let moved = |moment: f32, total: f64, n: usize| {
            (h.beta2 * f64::from(moment) + (1.0 - h.beta2) * (total * square / n as f64 + h.eps1)) as f32
        };
        for (row, &total) in row.iter_mut().zip(&row_sums) {
            *row = moved(*row, f64::from(total), width);
        }
        for (col, &total) in col.iter_mut().zip(first.iter()) {
            *col = moved(*col, total, rows);
        }
        let mean = row.iter().map(|&r| f64::from(r)).sum::<f64>() / rows as f64;
        let row_factor = row.iter().map(|&r| (h.gradient_scale * (mean / f64::from(r)).sqrt()) as f32).collect();
        let col_factor = col.iter().map(|&c| (1.0 / f64::from(c).sqrt()) as f32).collect();
        (row_factor, col_factor)
    }

    /// The root mean square of `g * row_factor * col_factor`.
    fn update_rms(g: &[f32], row_factor: &[f32], col_factor: &[f32]) -> f64 {
        let (rows, width) = (row_factor.len(), col_factor.len());
        let part = rows_per_part(rows, width);
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
        /// What weight decay leaves of the parameter.
        keep: f32,
        rounding: Rounding,
    }

    fn apply<T: Element>(
        p: &mut [T],
        g: &[f32],
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

    /// Replaces each parameter of a row by what `value` makes of it and of its item.
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
        fn square_sums(g: &[f32], row_sums: &mut [f32], col_sums: &mut [f64]) {
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
                            let square = g[lane] * g[lane];
                            cols[lane] += square;
                            lanes[lane] += square;
                        }
                    }
                    let mut total = lanes.iter().sum::<f32>();
                    for (g, col) in g_rest.iter().zip(cols_rest) {
                        *col += g * g;
                        total += g * g;
                    }
                    *row_sum = total;
                }
                for (total, block) in col_sums.iter_mut().zip(&block) {
                    *total += f64::from(*block);
                }
            }
        }

        fn update_square_sum(g: &[f32], row_factor: &[f32], col_factor: &[f32]) -> f64 {
            let width = col_factor.len();
            let mut total = 0.0;
            for (g, &row) in g.chunks_exact(width).zip(row_factor) {
                let squares = sum_of_two(g, col_factor, |g, col| {
                    let u = g * row * col;
                    u * u
                });
                total += f64::from(squares);
            }
            total
        }

        /// Rows from `first_row` on.
        fn apply_rows<T: Element>(
            p: &mut [T],
            g: &[f32],
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
                    replace(p, g.iter().zip(col_factor), noise(i), |p, (g, col)| p * step.keep - g * row * col * step.lr);
                },
                Some(first) => for ((i, ((p, g), &row)), m) in rows.zip(first.chunks_exact_mut(width)) {
                    replace(p, g.iter().zip(col_factor).zip(m), noise(i), |p, ((g, col), m)| {
                        *m = *m * step.beta1 + g * row * col * step.lr * (1.0 - step.beta1);
                        p * step.keep - *m
                    });
                },
            }
        }

        /// Moves a full second moment on.
        fn decay(v: &mut [f32], g: &[f32], beta2: f64, scale: f64, eps1: f64) {
            for (v, &g) in v.iter_mut().zip(g) {
                let g = f64::from(g) * scale;
                *v = (f64::from(*v) * beta2 + (1.0 - beta2) * (g * g + eps1)) as f32;
            }
        }
    }
}

pub(crate) mod reference {
    use candle_core::{D, DType, Result, Tensor};

    use super::{AdafactorHyper, SecondMoment};
    use crate::dispatch::{overwrite, wide, wide_dtype};
    use crate::rounding::reference::rounded;

    /// See [`crate::adafactor`].
    pub fn adafactor(
        param: &Tensor,
        grad: &Tensor,
        second: &SecondMoment,
        first: Option<&Tensor>,
        h: &AdafactorHyper,
    ) -> Result<()> {
        let p = wide(param)?;
        let g = (grad.to_dtype(wide_dtype(param))? * h.gradient_scale)?;
        let lr = if h.scale_parameter { h.learning_rate * rms(&p)?.max(h.eps2) } else { h.learning_rate };
        let squares = (g.sqr()? + h.eps1)?;
        let decay = |moment: &Tensor, new: Tensor| -> Result<Tensor> {
            let moved = ((wide(moment)? * h.beta2)? + (new * (1.0 - h.beta2))?)?;
            overwrite(moment, &moved)?;
            Ok(moved)
        };
        let u = match second {
            SecondMoment::Full(v) => (g / decay(v, squares)?.sqrt()?)?,
            SecondMoment::Factored { row, col } => {
                let row = decay(row, squares.mean(D::Minus1)?)?;
                let col = decay(col, squares.mean(D::Minus2)?)?;
                let row = row.broadcast_div(&row.mean_keepdim(D::Minus1)?)?.sqrt()?.unsqueeze(D::Minus1)?;
                g.broadcast_div(&row)?.broadcast_div(&col.sqrt()?.unsqueeze(D::Minus2)?)?
            }
        };
        let clip = (rms(&u)? / h.clip_threshold).max(1.0);
        let mut u = (u * (lr / clip))?;
        if let (Some(first), Some(beta1)) = (first, h.beta1) {
            u = ((wide(first)? * beta1)? + (u * (1.0 - beta1))?)?;
            overwrite(first, &u)?;
        }
        overwrite(param, &rounded(&((p * (1.0 - h.weight_decay * lr))? - u)?, param.dtype(), h.rounding)?)
    }

    fn rms(x: &Tensor) -> Result<f64> {
        let squares: f64 = x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()?;
        Ok((squares / x.elem_count() as f64).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{Numbers, assert_close};

    fn hyper() -> AdafactorHyper {
        AdafactorHyper {
            learning_rate: 1e-2,
            beta2: 0.4,
            eps1: 1e-30,
            eps2: 1e-3,
            clip_threshold: 1.0,
            scale_parameter: true,
            beta1: None,
            weight_decay: 0.0,
            gradient_scale: 1.0,
            rounding: Rounding::Nearest,
        }
    }

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    fn second_moment(shape: &[usize], dtype: DType) -> SecondMoment {
        match shape {
            [outer @ .., n, k] => SecondMoment::Factored {
                row: zeros(&[outer, &[*n]].concat(), dtype),
                col: zeros(&[outer, &[*k]].concat(), dtype),
            },
            shape => SecondMoment::Full(zeros(shape, dtype)),
        }
    }

    type Update = fn(&Tensor, &Tensor, &SecondMoment, Option<&Tensor>, &AdafactorHyper) -> Result<()>;

    /// The parameter after five steps with the same stream of gradients.
    fn run(shape: &[usize], dtype: DType, h: &AdafactorHyper, update: Update) -> Tensor {
        let mut numbers = Numbers::new(21);
        let param = numbers.tensor(shape, dtype);
        let second = second_moment(shape, dtype);
        let first = h.beta1.map(|_| zeros(shape, dtype));
        for step in 1..=5 {
            let grad = (numbers.tensor(shape, dtype) * 0.01).unwrap();
            let h = AdafactorHyper { beta2: 1.0 - f64::from(step).powf(-0.8), ..*h };
            update(&param, &grad, &second, first.as_ref(), &h).unwrap();
        }
        param
    }

    #[test]
    fn kernels_agree_with_the_reference_in_f64() {
        let variants = [
            hyper(),
            AdafactorHyper { scale_parameter: false, ..hyper() },
            AdafactorHyper { beta1: Some(0.9), ..hyper() },
            AdafactorHyper { weight_decay: 0.1, gradient_scale: 0.01, clip_threshold: 0.3, ..hyper() },
            AdafactorHyper { beta1: Some(0.5), weight_decay: 0.1, eps1: 1e-6, ..hyper() },
        ];
        for shape in [&[1][..], &[7], &[65], &[1, 1], &[7, 65], &[65, 7], &[300, 96], &[1, 40], &[2, 3, 5]] {
            for h in &variants {
                let expected = run(shape, DType::F64, h, reference::adafactor);
                let what = format!("{shape:?} {h:?}");
                assert_close(&what, &run(shape, DType::F32, h, adafactor), &expected, 2e-6);
                assert_close(&what, &run(shape, DType::F64, h, adafactor), &expected, 1e-12);
            }
        }
    }

    /// A bf16 parameter after one step from f32 moments, by the kernel and by the reference.
    fn bf16_step(shape: &[usize], h: &AdafactorHyper, update: Update) -> Vec<f32> {
        let mut numbers = Numbers::new(8);
        let param = numbers.tensor(shape, DType::F32).to_dtype(DType::BF16).unwrap();
        let grad = numbers.tensor(shape, DType::F32);
        let first = h.beta1.map(|_| zeros(shape, DType::F32));
        update(&param, &grad, &second_moment(shape, DType::F32), first.as_ref(), h).unwrap();
        param.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn a_bf16_parameter_is_updated_in_f32_and_rounded_as_the_reference_rounds() {
        for rounding in [Rounding::Nearest, Rounding::Stochastic { key: 7 }] {
            for beta1 in [None, Some(0.9)] {
                for shape in [&[65][..], &[7, 65], &[300, 96], &[2, 3, 5]] {
                    let h = AdafactorHyper { rounding, beta1, weight_decay: 0.1, ..hyper() };
                    let got = bf16_step(shape, &h, adafactor);
                    let expected = bf16_step(shape, &h, reference::adafactor);
                    // The sums differ in their last bits, which turns a rounding here and there.
                    let turned = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                    assert!(turned * 200 <= got.len(), "{shape:?} {rounding:?}: {turned} of {}", got.len());
                    assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= a.abs() / 64.0));
                }
            }
        }
    }

    #[test]
    fn updates_too_small_for_bf16_are_kept_on_average_by_stochastic_rounding_and_lost_by_nearest() {
        // u = sign(g) = 1 and lr = 1e-3: each step takes 0.001 from 1, where bf16 is spaced by 0.0039 below.
        let shape = [64, 64];
        let after = |rounding: fn(u64) -> Rounding| {
            let param = Tensor::ones(&shape, DType::BF16, &Device::Cpu).unwrap();
            let grad = Tensor::ones(&shape, DType::F32, &Device::Cpu).unwrap();
            let second = second_moment(&shape, DType::F32);
            for step in 0..50 {
                let h = AdafactorHyper {
                    learning_rate: 1e-3,
                    scale_parameter: false,
                    beta2: 0.0,
                    rounding: rounding(step),
                    ..hyper()
                };
                adafactor(&param, &grad, &second, None, &h).unwrap();
            }
            param.to_dtype(DType::F32).unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap()
        };
        assert_eq!(after(|_| Rounding::Nearest), 1.0);
        let mean = after(|key| Rounding::Stochastic { key });
        assert!((mean - 0.95).abs() < 1e-3, "{mean}");
    }

    #[test]
    fn the_first_step_of_a_uniform_gradient_is_the_clipped_learning_rate() {
        // By hand: with beta2 = 0 and |g| equal everywhere, u = sign(g), RMS(u) = 1, lr = 1e-2 * RMS(p) = 2e-2.
        let param = Tensor::new(&[[2f32, -2.0], [2.0, -2.0]], &Device::Cpu).unwrap();
        let grad = Tensor::new(&[[0.5f32, -0.5], [-0.5, 0.5]], &Device::Cpu).unwrap();
        let h = AdafactorHyper { beta2: 0.0, ..hyper() };
        adafactor(&param, &grad, &second_moment(&[2, 2], DType::F32), None, &h).unwrap();
        let expected = Tensor::new(&[[1.98f32, -1.98], [2.02, -2.02]], &Device::Cpu).unwrap();
        assert_close("param", &param, &expected, 1e-6);
    }

    #[test]
    fn a_zero_gradient_leaves_the_parameter_alone() {
        let param = Numbers::new(5).tensor(&[8, 8], DType::F32);
        let before = param.copy().unwrap();
        adafactor(&param, &zeros(&[8, 8], DType::F32), &second_moment(&[8, 8], DType::F32), None, &hyper()).unwrap();
        assert_close("param", &param, &before, 0.0);
    }

    #[test]
    fn state_of_the_wrong_shape_is_an_error() {
        let (p, g) = (zeros(&[4, 3], DType::F32), zeros(&[4, 3], DType::F32));
        let good = second_moment(&[4, 3], DType::F32);
        assert!(adafactor(&p, &g, &second_moment(&[3, 4], DType::F32), None, &hyper()).is_err());
        assert!(adafactor(&p, &g.t().unwrap(), &good, None, &hyper()).is_err());
        assert!(adafactor(&p, &g, &good, Some(&g), &hyper()).is_err(), "a first moment without beta1");
        assert!(adafactor(&p, &g, &good, None, &AdafactorHyper { beta1: Some(0.9), ..hyper() }).is_err());
        assert!(adafactor(&p, &p, &good, None, &hyper()).is_err(), "the parameter as its own gradient");
    }
}
