//! Lion (Chen et al., 2023, arXiv 2302.06675): one parameter's update, in place. With g the gradient times `gradient_scale`:
//!
//! ```text
//! p = p * (1 - learning_rate * weight_decay)
//! p = p - learning_rate * sign(beta1 * m + (1 - beta1) * g)
//! m = beta2 * m + (1 - beta2) * g
//! ```
//!
//! Shapes: parameter, gradient and moment are the same. A card computes the reference.

use candle_core::{DType, Result, Tensor, bail};
use tensor_storage::share_storage;

use crate::dispatch::{Path, check_accumulator, check_shape};
use crate::needs::Needs;
use crate::ops::rounding::Rounding;
use crate::parallel::{Shared, for_each_part, rows_per_part};
use crate::random_mask::{RowKey, hash};

use crate::storage::{Element, View, update, with_element};
use crate::vector::vectorized;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct LionHyper {
    /// The step's learning rate.
    pub learning_rate: f64,
    /// The share of the moment in the direction of this update.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// Multiplies the gradient: the clipping factor of the global norm.
    pub gradient_scale: f64,
    /// How a parameter in bf16 is rounded; everything before that is in f32.
    pub rounding: Rounding,
    /// The number of the first row here in the whole parameter, if a parameter is updated some rows at a time: noise depends on the row.
    pub first_row: usize,
}

/// Returns the needs of [`lion`] for the largest of parameters of these numbers of elements and dtypes.
pub fn lion_needs(path: Path, parameters: &[(u64, DType)]) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference | Path::Device => Needs::most(parameters.iter().map(|&(n, dtype)| reference::needs(n, dtype))),
    }
}

/// Updates `param` and `moment` in place from `grad`, which is not changed. On the CPU parameter and gradient may each be in bf16; they are
/// read as f32, and the moment is f32.
///
/// # Errors
/// Shapes or dtypes that do not fit each other; tensors that share memory.
pub fn lion(param: &Tensor, grad: &Tensor, moment: &Tensor, h: &LionHyper) -> Result<()> {
    let _span = tracing::debug_span!("lion").entered();
    check_accumulator("lion", "param", param, param.dims())?;
    check_shape("lion", "grad", grad, param.dims())?;
    check_accumulator("lion", "moment", moment, param.dims())?;
    if share_storage(param, moment) || share_storage(param, grad) || share_storage(moment, grad) {
        bail!("lion: expected parameter, gradient and moment in separate storage")
    }
    let takes = moment.dtype() == DType::F32 && param.elem_count() > 0 && moment.device().is_cpu();
    match Path::choose(&[param, grad]).provided(takes) {
        Path::Cpu => on_cpu(param, grad, moment, h),
        Path::Reference | Path::Device => reference::lion(param, grad, moment, h),
    }
}

/// The numbers of an update as the CPU's kernel takes them.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    beta1: f32,
    beta2: f32,
    new1: f32,
    new2: f32,
    rate: f32,
    keep: f32,
    rounding: Rounding,
    first_row: usize,
}

fn on_cpu(param: &Tensor, grad: &Tensor, moment: &Tensor, h: &LionHyper) -> Result<()> {
    let grad = grad.contiguous()?;
    let width = param.dims().last().copied().unwrap_or(1).max(1);
    let factors = Factors {
        scale: h.gradient_scale as f32,
        beta1: h.beta1 as f32,
        beta2: h.beta2 as f32,
        new1: (1.0 - h.beta1) as f32,
        new2: (1.0 - h.beta2) as f32,
        rate: h.learning_rate as f32,
        keep: (1.0 - h.learning_rate * h.weight_decay) as f32,
        rounding: h.rounding,
        first_row: h.first_row,
    };
    with_element!(grad.dtype(), G, {
        let view = View::new(&grad)?;
        let g = view.slice::<G>()?;
        with_element!(param.dtype(), T, {
            update::<T, _>("lion", param, &[&grad], |p| {
                update::<f32, _>("lion", moment, &[], |m| {
                    apply(p, g, m, width, factors);
                    Ok(())
                })
            })
        })
    })
}

fn apply<T: Element, G: Element>(p: &mut [T], g: &[G], m: &mut [f32], width: usize, factors: Factors) {
    let rows = p.len() / width;
    let part = rows_per_part(rows, width);
    let (p, m) = (Shared::new(p), Shared::new(m));
    for_each_part(rows.div_ceil(part), |i| {
        let (start, count) = (i * part, part.min(rows - i * part));
        let range = start * width..(start + count) * width;
        // SAFETY: parts are disjoint ranges of rows.
        let (p, m) = unsafe { (p.slice(range.start, range.len()), m.slice(range.start, range.len())) };
        apply_rows(p, &g[range], m, factors.first_row + start, width, factors);
    });
}

/// The new value of a parameter.
#[inline(always)]
fn moved(p: f32, g: f32, m: &mut f32, f: &Factors) -> f32 {
    let g = g * f.scale;
    let direction = *m * f.beta1 + g * f.new1;
    *m = *m * f.beta2 + g * f.new2;
    let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
    p * f.keep - f.rate * sign
}

#[inline(always)]
fn replace<T: Element, G: Element>(p: &mut [T], g: &[G], m: &mut [f32], noise: Option<RowKey>, f: &Factors) {
    for (channel, ((p, g), m)) in p.iter_mut().zip(g).zip(m).enumerate() {
        let value = moved(p.to_f32(), g.to_f32(), m, f);
        *p = match noise {
            None => T::from_f32(value),
            Some(key) => T::from_f32_stochastic(value, hash(key, channel as u32)),
        };
    }
}

