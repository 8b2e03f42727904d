//! The activation on the CPU, sixteen channels at a time.

use candle_core::{Result, Tensor, bail};
use tensor_storage::share_storage;

use super::Activation;
use crate::dispatch::rows_and_width;
use crate::ops::dropout::Dropout;
use crate::parallel::{Shared, for_each_rows};
use crate::random_mask::RowMask;
use crate::simd::{Lanes, Simd, WIDTH, padded, simd};

use crate::storage::{View, filled, update, with_element};

pub(super) fn feed_forward_activation(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
) -> Result<Tensor> {
    let (rows, width) = rows_and_width("feed_forward_activation", "gate", gate)?;
    let positions = positions(gate);
    let (gate, up) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?);
    let (gate_view, up_view) = (View::new(&gate)?, up.as_ref().map(View::new).transpose()?);
    with_element!(gate.dtype(), T, {
        let gate_data = gate_view.slice::<T>()?;
        let up_data = up_view.as_ref().map(|view| view.slice::<T>()).transpose()?;
        filled::<T>(gate.shape(), |h| {
            let h = Shared::new(h);
            for_each_rows(rows, width, |rows| {
                for row in rows {
                    let range = row * width..(row + 1) * width;
                    let mask = d.map(|d| d.row_mask(row / positions, row % positions));
                    let up = up_data.map(|up| &up[range.clone()]);
                    // SAFETY: each row belongs to one part.
                    let h = unsafe { h.slice(range.start, width) };
                    let gate = &gate_data[range];
                    match a {
                        Activation::Relu => forward::<T, Relu>(gate, up, mask, h),
                        Activation::GeluNew => forward::<T, GeluNew>(gate, up, mask, h),
                        Activation::Gelu => forward::<T, Gelu>(gate, up, mask, h),
                        Activation::Silu => forward::<T, Silu>(gate, up, mask, h),
                    }
                }
            });
            Ok(())
        })
    })
}

/// In place: the forward's result goes to the memory of `gate`, the gradient of `gate` to the memory of `dh`, and the gradient of `up` to
/// its own.
pub(super) fn feed_forward_activation_backward(
    gate: Tensor,
    up: Option<Tensor>,
    a: Activation,
    d: Option<&Dropout>,
    dh: Tensor,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    const OP: &str = "feed_forward_activation_backward";
    let (rows, width) = rows_and_width(OP, "gate", &gate)?;
    let positions = positions(&gate);
    let (gate, up, dh) = (gate.contiguous()?, up.map(|up| up.contiguous()).transpose()?, dh.contiguous()?);
    if up.as_ref().is_some_and(|up| share_storage(up, &dh)) {
        bail!("{OP}: expected gate, up and dh in separate storage")
    }
    let others: Vec<&Tensor> = up.iter().chain([&dh]).collect();
    with_element!(gate.dtype(), T, {
        update::<T, _>(OP, &gate, &others, |gate| {
            update::<T, _>(OP, &dh, &[], |dh| {
                let (gate, dh) = (Shared::new(gate), Shared::new(dh));
                let run = |up: Option<Shared<T>>| {
                    for_each_rows(rows, width, |rows| {
                        for row in rows {
                            let start = row * width;
                            let mask = d.map(|d| d.row_mask(row / positions, row % positions));
                            // SAFETY: each row belongs to one part.
                            let (gate, dh) = unsafe { (gate.slice(start, width), dh.slice(start, width)) };
                            // SAFETY: as above.
                            let up = up.map(|up| unsafe { up.slice(start, width) });
                            match a {
                                Activation::Relu => backward::<T, Relu>(gate, up, mask, dh),
                                Activation::GeluNew => backward::<T, GeluNew>(gate, up, mask, dh),
                                Activation::Gelu => backward::<T, Gelu>(gate, up, mask, dh),
                                Activation::Silu => backward::<T, Silu>(gate, up, mask, dh),
                            }
                        }
                    });
                };
                match &up {
                    None => run(None),
                    Some(up) => update::<T, _>(OP, up, &[], |up| {
                        run(Some(Shared::new(up)));
                        Ok(())
                    })?,
                }
                Ok(())
            })
        })?
    });
    Ok((gate, dh, up))
}

