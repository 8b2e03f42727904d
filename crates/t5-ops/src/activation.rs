//! The feed-forward's activation with its gate and dropout: `h = dropout(act(gate) * up)`.
//!
//! T5 v1.1 is gated (`up` is the second projection); v1.0 is not (`up` is `None`, `h = dropout(act(gate))`).
//!
//! Shapes: gate, up, h, dh (B, T, F).

use candle_core::{Result, Tensor};

use crate::dispatch::{check_shape, has_kernel};
use crate::dropout::{Dropout, active, batch_rows_width};

/// The activation functions that T5 configurations name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`: T5 v1.0.
    Relu,
    /// The tanh form of GELU, transformers' `gelu_new` (Hendrycks and Gimpel 2016): T5 v1.1.
    GeluNew,
    /// GELU with the error function.
    Gelu,
    /// `x * sigmoid(x)`.
    Silu,
}

/// `dropout(act(gate) * up)` in the dtype of `gate`.
pub fn feed_forward_activation(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
) -> Result<Tensor> {
    let _span = tracing::debug_span!("feed_forward_activation").entered();
    let d = check("feed_forward_activation", gate, up, d)?;
    if has_kernel(&[gate]) && same_dtype(gate, up) {
        kernel::feed_forward_activation(gate, up, a, d)
    } else {
        reference::feed_forward_activation(gate, up, a, d)
    }
}

/// The gradients with respect to `gate` and `up`. `d` as in the forward.
pub fn feed_forward_activation_backward(
    gate: &Tensor,
    up: Option<&Tensor>,
    a: Activation,
    d: Option<&Dropout>,
    dh: &Tensor,
) -> Result<(Tensor, Option<Tensor>)> {
    let _span = tracing::debug_span!("feed_forward_activation_backward").entered();
    let d = check("feed_forward_activation_backward", gate, up, d)?;
    check_shape("feed_forward_activation_backward", "dh", dh, gate.dims())?;
    if has_kernel(&[gate]) && same_dtype(gate, up) && same_dtype(gate, Some(dh)) {
        kernel::feed_forward_activation_backward(gate, up, a, d, dh)
    } else {
        reference::feed_forward_activation_backward(gate, up, a, d, dh)
    }
}

fn same_dtype(gate: &Tensor, other: Option<&Tensor>) -> bool {
    other.is_none_or(|other| other.dtype() == gate.dtype() && other.device().is_cpu())
}

fn check<'a>(
    op: &str,
    gate: &Tensor,
    up: Option<&Tensor>,
    d: Option<&'a Dropout<'a>>,
) -> Result<Option<&'a Dropout<'a>>> {
    if let Some(up) = up {
        check_shape(op, "up", up, gate.dims())?;
    }
    match d {
        None => Ok(None),
        Some(d) => active(op, Some(d), batch_rows_width(op, gate)?.0),
    }
}

mod kernel {
    use candle_core::{Result, Tensor};

    use super::Activation;
    use crate::dispatch::rows_and_width;
    use crate::dropout::{Dropout, RowMask};
    use crate::parallel::{Shared, for_each_rows};
    use crate::storage::{Element, View, filled, with_element};
    use crate::vector::{exp, normal_cdf, sigmoid, vectorized};

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

