//! One pass over parameter, gradient and both moments.

use candle_core::{Result, Tensor, bail};
use tensor_storage::share_storage;

use super::{AdamwHyper, Factors};
use crate::ops::rounding::Rounding;
use crate::parallel::{Shared, for_each_part, rows_per_part};
use crate::random_mask::{RowKey, hash};

use crate::storage::{Element, View, update, with_element};
use crate::vector::vectorized;

pub(super) fn adamw(param: &Tensor, grad: &Tensor, first: &Tensor, second: &Tensor, h: &AdamwHyper) -> Result<()> {
    let grad = grad.contiguous()?;
    // Several tensors are locked for writing at once, so they are compared before the first lock.
    let all = [param, first, second, &grad];
    for (i, a) in all.iter().enumerate() {
        if all[i + 1..].iter().any(|b| share_storage(a, b)) {
            bail!("adamw: expected parameter, gradient and moments in separate storage")
        }
    }
    // Noise is keyed by row and column, as everywhere; a vector is one row.
    let width = param.dims().last().copied().unwrap_or(1).max(1);
    let step = Step::new(h);
    with_element!(grad.dtype(), G, {
        let view = View::new(&grad)?;
        let g = view.slice::<G>()?;
        with_element!(param.dtype(), T, {
            update::<T, _>("adamw", param, &[&grad], |p| {
                update::<f32, _>("adamw", first, &[], |m| {
                    update::<f32, _>("adamw", second, &[], |v| {
                        apply(p, g, (m, v), width, step);
                        Ok(())
                    })
                })
            })
        })
    })
}

#[derive(Clone, Copy)]
pub(crate) struct Step {
    scale: f32,
    factors: Factors,
    pub(crate) rounding: Rounding,
    pub(crate) first_row: usize,
}

impl Step {
    pub(crate) fn new(h: &AdamwHyper) -> Self {
        let scale = h.gradient_scale as f32;
        Self { scale, factors: Factors::new(h), rounding: h.rounding, first_row: h.first_row }
    }
}

fn apply<T: Element, G: Element>(p: &mut [T], g: &[G], (m, v): (&mut [f32], &mut [f32]), width: usize, step: Step) {
    let rows = p.len() / width;
    let part = rows_per_part(rows, width);
    let (p, m, v) = (Shared::new(p), Shared::new(m), Shared::new(v));
    for_each_part(rows.div_ceil(part), |i| {
        let (start, count) = (i * part, part.min(rows - i * part));
        let range = start * width..(start + count) * width;
        // SAFETY: parts are disjoint ranges of rows.
        let p = unsafe { p.slice(range.start, range.len()) };
        // SAFETY: as above.
        let (m, v) = unsafe { (m.slice(range.start, range.len()), v.slice(range.start, range.len())) };
        apply_rows(p, &g[range], m, v, step.first_row + start, width, step);
    });
}

/// The new value of a parameter.
#[inline(always)]
pub(crate) fn moved(p: f32, g: f32, m: &mut f32, v: &mut f32, Step { scale, factors: step, .. }: &Step) -> f32 {
    let g = g * scale;
    *m = *m * step.beta1 + g * step.new1;
    *v = *v * step.beta2 + g * g * step.new2;
    p * step.keep - step.rate * *m / (v.sqrt() / step.root + step.eps)
}

#[inline(always)]
fn replace<T: Element, G: Element>(
    p: &mut [T],
    g: &[G],
    (m, v): (&mut [f32], &mut [f32]),
    noise: Option<RowKey>,
    step: &Step,
) {
    let items = p.iter_mut().zip(g).zip(m.iter_mut().zip(v));
    match noise {
        None => {
            for ((p, g), (m, v)) in items {
                *p = T::from_f32(moved(p.to_f32(), g.to_f32(), m, v, step));
            }
        }
        Some(key) => {
            for (channel, ((p, g), (m, v))) in items.enumerate() {
                *p = T::from_f32_stochastic(moved(p.to_f32(), g.to_f32(), m, v, step), hash(key, channel as u32));
            }
        }
    }
}

vectorized! {
    /// Rows from `first_row` on.
    fn apply_rows<T: Element, G: Element>(
        p: &mut [T],
        g: &[G],
        m: &mut [f32],
        v: &mut [f32],
        first_row: usize,
        width: usize,
        step: Step,
    ) {
        let is_rounded = size_of::<T>() < size_of::<f32>();
        let moments = m.chunks_exact_mut(width).zip(v.chunks_exact_mut(width));
        let rows = p.chunks_exact_mut(width).zip(g.chunks_exact(width)).zip(moments).enumerate();
        for (row, ((p, g), moments)) in rows {
            let noise = if is_rounded { step.rounding.row(first_row + row) } else { None };
            replace(p, g, moments, noise, &step);
        }
    }
}
