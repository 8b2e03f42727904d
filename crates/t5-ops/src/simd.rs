//! Sixteen lanes of f32 for the kernels in which every instruction counts.
//!
//! A kernel is written once over [`Simd`] and compiled for each instruction set by [`simd!`](simd): with AVX-512
//! the operations are instructions, elsewhere loops over arrays, which the compiler vectorises as it can. Results
//! differ between instruction sets in the last places: products are fused with sums where the machine can.

use half::bf16;

use crate::dropout::RowMask;
use crate::storage::Element;
use crate::vector;

/// Lanes of a vector.
pub(crate) const WIDTH: usize = 16;

/// Operations on sixteen lanes. A value of an implementor stands for the right to use its instructions.
pub(crate) trait Simd: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen flags.
    type M: Copy;
    /// The mask of a row of dropout, ready to be asked.
    type Keep: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; WIDTH]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; WIDTH]);
    fn load_bf16(self, x: &[bf16; WIDTH]) -> Self::F;
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
    /// The larger; `b` where one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// e^x to about 2 units in the last place; 0 far below and large or infinite above the range, NaN for NaN.
    fn exp(self, x: Self::F) -> Self::F;
    /// The sum of the lanes, pairwise.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane.
    fn largest(self, x: Self::F) -> f32;
    fn mask(self, mask: RowMask) -> Self::Keep;
    /// Which of the elements from channel `first` on are kept.
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

/// Up to sixteen elements, filled up with `fill`.
#[inline(always)]
pub(crate) fn padded<T: Copy>(x: &[T], fill: T) -> [T; WIDTH] {
    let mut all = [fill; WIDTH];
    all[..x.len()].copy_from_slice(x);
    all
}

/// Sixteen lanes of any machine.
#[derive(Clone, Copy)]
pub(crate) struct Array;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; WIDTH] {
    std::array::from_fn(f)
}

#[inline(always)]
fn fold(mut x: [f32; WIDTH], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = WIDTH / 2;
    while width > 0 {
        for lane in 0..width {
            x[lane] = f(x[lane], x[lane + width]);
        }
        width /= 2;
    }
    x[0]
}