    pub(super) fn feed_forward_activation_backward(
        gate: &Tensor,
        up: Option<&Tensor>,
        a: Activation,
        d: Option<&Dropout>,
        dh: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (rows, width) = rows_and_width("feed_forward_activation_backward", "gate", gate)?;
        let positions = positions(gate);
        let (gate, up, dh) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?, dh.contiguous()?);
        let (gate_view, up_view) = (View::new(&gate)?, up.as_ref().map(View::new).transpose()?);
        let dh_view = View::new(&dh)?;
        with_element!(gate.dtype(), T, {
            let (gate_data, dh_data) = (gate_view.slice::<T>()?, dh_view.slice::<T>()?);
            let up_data = up_view.as_ref().map(|view| view.slice::<T>()).transpose()?;
            let mut dup = None;
            let dgate = filled::<T>(gate.shape(), |dgate| {
                let dgate = Shared::new(dgate);
                let run = |dup: Option<Shared<T>>| {
                    for_each_rows(rows, width, |rows| {
                        for row in rows {
                            let range = row * width..(row + 1) * width;
                            let mask = d.map(|d| d.row_mask(row / positions, row % positions));
                            // SAFETY: each row belongs to one part.
                            let dgate = unsafe { dgate.slice(range.start, width) };
                            let up = up_data.zip(dup).map(|(up, dup)| {
                                // SAFETY: as above.
                                (&up[range.clone()], unsafe { dup.slice(range.start, width) })
                            });
                            let (gate, dh) = (&gate_data[range.clone()], &dh_data[range]);
                            match a {
                                Activation::Relu => backward::<T, Relu>(gate, up, mask, dh, dgate),
                                Activation::GeluNew => backward::<T, GeluNew>(gate, up, mask, dh, dgate),
                                Activation::Gelu => backward::<T, Gelu>(gate, up, mask, dh, dgate),
                                Activation::Silu => backward::<T, Silu>(gate, up, mask, dh, dgate),
                            }
                        }
                    });
                };
                if up_data.is_some() {
                    dup = Some(filled::<T>(gate.shape(), |dup| {
                        run(Some(Shared::new(dup)));
                        Ok(())
                    })?);
                } else {
                    run(None);
                }
                Ok(())
            })?;
            Ok((dgate, dup))
        })
    }

    /// The length T of (B, T, F); anything else has no dropout, for which alone it matters.
    fn positions(gate: &Tensor) -> usize {
        gate.dims3().map_or(1, |(_, positions, _)| positions.max(1))
    }

    /// An activation function with its derivative.
    trait Curve {
        /// The value and the derivative at `x`.
        fn at(x: f32) -> (f32, f32);
    }

    struct Relu;
    struct GeluNew;
    struct Gelu;
    struct Silu;

    impl Curve for Relu {
        #[inline(always)]
        fn at(x: f32) -> (f32, f32) {
            // Written so that NaN stays NaN.
            if x <= 0.0 { (0.0, 0.0) } else { (x, 1.0) }
        }
    }

    impl Curve for GeluNew {
        /// x (1 + tanh u) / 2 = x s(2u), with the logistic function s and u = sqrt(2/pi) (x + 0.044715 x³).
        #[inline(always)]
        fn at(x: f32) -> (f32, f32) {
            const A: f32 = 1.595_769; // 2 sqrt(2/pi)
            const B: f32 = 0.044_715;
            let s = sigmoid(A * (x + B * x * x * x));
            (x * s, s + x * s * (1.0 - s) * A * (1.0 + 3.0 * B * x * x))
        }
    }

    impl Curve for Gelu {
        #[inline(always)]
        fn at(x: f32) -> (f32, f32) {
            const DENSITY: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
            let cdf = normal_cdf(x);
            (x * cdf, cdf + x * DENSITY * exp(-0.5 * x * x))
        }
    }

    impl Curve for Silu {
        #[inline(always)]
        fn at(x: f32) -> (f32, f32) {
            let s = sigmoid(x);
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
    }

    vectorized! {
        fn forward<T: Element, C: Curve>(gate: &[T], up: Option<&[T]>, mask: Option<RowMask>, h: &mut [T]) {
            let n = h.len();
            let gate = &gate[..n];
            match (up, mask) {
                (None, None) => for i in 0..n {
                    h[i] = T::from_f32(C::at(gate[i].to_f32()).0);
                },
                (None, Some(mask)) => for i in 0..n {
                    h[i] = T::from_f32(C::at(gate[i].to_f32()).0 * mask.factor(i));
                },
                (Some(up), None) => for (i, up) in up[..n].iter().enumerate() {
                    h[i] = T::from_f32(C::at(gate[i].to_f32()).0 * up.to_f32());
                },
                (Some(up), Some(mask)) => for (i, up) in up[..n].iter().enumerate() {
                    h[i] = T::from_f32(C::at(gate[i].to_f32()).0 * up.to_f32() * mask.factor(i));
                },
            }
        }

        fn backward<T: Element, C: Curve>(
            gate: &[T],
            up: Option<(&[T], &mut [T])>,
            mask: Option<RowMask>,
            dh: &[T],
            dgate: &mut [T],
        ) {
            let n = dgate.len();
            let (gate, dh) = (&gate[..n], &dh[..n]);
            match (up, mask) {
                (None, None) => for i in 0..n {
                    dgate[i] = T::from_f32(dh[i].to_f32() * C::at(gate[i].to_f32()).1);
                },
                (None, Some(mask)) => for i in 0..n {
                    dgate[i] = T::from_f32(dh[i].to_f32() * mask.factor(i) * C::at(gate[i].to_f32()).1);
                },
                (Some((up, dup)), None) => {
                    let (up, dup) = (&up[..n], &mut dup[..n]);
                    for i in 0..n {
                        let (value, slope) = C::at(gate[i].to_f32());
                        dgate[i] = T::from_f32(dh[i].to_f32() * up[i].to_f32() * slope);
                        dup[i] = T::from_f32(dh[i].to_f32() * value);
                    }
                }
                (Some((up, dup)), Some(mask)) => {
                    let (up, dup) = (&up[..n], &mut dup[..n]);
                    for i in 0..n {
                        let (value, slope) = C::at(gate[i].to_f32());
                        let dh = dh[i].to_f32() * mask.factor(i);
                        dgate[i] = T::from_f32(dh * up[i].to_f32() * slope);
                        dup[i] = T::from_f32(dh * value);
                    }
                }
            }
        }
    }
}

