//! Sixteen lanes of f32 for the kernels in which every instruction counts.
//!
//! A kernel is written once over [`Simd`] and compiled for each instruction set by [`simd!`](simd): sixteen lanes are one
//! register of AVX-512, two of AVX2, four of NEON, and elsewhere an array. Results differ between instruction sets in the
//! last places: products are fused with sums where the machine can.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

use half::{bf16, f16};

use crate::random_mask::RowMask;
use crate::storage::Element;

/// Lanes of a vector.
pub(crate) const WIDTH: usize = 16;

/// Operations on sixteen lanes. A value of an implementor stands for the right to use its instructions.
pub(crate) trait Simd: Copy {
    /// The number of sums of sixteen f32 that fit into registers, beside the terms of the sums.
    const SUMS: usize;

    /// Sixteen f32.
    type F: Copy;
    /// Sixteen flags.
    type M: Copy;
    /// The mask of a row of dropout, ready for queries.
    type Keep: Copy;
    /// Sixteen f32 to choose from.
    type Table: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; WIDTH]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; WIDTH]);
    fn load_bf16(self, x: &[bf16; WIDTH]) -> Self::F;
    fn load_f16(self, x: &[f16; WIDTH]) -> Self::F;
    /// Signed bytes.
    fn load_i8(self, x: &[u8; WIDTH]) -> Self::F;
    fn table(self, values: &[f32; 16]) -> Self::Table;
    /// Values of a table by their places in it: two in a byte, the first in its upper half.
    fn look_up(self, table: Self::Table, places: &[u8; WIDTH / 2]) -> Self::F;
    /// Rounds to nearest, ties to even.
    fn store_bf16(self, x: Self::F, to: &mut [bf16; WIDTH]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a b + c`.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// Where `x` is not zero or less, NaN included.
    fn positive(self, x: Self::F) -> Self::M;
    /// The larger lane; `b` if one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// e^x to about 2 units in the last place; 0 far below and large or infinite above the range, NaN for NaN.
    fn exp(self, x: Self::F) -> Self::F;
    /// The sum of the lanes, pairwise.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane.
    fn largest(self, x: Self::F) -> f32;
    fn mask(self, mask: RowMask) -> Self::Keep;
    /// Which of the elements from channel `first`, a multiple of [`WIDTH`], on are kept.
    fn keeps(self, keep: Self::Keep, first: usize) -> Self::M;
    /// `x` where the flag is set, zero elsewhere.
    fn where_set(self, flags: Self::M, x: Self::F) -> Self::F;
}

/// Elements that sixteen lanes are loaded from and stored to.
pub(crate) trait Lanes: Element {
    fn load<S: Simd>(s: S, x: &[Self; WIDTH]) -> S::F;
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; WIDTH]);
}

impl Lanes for f32 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; WIDTH]) -> S::F {
        s.load(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; WIDTH]) {
        s.store(x, to);
    }
}

impl Lanes for bf16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; WIDTH]) -> S::F {
        s.load_bf16(x)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::F, to: &mut [Self; WIDTH]) {
        s.store_bf16(x, to);
    }
}

/// The value of an f16, without a branch and without arithmetic on denormal numbers, which is slow.
#[inline(always)]
pub(crate) fn f16_to_f32(x: f16) -> f32 {
    const EXPONENT: u32 = 0x7C00 << 13;
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & 0x7FFF) << 13;
    let exponent = magnitude & EXPONENT;
    // From the bias of one exponent to that of the other; infinities and NaN have the largest of both.
    let rebiased = magnitude + ((127 - 15) << 23);
    let special = rebiased + ((128 - 16) << 23);
    let denormal = f32::from_bits(rebiased + (1 << 23)) - f32::from_bits(113 << 23);
    let value = if exponent == EXPONENT { special } else { rebiased };
    let value = if exponent == 0 { denormal.to_bits() } else { value };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

/// Code `place` of two a byte.
#[inline(always)]
pub(crate) fn code_at(codes: &[u8], place: usize) -> usize {
    usize::from(codes[place / 2] >> if place.is_multiple_of(2) { 4 } else { 0 } & 0xF)
}

/// Up to sixteen elements, filled up with `fill`.
#[inline(always)]
pub(crate) fn padded<T: Copy>(x: &[T], fill: T) -> [T; WIDTH] {
    let mut all = [fill; WIDTH];
    all[..x.len()].copy_from_slice(x);
    all
}

/// Defines functions over [`Simd`] that are compiled for each instruction set, and dispatch at run time. The first
/// generic parameter and the first argument are the instruction set; callers do not name them.
macro_rules! simd {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident <$simd:ident $(, $generic:ident : $bound:path)*> (
            $token:ident, $($arg:ident : $ty:ty),* $(,)?
        ) $(-> $ret:ty)? $body:block
    )+) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name <$($generic: $bound),*> ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body <$simd: $crate::simd::Simd $(, $generic: $bound)*> ($token: $simd, $($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                use $crate::simd::{Avx2, Avx512};
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
                fn avx512bf16 <$($generic: $bound),*> ($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function is compiled for the instructions, and called where they are.
                    body::<Avx512<true> $(, $generic)*>(unsafe { Avx512::<true>::new() }, $($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512 <$($generic: $bound),*> ($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    body::<Avx512<false> $(, $generic)*>(unsafe { Avx512::<false>::new() }, $($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2 <$($generic: $bound),*> ($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    body::<Avx2 $(, $generic)*>(unsafe { Avx2::new() }, $($arg),*)
                }
                match $crate::isa::isa() {
                    $crate::isa::Isa::SoftwareTiles | $crate::isa::Isa::Portable => {}
                    // SAFETY: `isa` names only instruction sets that this machine was found to have.
                    $crate::isa::Isa::Avx2 => return unsafe { avx2::<$($generic),*>($($arg),*) },
                    // SAFETY: as above.
                    $crate::isa::Isa::Avx512 => return unsafe { avx512::<$($generic),*>($($arg),*) },
                    // SAFETY: as above; the instruction sets after AVX512-BF16 include it.
                    _ => return unsafe { avx512bf16::<$($generic),*>($($arg),*) },
                }
            }
            #[cfg(target_arch = "aarch64")]
            if $crate::isa::isa() == $crate::isa::Isa::Neon {
                return body::<$crate::simd::Neon $(, $generic)*>($crate::simd::Neon, $($arg),*);
            }
            #[allow(unreachable_code)]
            body::<$crate::simd::Portable $(, $generic)*>($crate::simd::Portable, $($arg),*)
        }
    )+};
}
pub(crate) use simd;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dropout;

    simd! {
        fn exponentials<S>(s, x: &[f32; WIDTH], to: &mut [f32; WIDTH]) {
            s.store(s.exp(s.load(x)), to);
        }

        fn rounded<S>(s, x: &[f32; WIDTH], to: &mut [bf16; WIDTH]) {
            s.store_bf16(s.load(x), to);
        }

        fn flags<S>(s, mask: RowMask, first: usize, to: &mut [f32; WIDTH]) {
            let keep = s.mask(mask);
            s.store(s.where_set(s.keeps(keep, first), s.splat(1.0)), to);
        }

        fn folded<S>(s, x: &[f32; WIDTH]) -> (f32, f32) {
            (s.sum(s.load(x)), s.largest(s.load(x)))
        }
    }

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut to = [0.0; WIDTH];
        for i in -54_000..55_000 {
            let x: [f32; WIDTH] = std::array::from_fn(|lane| (16.0 * i as f32 + lane as f32) / 10_000.0);
            exponentials(&x, &mut to);
            for (got, x) in to.into_iter().zip(x) {
                let expected = f64::from(x).exp();
                assert!((f64::from(got) / expected - 1.0).abs() < 3e-7, "exp({x}): {got}");
            }
        }
        let special = [f32::NEG_INFINITY, -200.0, f32::MIN, 0.0, f32::INFINITY, f32::NAN];
        exponentials(&padded(&special, 0.0), &mut to);
        assert_eq!(to[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(to[4] > 1e38 && to[5].is_nan());
    }

    #[test]
    fn lanes_round_as_elements_do() {
        let mut bits = 7u32;
        let mut to = [bf16::ZERO; WIDTH];
        for _ in 0..20_000 {
            let x: [f32; WIDTH] = std::array::from_fn(|_| {
                bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f32::from_bits(bits)
            });
            rounded(&x, &mut to);
            for (got, x) in to.into_iter().zip(x) {
                let expected = <bf16 as Element>::from_f32(x);
                let same = got == expected || got.is_nan() && x.is_nan();
                // The instruction treats subnormal operands as zero.
                assert!(same || x.abs() < f32::MIN_POSITIVE && f32::from(got) == 0.0, "{x}: {got}");
            }
        }
    }

    #[test]
    fn masks_are_those_of_single_elements() {
        let d = Dropout { probability: 0.3, seed: 5, step: 6, site: 7, samples: &[8] };
        let mut to = [0.0; WIDTH];
        for (position, first) in [(0, 0), (3, 16), (9, 100_016)] {
            flags(d.row_mask(0, position), first, &mut to);
            let mask = d.row_mask(0, position);
            assert_eq!(to, std::array::from_fn(|i| if mask.keeps(first + i) { 1.0 } else { 0.0 }));
        }
    }

    #[test]
    fn every_lane_counts_in_a_sum_and_a_maximum() {
        for lane in 0..WIDTH {
            let mut x = [0.0; WIDTH];
            x[lane] = 3.0;
            assert_eq!(folded(&x), (3.0, 3.0));
        }
    }
}