/// The length T of (B, T, F). Another shape has no dropout, which alone needs the length.
fn positions(gate: &Tensor) -> usize {
    gate.dims3().map_or(1, |(_, positions, _)| positions.max(1))
}

/// An activation function with its derivative.
trait Curve {
    /// The values and the derivatives at `x`.
    fn at<S: Simd>(s: S, x: S::F) -> (S::F, S::F);
}

struct Relu;
struct GeluNew;
struct Gelu;
struct Silu;

impl Curve for Relu {
    #[inline(always)]
    fn at<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
        // NaN stays NaN.
        (s.max(s.splat(0.0), x), s.where_set(s.positive(x), s.splat(1.0)))
    }
}

impl Curve for GeluNew {
    /// x (1 + tanh u) / 2 = x s(2u), with the logistic function s and u = sqrt(2/pi) (x + 0.044715 x³).
    #[inline(always)]
    fn at<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
        const A: f32 = 1.595_769; // 2 sqrt(2/pi)
        const B: f32 = 0.044_715;
        let (one, square) = (s.splat(1.0), s.mul(x, x));
        let sigmoid = sigmoid(s, s.mul(s.mul(s.splat(A), x), s.mul_add(s.splat(B), square, one)));
        let value = s.mul(x, sigmoid);
        let inner = s.mul(s.splat(A), s.mul_add(s.splat(3.0 * B), square, one));
        (value, s.mul_add(s.mul(value, s.sub(one, sigmoid)), inner, sigmoid))
    }
}

impl Curve for Gelu {
    #[inline(always)]
    fn at<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
        const DENSITY: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
        let cdf = normal_cdf(s, x);
        let density = s.mul(s.splat(DENSITY), s.exp(s.mul(s.splat(-0.5), s.mul(x, x))));
        (s.mul(x, cdf), s.mul_add(x, density, cdf))
    }
}

impl Curve for Silu {
    #[inline(always)]
    fn at<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
        let (one, sigmoid) = (s.splat(1.0), sigmoid(s, x));
        (s.mul(x, sigmoid), s.mul(sigmoid, s.mul_add(x, s.sub(one, sigmoid), one)))
    }
}

/// The logistic function 1 / (1 + e^-x).
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, s.exp(s.sub(s.splat(0.0), x))))
}

/// The cumulative distribution of the standard normal, to 1e-7 (Abramowitz and Stegun 7.1.26).
#[inline(always)]
fn normal_cdf<S: Simd>(s: S, x: S::F) -> S::F {
    let (one, z) = (s.splat(1.0), s.mul(s.abs(x), s.splat(std::f32::consts::FRAC_1_SQRT_2)));
    let t = s.div(one, s.mul_add(s.splat(0.327_591_1), z, one));
    let p = s.splat(1.061_405_4);
    let p = s.mul_add(p, t, s.splat(-1.453_152));
    let p = s.mul_add(p, t, s.splat(1.421_413_8));
    let p = s.mul_add(p, t, s.splat(-0.284_496_74));
    let p = s.mul_add(p, t, s.splat(0.254_829_6));
    let gauss = s.exp(s.sub(s.splat(0.0), s.mul(z, z)));
    let tail = s.mul(s.mul(s.splat(0.5), s.mul(p, t)), gauss);
    // The tail if x is negative, and 1 minus the tail otherwise.
    let rest = s.where_set(s.positive(x), s.sub(one, s.add(tail, tail)));
    s.add(tail, rest)
}

#[inline(always)]
fn masked<S: Simd>(s: S, keep: &Option<(S::Keep, S::F)>, first: usize, x: S::F) -> S::F {
    match *keep {
        None => x,
        Some((keep, scale)) => s.where_set(s.keeps(keep, first), s.mul(x, scale)),
    }
}

#[inline(always)]
#[allow(clippy::manual_map, reason = "`map` takes a closure, which would lack the instruction set")]
fn keep_of<S: Simd>(s: S, mask: Option<RowMask>) -> Option<(S::Keep, S::F)> {
    match mask {
        None => None,
        Some(mask) => Some((s.mask(mask), s.splat(mask.scale()))),
    }
}