pub(crate) mod reference {
    use std::f64::consts::PI;

    use candle_core::{Result, Tensor};

    use super::Activation;
    use crate::dispatch::wide;
    use crate::dropout::Dropout;
    use crate::dropout::reference::dropout;

    /// See [`crate::feed_forward_activation`].
    pub fn feed_forward_activation(
        gate: &Tensor,
        up: Option<&Tensor>,
        a: Activation,
        d: Option<&Dropout>,
    ) -> Result<Tensor> {
        let activated = activate(&wide(gate)?, a)?;
        let h = match up {
            Some(up) => (activated * wide(up)?)?,
            None => activated,
        };
        dropout(&h, d)?.to_dtype(gate.dtype())
    }

    /// See [`crate::feed_forward_activation_backward`].
    pub fn feed_forward_activation_backward(
        gate: &Tensor,
        up: Option<&Tensor>,
        a: Activation,
        d: Option<&Dropout>,
        dh: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let dh = dropout(&wide(dh)?, d)?;
        let wide_gate = wide(gate)?;
        let slope = slope(&wide_gate, a)?;
        match up {
            None => Ok(((dh * slope)?.to_dtype(gate.dtype())?, None)),
            Some(up) => {
                let dgate = ((&dh * wide(up)?)? * slope)?;
                let dup = (dh * activate(&wide_gate, a)?)?;
                Ok((dgate.to_dtype(gate.dtype())?, Some(dup.to_dtype(up.dtype())?)))
            }
        }
    }

    fn activate(x: &Tensor, a: Activation) -> Result<Tensor> {
        match a {
            Activation::Relu => x.relu(),
            Activation::GeluNew => x * ((tanh_argument(x)?.tanh()? + 1.0)? * 0.5)?,
            Activation::Gelu => x * normal_cdf(x)?,
            Activation::Silu => x * sigmoid(x)?,
        }
    }

    /// The derivative of the activation at `x`.
    fn slope(x: &Tensor, a: Activation) -> Result<Tensor> {
        match a {
            Activation::Relu => x.gt(0.0)?.to_dtype(x.dtype()),
            Activation::GeluNew => {
                // With t = tanh(u(x)): (1 + t) / 2 + x (1 - t²) u'(x) / 2.
                let t = tanh_argument(x)?.tanh()?;
                let du = ((x.sqr()? * (3.0 * 0.044715))? + 1.0)?.affine((2.0 / PI).sqrt(), 0.0)?;
                let curved = ((x * t.sqr()?.affine(-1.0, 1.0)?)? * du)?;
                ((t + 1.0)? + curved)? * 0.5
            }
            Activation::Gelu => {
                let density = (x.sqr()? * -0.5)?.exp()?.affine((2.0 * PI).sqrt().recip(), 0.0)?;
                normal_cdf(x)? + (x * density)?
            }
            Activation::Silu => {
                let s = sigmoid(x)?;
                &s * ((x * s.affine(-1.0, 1.0)?)? + 1.0)?
            }
        }
    }

    fn tanh_argument(x: &Tensor) -> Result<Tensor> {
        (x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / PI).sqrt()
    }

    fn normal_cdf(x: &Tensor) -> Result<Tensor> {
        ((x * 0.5f64.sqrt())?.erf()? + 1.0)? * 0.5
    }

