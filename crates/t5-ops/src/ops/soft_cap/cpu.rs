//! The cap on the CPU, in place.

use candle_core::{Result, Tensor};

use crate::parallel::{Shared, for_each_rows};
use crate::storage::{Element, View, update, with_element};
use crate::vector::{tanh, vectorized};

pub(super) fn soft_cap(x: Tensor, cap: f64) -> Result<Tensor> {
    with_element!(x.dtype(), T, {
        update::<T, _>("soft_cap", &x, &[], |x| {
            let (len, x) = (x.len(), Shared::new(x));
            for_each_rows(len, 1, |part| {
                // SAFETY: each element belongs to one part.
                apply(unsafe { x.slice(part.start, part.len()) }, 1.0, cap as f32);
            });
            Ok(())
        })?;
    });
    Ok(x)
}

pub(super) fn soft_cap_backward(x: &Tensor, dy: Tensor, cap: f64) -> Result<Tensor> {
    let view = View::new(x)?;
    with_element!(x.dtype(), T, {
        let x = view.slice::<T>()?;
        update::<T, _>("soft_cap_backward", &dy, &[], |dy| {
            let (len, dy) = (dy.len(), Shared::new(dy));
            for_each_rows(len, 1, |part| {
                // SAFETY: each element belongs to one part.
                backward(&x[part.clone()], unsafe { dy.slice(part.start, part.len()) }, cap as f32);
            });
            Ok(())
        })?;
    });
    drop(view);
    Ok(dy)
}

vectorized! {
    /// `x` becomes `cap tanh(scale x / cap)`.
    pub(crate) fn apply<T: Element>(x: &mut [T], scale: f32, cap: f32) {
        let inner = scale / cap;
        for x in x {
            *x = T::from_f32(cap * tanh(x.to_f32() * inner));
        }
    }

    /// Multiplies gradients of capped values by the derivative of the cap, `1 - (capped / cap)²`.
    pub(crate) fn apply_slope<T: Element>(capped: &[f32], cap: f32, gradients: &mut [T]) {
        let (inverse, capped) = (1.0 / cap, &capped[..gradients.len()]);
        for i in 0..gradients.len() {
            let t = capped[i] * inverse;
            gradients[i] = T::from_f32(gradients[i].to_f32() * (1.0 - t * t));
        }
    }

    fn backward<T: Element>(x: &[T], dy: &mut [T], cap: f32) {
        let (inverse, x) = (1.0 / cap, &x[..dy.len()]);
        for i in 0..dy.len() {
            let t = tanh(x[i].to_f32() * inverse);
            dy[i] = T::from_f32(dy[i].to_f32() * (1.0 - t * t));
        }
    }
}