vectorized! {
    /// Rows from `first_row` on.
    fn apply_rows<T: Element, G: Element>(
        p: &mut [T],
        g: &[G],
        m: &mut [f32],
        first_row: usize,
        width: usize,
        factors: Factors,
    ) {
        let is_rounded = size_of::<T>() < size_of::<f32>();
        let rows = p.chunks_exact_mut(width).zip(g.chunks_exact(width)).zip(m.chunks_exact_mut(width)).enumerate();
        for (row, ((p, g), m)) in rows {
            let noise = if is_rounded { factors.rounding.row(first_row + row) } else { None };
            replace(p, g, m, noise, &factors);
        }
    }
}

/// The update in plain candle operations.
pub(crate) mod reference {
    use tensor_storage::overwrite;

    use super::*;

    use crate::dispatch::{wide, wide_dtype};
    use crate::needs::copies;
    use crate::ops::rounding::reference::rounded_from;

    /// See [`crate::lion`].
    pub fn lion(param: &Tensor, grad: &Tensor, moment: &Tensor, h: &LionHyper) -> Result<()> {
        let g = (grad.to_dtype(wide_dtype(param))? * h.gradient_scale)?;
        let between = |beta: f64| (wide(moment)? * beta)? + (&g * (1.0 - beta))?;
        let step = (between(h.beta1)?.sign()? * h.learning_rate)?;
        overwrite(moment, &between(h.beta2)?)?;
        let kept = (wide(param)? * (1.0 - h.learning_rate * h.weight_decay))?;
        overwrite(param, &rounded_from(&(kept - step)?, param.dtype(), h.rounding, h.first_row)?)
    }

    /// The scaled gradient, the step, the two terms of a moment, and their sum.
    pub(super) fn needs(elements: u64, param: DType) -> Needs {
        Needs::bytes(copies(6, elements, param))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, assert_close, device, values};

    const HYPER: LionHyper = LionHyper {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.99,
        weight_decay: 0.1,
        gradient_scale: 0.5,
        rounding: Rounding::Nearest,
        first_row: 0,
    };

    type Update = fn(&Tensor, &Tensor, &Tensor, &LionHyper) -> Result<()>;

    /// Parameter and moment after five updates with the same stream of gradients.
    fn run(shape: &[usize], dtype: DType, update: Update) -> [Tensor; 2] {
        let mut numbers = Numbers::new(21);
        let (param, moment) = (numbers.tensor(shape, dtype), Tensor::zeros(shape, dtype, &device()).unwrap());
        for _ in 0..5 {
            update(&param, &numbers.tensor(shape, dtype), &moment, &HYPER).unwrap();
        }
        [param, moment]
    }

    #[test]
    fn kernels_agree_with_the_reference_in_f64() {
        for shape in [&[1][..], &[65], &[7, 65], &[300, 96], &[2, 3, 5]] {
            let expected = run(shape, DType::F64, reference::lion);
            for (got, expected) in run(shape, DType::F32, lion).iter().zip(&expected) {
                assert_close(&format!("{shape:?}"), got, expected, 2e-6);
            }
        }
    }

    #[test]
    fn two_updates_are_those_of_the_paper() {
        let of = |values: &[f64]| Tensor::new(values, &device()).unwrap();
        let (p, m) = (of(&[1.0, 1.0, 1.0]), of(&[0.0, 0.0, 0.0]));
        let h = LionHyper { gradient_scale: 1.0, ..HYPER };
        lion(&p, &of(&[2.0, -3.0, 0.0]), &m, &h).unwrap();
        // 1 - 1e-2 * 0.1, and a step of 1e-2 against the sign.
        assert_close("p", &p, &of(&[0.989, 1.009, 0.999]), 1e-12);
        assert_close("m", &m, &of(&[0.02, -0.03, 0.0]), 1e-12);
        // 0.9 * 0.02 - 0.1 * 0.1 is above 0: the moment outweighs the new gradient.
        lion(&p, &of(&[-0.1, 0.0, -1.0]), &m, &h).unwrap();
        assert_close("p", &p, &of(&[0.989 * 0.999 - 0.01, 1.009 * 0.999 + 0.01, 0.999 * 0.999 + 0.01]), 1e-12);
    }

    #[test]
    fn rows_of_a_bf16_parameter_are_rounded_as_those_of_the_whole() {
        let h = LionHyper { rounding: Rounding::Stochastic { key: 7 }, ..HYPER };
        let state = || {
            let mut numbers = Numbers::new(8);
            let param = numbers.tensor(&[40, 33], DType::F32).to_dtype(DType::BF16).unwrap();
            (param, numbers.tensor(&[40, 33], DType::F32), numbers.tensor(&[40, 33], DType::F32))
        };
        let ((whole, g, m), (parts, _, n)) = (state(), state());
        lion(&whole, &g, &m, &h).unwrap();
        for (first_row, rows) in [(0, 17), (17, 23)] {
            let of = |x: &Tensor| x.narrow(0, first_row, rows).unwrap();
            lion(&of(&parts), &of(&g), &of(&n), &LionHyper { first_row, ..h }).unwrap();
        }
        assert_eq!(values(&whole), values(&parts));
        assert_eq!(values(&m), values(&n));
    }

    #[test]
    fn tensors_that_share_memory_or_do_not_fit_are_refused() {
        let [p, g, m] = [0, 1, 2].map(|_| Tensor::zeros((4, 4), DType::F32, &device()).unwrap());
        assert!(lion(&p, &g, &p, &HYPER).is_err());
        assert!(lion(&p, &p, &m, &HYPER).is_err());
        assert!(lion(&p, &g.narrow(0, 0, 3).unwrap(), &m, &HYPER).is_err());
        lion(&p, &g, &m, &HYPER).unwrap();
    }
}