    fn sigmoid(x: &Tensor) -> Result<Tensor> {
        (x.neg()?.exp()? + 1.0)?.recip()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{Numbers, assert_close, autograd, check_gradient, tolerance, values, weighted};

    const ALL: [Activation; 4] = [Activation::Relu, Activation::GeluNew, Activation::Gelu, Activation::Silu];

    fn place(samples: &[u32]) -> Dropout<'_> {
        Dropout { probability: 0.25, seed: 1, step: 2, site: 3, samples }
    }

    #[test]
    fn values_are_those_of_pytorch() {
        // torch.nn.functional of [-3, -0.5, 0, 0.5, 3].
        let x = Tensor::new(&[-3f64, -0.5, 0.0, 0.5, 3.0], &Device::Cpu).unwrap();
        let expected = [
            (Activation::Relu, [0.0, 0.0, 0.0, 0.5, 3.0]),
            (Activation::GeluNew, [-0.00363739, -0.15428599, 0.0, 0.34571401, 2.99636261]),
            (Activation::Gelu, [-0.00404969, -0.15426877, 0.0, 0.34573123, 2.99595031]),
            (Activation::Silu, [-0.14227762, -0.18877033, 0.0, 0.31122967, 2.85772238]),
        ];
        for (a, expected) in expected {
            for dtype in [DType::F64, DType::F32] {
                let got = values(&feed_forward_activation(&x.to_dtype(dtype).unwrap(), None, a, None).unwrap());
                for (got, expected) in got.iter().zip(expected) {
                    assert!((got - expected).abs() < 5e-7, "{a:?} {dtype:?}: expected {expected}, got {got}");
                }
            }
        }
    }

    #[test]
    fn the_reference_agrees_with_finite_differences_and_autograd() {
        let mut numbers = Numbers::new(11);
        let shape = [2, 3, 5];
        let [gate, up, dh] = [0; 3].map(|_| numbers.tensor(&shape, DType::F64));
        for a in ALL {
            for d in [None, Some(&place(&[4, 5]))] {
                let what = format!("{a:?}");
                let (dgate, dup) = feed_forward_activation_backward(&gate, Some(&up), a, d, &dh).unwrap();
                let dup = dup.unwrap();
                let value = |gate: &Tensor, up: &Tensor| weighted(&feed_forward_activation(gate, Some(up), a, d)?, &dh);
                check_gradient(&what, &gate, &dgate, |gate| value(gate, &up));
                check_gradient(&what, &up, &dup, |up| value(&gate, up));
                let expected =
                    autograd(&[&gate, &up], &dh, |t| reference::feed_forward_activation(&t[0], Some(&t[1]), a, d));
                assert_close(&what, &dgate, &expected[0], 1e-9);
                assert_close(&what, &dup, &expected[1], 1e-9);
                let (dgate, none) = feed_forward_activation_backward(&gate, None, a, d, &dh).unwrap();
                assert!(none.is_none());
                check_gradient(&what, &gate, &dgate, |gate| weighted(&feed_forward_activation(gate, None, a, d)?, &dh));
            }
        }
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        for shape in [[1, 1, 1], [2, 7, 65], [2, 100, 96]] {
            for dtype in [DType::F32, DType::BF16] {
                let mut numbers = Numbers::new(12);
                let [gate, up, dh] =
                    [0; 3].map(|_| (numbers.tensor(&shape, DType::F32) * 4.0).unwrap().to_dtype(dtype).unwrap());
                let samples = [4, 5];
                let d = place(&samples[..shape[0]]);
                for a in ALL {
                    for d in [None, Some(&d)] {
                        for up in [None, Some(&up)] {
                            let what = format!("{shape:?} {dtype:?} {a:?}");
                            let h = feed_forward_activation(&gate, up, a, d).unwrap();
                            let expected = reference::feed_forward_activation(&gate, up, a, d).unwrap();
                            assert_close(&what, &h, &expected, tolerance(dtype));
                            let got = feed_forward_activation_backward(&gate, up, a, d, &dh).unwrap();
                            let expected = reference::feed_forward_activation_backward(&gate, up, a, d, &dh).unwrap();
                            assert_close(&what, &got.0, &expected.0, tolerance(dtype));
                            if let (Some(got), Some(expected)) = (got.1, expected.1) {
                                assert_close(&what, &got, &expected, tolerance(dtype));
                            }
                        }
                    }
                }
            }
        }
    }
}
