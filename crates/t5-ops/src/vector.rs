//! Loops over slices, compiled for several instruction sets and chosen at run time.
//!
//! The crate is compiled for the baseline of its target. [`vectorized!`] compiles a function twice more, for
//! AVX2 and for AVX-512, and its body is plain Rust that the compiler vectorises: fixed-width inner loops
//! over [`LANES`] elements where a sum is to be kept in lanes.

/// Partial sums are kept in this many lanes, in a fixed assignment, on every instruction set.
pub(crate) const LANES: usize = 32;

/// Defines functions whose bodies are compiled for the baseline, AVX2 and AVX-512, and dispatch at run time.
macro_rules! vectorized {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$($generic:ident : $bound:path),+>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )+) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$($generic),+>)? ($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2 $(<$($generic: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$($generic),+>)? ($($arg),*)
                }
                match $crate::isa::isa() {
                    $crate::isa::Isa::SoftwareTiles | $crate::isa::Isa::Portable => {}
                    // SAFETY: `isa` names only instruction sets that this machine was found to have.
                    $crate::isa::Isa::Avx2 => return unsafe { avx2 $(::<$($generic),+>)? ($($arg),*) },
                    // SAFETY: as above; the instruction sets after AVX-512 include it.
                    _ => return unsafe { avx512 $(::<$($generic),+>)? ($($arg),*) },
                }
            }
            #[allow(unreachable_code)]
            body $(::<$($generic),+>)? ($($arg),*)
        }
    )+};
}
pub(crate) use vectorized;

/// e^x to about 2 units in the last place; 0 below and large above the range of f32, NaN for NaN.
///
/// Cephes' `expf`: x = n ln 2 + r, a polynomial in r, then n added to the exponent.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    let clamped = if x < -87.0 { -87.0 } else { x };
    let clamped = if clamped > 88.0 { 88.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = clamped - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5.000_000_3e-1;
    let e = p * r * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000));
    if x < -87.0 { 0.0 } else { e * power }
}

/// The hyperbolic tangent to about 2 units in the last place, NaN for NaN.
///
/// Cephes' `tanhf`: x + x³ P(x²) near zero, and 1 - 2 / (e^2x + 1).
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_908_8e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 1.333_144_3e-1;
    let p = p * z - 3.333_328e-1;
    let near = p * z * x + x;
    let magnitude = x.abs();
    let far = (1.0 - 2.0 / (exp(2.0 * magnitude) + 1.0)).copysign(x);
    if magnitude > 0.625 { far } else { near }
}

/// Adds up lanes pairwise, in a fixed tree: five steps one after the other instead of thirty-one.
///
/// Never inlined: next to this tree the compiler would make scalar code of the loop that filled the lanes.
#[inline(never)]
fn total_of_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Adds up lanes and the terms that did not fill a set of lanes.
#[inline(always)]
fn total(lanes: [f32; LANES], rest: impl Iterator<Item = f32>) -> f32 {
    total_of_lanes(&lanes) + rest.sum::<f32>()
}

/// The sum of `term` over a slice, in lanes.
#[inline(always)]
pub(crate) fn sum<T: Copy>(x: &[T], term: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane]);
        }
    }
    total(lanes, rest.iter().map(|&x| term(x)))
}

/// The sum of `term` over two slices of one length, in lanes.
#[inline(always)]
pub(crate) fn sum_of_two<T: Copy, U: Copy>(x: &[T], y: &[U], term: impl Fn(T, U) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((x_chunks, x_rest), (y_chunks, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane], y[lane]);
        }
    }
    total(lanes, x_rest.iter().zip(y_rest).map(|(&x, &y)| term(x, y)))
}

/// The sum of `term` over three slices of one length, in lanes.
#[inline(always)]
pub(crate) fn sum_of_three<T: Copy>(x: &[T], y: &[T], z: &[f32], term: impl Fn(T, T, f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    let (z_chunks, z_rest) = z.as_chunks::<LANES>();
    for ((x, y), z) in x_chunks.iter().zip(y_chunks).zip(z_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane], y[lane], z[lane]);
        }
    }
    total(lanes, x_rest.iter().zip(y_rest).zip(z_rest).map(|((&x, &y), &z)| term(x, y, z)))
}

vectorized! {
    /// `y += x`.
    pub(crate) fn add(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) / expected - 1.0).abs();
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_accurate_over_its_range() {
        for i in -200_000..200_000 {
            let x = i as f32 / 10_000.0;
            let expected = f64::from(x).tanh();
            let error = (f64::from(tanh(x)) - expected).abs();
            assert!(error <= 3e-7 * expected.abs(), "tanh({x}): {error}");
        }
        assert_eq!([tanh(f32::INFINITY), tanh(-1e30)], [1.0, -1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn a_sum_in_lanes_covers_every_element() {
        for n in [0usize, 1, 31, 32, 33, 100] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let total = (n * n.saturating_sub(1) / 2) as f32;
            assert_eq!(sum(&x, |x| x), total);
            assert_eq!(sum_of_two(&x, &x, |x, y| x + y), 2.0 * total);
            assert_eq!(sum_of_three(&x, &x, &x, |x, y, z| x + y + z), 3.0 * total);
        }
    }
}