/// The result for sixteen elements.
#[inline(always)]
fn forward_lanes<S: Simd, T: Lanes, C: Curve>(
    s: S,
    gate: &[T; WIDTH],
    up: Option<&[T; WIDTH]>,
    keep: &Option<(S::Keep, S::F)>,
    first: usize,
    h: &mut [T; WIDTH],
) {
    let value = C::at(s, T::load(s, gate)).0;
    let product = match up {
        None => value,
        Some(up) => s.mul(value, T::load(s, up)),
    };
    T::store(s, masked(s, keep, first, product), h);
}

/// The result and the gradients of sixteen elements, in place.
#[inline(always)]
fn backward_lanes<S: Simd, T: Lanes, C: Curve>(
    s: S,
    gate: &mut [T; WIDTH],
    up: Option<&mut [T; WIDTH]>,
    keep: &Option<(S::Keep, S::F)>,
    first: usize,
    dh: &mut [T; WIDTH],
) {
    let (value, slope) = C::at(s, T::load(s, gate));
    let d = T::load(s, dh);
    // One mask for both: computing the flags costs the most.
    let (value, d) = match *keep {
        None => (value, d),
        Some((keep, scale)) => {
            let kept = s.keeps(keep, first);
            (s.where_set(kept, value), s.where_set(kept, s.mul(d, scale)))
        }
    };
    let scale = match *keep {
        None => s.splat(1.0),
        Some((_, scale)) => scale,
    };
    match up {
        None => {
            T::store(s, s.mul(value, scale), gate);
            T::store(s, s.mul(d, slope), dh);
        }
        Some(up) => {
            let factor = T::load(s, up);
            T::store(s, s.mul(s.mul(value, factor), scale), gate);
            T::store(s, s.mul(s.mul(d, factor), slope), dh);
            T::store(s, s.mul(d, value), up);
        }
    }
}

simd! {
    fn forward<S, T: Lanes, C: Curve>(s, gate: &[T], up: Option<&[T]>, mask: Option<RowMask>, h: &mut [T]) {
        let (keep, n, zero) = (keep_of(s, mask), h.len(), T::from_f32(0.0));
        let (gate, gate_rest) = gate[..n].as_chunks::<WIDTH>();
        let up = up.map(|up| up[..n].as_chunks::<WIDTH>());
        let (h, h_rest) = h.as_chunks_mut::<WIDTH>();
        for (i, (gate, h)) in gate.iter().zip(h).enumerate() {
            forward_lanes::<S, T, C>(s, gate, up.map(|(up, _)| &up[i]), &keep, i * WIDTH, h);
        }
        if !h_rest.is_empty() {
            let (rest, mut last) = (h_rest.len(), [zero; WIDTH]);
            let up = up.map(|(_, up)| padded(up, zero));
            forward_lanes::<S, T, C>(s, &padded(gate_rest, zero), up.as_ref(), &keep, n - rest, &mut last);
            h_rest.copy_from_slice(&last[..rest]);
        }
    }

    /// See [`feed_forward_activation_backward`].
    fn backward<S, T: Lanes, C: Curve>(
        s,
        gate: &mut [T],
        up: Option<&mut [T]>,
        mask: Option<RowMask>,
        dh: &mut [T],
    ) {
        let (keep, n, zero) = (keep_of(s, mask), dh.len(), T::from_f32(0.0));
        let (gate, gate_rest) = gate[..n].as_chunks_mut::<WIDTH>();
        let mut up = up.map(|up| up[..n].as_chunks_mut::<WIDTH>());
        let (dh, dh_rest) = dh.as_chunks_mut::<WIDTH>();
        for (i, (gate, dh)) in gate.iter_mut().zip(dh).enumerate() {
            let up = up.as_mut().map(|(up, _)| &mut up[i]);
            backward_lanes::<S, T, C>(s, gate, up, &keep, i * WIDTH, dh);
        }
        if !dh_rest.is_empty() {
            let rest = dh_rest.len();
            let (mut last_gate, mut last_dh) = (padded(gate_rest, zero), padded(dh_rest, zero));
            let mut last_up = up.as_ref().map(|(_, up)| padded(up, zero));
            backward_lanes::<S, T, C>(s, &mut last_gate, last_up.as_mut(), &keep, n - rest, &mut last_dh);
            gate_rest.copy_from_slice(&last_gate[..rest]);
            dh_rest.copy_from_slice(&last_dh[..rest]);
            if let (Some((_, up)), Some(last)) = (up, last_up) {
                up.copy_from_slice(&last[..rest]);
            }
        }
    }
}