impl Simd for Array {
    type F = [f32; WIDTH];
    type M = [bool; WIDTH];
    type Keep = RowMask;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; WIDTH]
    }
    #[inline(always)]
    fn load(self, x: &[f32; WIDTH]) -> Self::F {
        *x
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; WIDTH]) {
        *to = x;
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16; WIDTH]) -> Self::F {
        each(|i| Element::to_f32(x[i]))
    }
    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; WIDTH]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = Element::from_f32(x);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        each(|i| x[i].abs())
    }
    #[inline(always)]
    fn positive(self, x: Self::F) -> Self::M {
        x.map(|x| x.is_nan() || x > 0.0)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        each(|i| vector::exp(x[i]))
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        fold(x, |a, b| a + b)
    }
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        fold(x, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn mask(self, mask: RowMask) -> Self::Keep {
        mask
    }
    #[inline(always)]
    fn keeps(self, keep: Self::Keep, first: usize) -> Self::M {
        std::array::from_fn(|i| keep.keeps(first + i))
    }
    #[inline(always)]
    fn where_set(self, flags: Self::M, x: Self::F) -> Self::F {
        each(|i| if flags[i] { x[i] } else { 0.0 })
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Avx512;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256bh, __m256i, __m512, __m512i, __mmask16, _CMP_NLE_UQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC,
        _MM_FROUND_TO_NEAREST_INT, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_abs_ps, _mm512_add_epi32,
        _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
        _mm512_cmpge_epu32_mask, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_div_ps,
        _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_mask_or_epi32, _mm512_maskz_mov_ps, _mm512_max_ps,
        _mm512_min_ps, _mm512_mul_ps, _mm512_mullo_epi32, _mm512_reduce_add_ps, _mm512_reduce_max_ps,
        _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32,
        _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_ps, _mm512_xor_si512,
    };

    use half::bf16;

    use super::{Simd, WIDTH};
    use crate::dropout::{CHANNEL_FACTOR, FIRST_FACTOR, RowMask, SECOND_FACTOR};

    /// AVX-512 (F, BW, DQ, VL), with AVX512-BF16 where `BF16` is true.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512<const BF16: bool>(());

    impl<const BF16: bool> Avx512<BF16> {
        /// # Safety
        ///
        /// The machine has the instructions, and the caller is a function compiled for them.
        #[inline(always)]
        pub(crate) unsafe fn new() -> Self {
            Self(())
        }
    }

    /// A mask: the key's part of each lane, and what a hash is compared with.
    #[derive(Clone, Copy)]
    pub(crate) struct Keep {
        lanes: __m512i,
        high: __m512i,
        threshold: __m512i,
        /// Its upper half.
        upper: __m512i,
    }

    // Every block here is sound because a value of the type was made under the promise of `new`; loads and stores are of
    // arrays of sixteen elements.
    impl<const BF16: bool> Simd for Avx512<BF16> {
        type F = __m512;
        type M = __mmask16;
        type Keep = Keep;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; WIDTH]) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, x: __m512, to: &mut [f32; WIDTH]) {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn load_bf16(self, x: &[bf16; WIDTH]) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe {
                let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
            }
        }
        #[inline(always)]
        fn store_bf16(self, x: __m512, to: &mut [bf16; WIDTH]) {
            // SAFETY: as said above the implementation.
            unsafe {
                let rounded: __m256i = if BF16 {
                    std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
                } else {
                    let bits = _mm512_castps_si512(x);
                    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                    let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                    let sum = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x40_0000));
                    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(sum))
                };
                _mm256_storeu_si256(to.as_mut_ptr().cast(), rounded);
            }
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn abs(self, x: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_abs_ps(x) }
        }
        #[inline(always)]
        fn positive(self, x: __m512) -> __mmask16 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_setzero_ps()) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_max_ps(a, b) }
        }
        /// 2^n 2^r with n + r = x log2(e), n an integer; Cephes' polynomial of `exp2f`.
        #[inline(always)]
        fn exp(self, x: __m512) -> __m512 {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            // log2(e) in two parts.
            const HIGH: f32 = std::f32::consts::LOG2_E;
            const LOW: f32 = 1.925_963e-8;
            // SAFETY: as said above the implementation.
            unsafe {
                // NaN passes: both give their second operand.
                let x = _mm512_min_ps(_mm512_set1_ps(100.0), _mm512_max_ps(_mm512_set1_ps(-110.0), x));
                let n = _mm512_roundscale_ps::<NEAREST>(_mm512_mul_ps(x, _mm512_set1_ps(HIGH)));
                let r = _mm512_fmadd_ps(x, _mm512_set1_ps(LOW), _mm512_fmsub_ps(x, _mm512_set1_ps(HIGH), n));
                let p = _mm512_set1_ps(1.535_336_2e-4);
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339_887_4e-3));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618_437e-3));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550_332_5e-2));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402_264_8e-1));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931_472e-1));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
                _mm512_scalef_ps(p, n)
            }
        }
        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_reduce_add_ps(x) }
        }
        #[inline(always)]
        fn largest(self, x: __m512) -> f32 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_reduce_max_ps(x) }
        }
        #[inline(always)]
        fn mask(self, mask: RowMask) -> Keep {
            let (low, high, threshold) = mask.parts();
            // SAFETY: as said above the implementation.
            unsafe {
                let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let lanes = _mm512_mullo_epi32(iota, _mm512_set1_epi32(CHANNEL_FACTOR as i32));
                Keep {
                    lanes: _mm512_add_epi32(lanes, _mm512_set1_epi32(low as i32)),
                    high: _mm512_set1_epi32(high as i32),
                    threshold: _mm512_set1_epi32(threshold as i32),
                    upper: _mm512_set1_epi32((threshold >> 16) as i32),
                }
            }
        }
        /// See `dropout::hash`.
        #[inline(always)]
        fn keeps(self, keep: Keep, first: usize) -> __mmask16 {
            let first = (first as u32).wrapping_mul(CHANNEL_FACTOR);
            // SAFETY: as said above the implementation.
            unsafe {
                let x = _mm512_add_epi32(keep.lanes, _mm512_set1_epi32(first as i32));
                let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
                let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(FIRST_FACTOR as i32));
                let x = _mm512_xor_si512(x, _mm512_srli_epi32::<15>(x));
                let x = _mm512_mullo_epi32(_mm512_add_epi32(x, keep.high), _mm512_set1_epi32(SECOND_FACTOR as i32));
                // The hash ends with `x ^ (x >> 16)`. Its lower half decides only where the upper half is the threshold's.
                _mm512_cmpge_epu32_mask(_mm512_xor_si512(x, keep.upper), keep.threshold)
            }
        }
        #[inline(always)]
        fn where_set(self, flags: __mmask16, x: __m512) -> __m512 {
            // SAFETY: as said above the implementation.
            unsafe { _mm512_maskz_mov_ps(flags, x) }
        }
    }
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
                use $crate::simd::Avx512;
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
                    body::<$crate::simd::Array $(, $generic)*>($crate::simd::Array, $($arg),*)
                }
                match $crate::vector::isa() {
                    $crate::vector::Isa::Portable => {}
                    // SAFETY: `isa` names only instruction sets that this machine was found to have.
                    $crate::vector::Isa::Avx2 => return unsafe { avx2::<$($generic),*>($($arg),*) },
                    // SAFETY: as above.
                    $crate::vector::Isa::Avx512 => return unsafe { avx512::<$($generic),*>($($arg),*) },
                    // SAFETY: as above; what comes after AVX512-BF16 includes it.
                    _ => return unsafe { avx512bf16::<$($generic),*>($($arg),*) },
                }
            }
            #[allow(unreachable_code)]
            body::<$crate::simd::Array $(, $generic)*>($crate::simd::Array, $($arg),*)
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
            let x = each(|lane| (16.0 * i as f32 + lane as f32) / 10_000.0);
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
                // The instruction takes what is too small to be normal for zero.
                assert!(same || x.abs() < f32::MIN_POSITIVE && f32::from(got) == 0.0, "{x}: {got}");
            }
        }
    }

    #[test]
    fn masks_are_those_of_single_elements() {
        let d = Dropout { probability: 0.3, seed: 5, step: 6, site: 7, samples: &[8] };
        let mut to = [0.0; WIDTH];
        for (position, first) in [(0, 0), (3, 16), (9, 100_003)] {
            flags(d.row_mask(0, position), first, &mut to);
            let mask = d.row_mask(0, position);
            assert_eq!(to, each(|i| if mask.keeps(first + i) { 1.0 } else { 0.0 }));
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
