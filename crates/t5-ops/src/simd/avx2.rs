//! Sixteen lanes in two registers of AVX2.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_NLE_UQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_add_ps,
    _mm_add_ss, _mm_cvtss_f32, _mm_loadl_epi64, _mm_loadu_si128, _mm_max_ps, _mm_max_ss, _mm_movehdup_ps,
    _mm_movehl_ps, _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps,
    _mm256_and_si256, _mm256_andnot_ps, _mm256_blendv_epi8, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cmpeq_epi32, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtps_epi32, _mm256_div_ps,
    _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_fmsub_ps, _mm256_loadu_ps, _mm256_max_epu32, _mm256_max_ps,
    _mm256_min_ps, _mm256_mul_ps, _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute4x64_epi64,
    _mm256_permutevar8x32_ps, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps,
    _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps, _mm256_storeu_si256,
    _mm256_sub_epi32, _mm256_sub_ps, _mm256_xor_si256,
};

use half::{bf16, f16};

use super::{Simd, WIDTH, f16_to_f32};
use crate::random_mask::{CHANNEL_FACTOR, FIRST_FACTOR, RowMask, SECOND_FACTOR};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    ///
    /// The machine has AVX2 and FMA, and the caller is a function compiled for them.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Self(())
    }
}

/// A mask: the key's part of the first half of the lanes, which have hashes, and the value that these are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Keep {
    lanes: __m256i,
    high: __m256i,
    threshold: __m256i,
}

/// Lanes of a register.
const HALF: usize = WIDTH / 2;

/// Applies `$half` to the halves of the arguments.
macro_rules! halves {
    ($half:ident, $($x:expr),+) => {
        // SAFETY: as said above the implementation.
        unsafe { [$half($($x[0]),+), $half($($x[1]),+)] }
    };
}

#[inline(always)]
unsafe fn exp(x: __m256) -> __m256 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    // log2(e) in two parts.
    const HIGH: f32 = std::f32::consts::LOG2_E;
    const LOW: f32 = 1.925_963e-8;
    // SAFETY: by the caller's promise.
    unsafe {
        // NaN passes: both give their second operand.
        let x = _mm256_min_ps(_mm256_set1_ps(100.0), _mm256_max_ps(_mm256_set1_ps(-110.0), x));
        let n = _mm256_round_ps::<NEAREST>(_mm256_mul_ps(x, _mm256_set1_ps(HIGH)));
        let r = _mm256_fmadd_ps(x, _mm256_set1_ps(LOW), _mm256_fmsub_ps(x, _mm256_set1_ps(HIGH), n));
        let p = _mm256_set1_ps(1.535_336_2e-4);
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.339_887_4e-3));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.618_437e-3));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.550_332_5e-2));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.402_264_8e-1));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.931_472e-1));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
        // 2^n goes beyond the exponents of f32 on both sides: in two steps it does not.
        let n = _mm256_cvtps_epi32(n);
        let some = _mm256_srai_epi32::<1>(n);
        _mm256_mul_ps(_mm256_mul_ps(p, power(some)), power(_mm256_sub_epi32(n, some)))
    }
}

/// 2^n for exponents of f32.
#[inline(always)]
unsafe fn power(n: __m256i) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
}

/// The bits of bf16, one in 32, rounded to nearest, ties to even.
#[inline(always)]
unsafe fn rounded(x: __m256) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(sum, quiet, nan))
    }
}

/// The lanes where `x >= y`, unsigned.
#[inline(always)]
unsafe fn at_least(x: __m256i, y: __m256i) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(x, y), x)) }
}

#[inline(always)]
unsafe fn abs(x: __m256) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
}

#[inline(always)]
unsafe fn positive(x: __m256) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_cmp_ps::<_CMP_NLE_UQ>(x, _mm256_setzero_ps()) }
}

// Every block here is sound because a value of the type was made under the promise of `new`; loads and stores are of
// arrays of sixteen elements.
impl Simd for Avx2 {
    const SUMS: usize = 6;

    type F = [__m256; 2];
    /// All bits of a lane, or none.
    type M = [__m256; 2];
    type Keep = Keep;
    type Table = [__m256; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: as said above the implementation.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; WIDTH]) -> Self::F {
        // SAFETY: as said above the implementation.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[HALF..].as_ptr())] }
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; WIDTH]) {
        // SAFETY: as said above the implementation.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to[HALF..].as_mut_ptr(), x[1]);
        }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16; WIDTH]) -> Self::F {
        // SAFETY: as said above the implementation.
        unsafe {
            let lower = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(x[HALF..].as_ptr().cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(lower)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))]
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; WIDTH]) -> Self::F {
        self.load(&x.map(f16_to_f32))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; WIDTH]) -> Self::F {
        // SAFETY: as said above the implementation; eight bytes are read at a time.
        unsafe {
            let lower = _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()));
            let upper = _mm256_cvtepi8_epi32(_mm_loadl_epi64(x[HALF..].as_ptr().cast()));
            [_mm256_cvtepi32_ps(lower), _mm256_cvtepi32_ps(upper)]
        }
    }
    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> Self::Table {
        self.load(values)
    }
    #[inline(always)]
    fn look_up(self, table: Self::Table, places: &[u8; WIDTH / 2]) -> Self::F {
        // SAFETY: as said above the implementation; eight bytes are read.
        unsafe {
            let bytes = _mm_loadl_epi64(places.as_ptr().cast());
            let twice = _mm_unpacklo_epi8(bytes, bytes);
            let shifts = _mm256_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0);
            let of = |eight: __m128i| {
                // The lowest three bits of each place select a value; the fourth bit selects the half.
                let places = _mm256_srlv_epi32(_mm256_cvtepu8_epi32(eight), shifts);
                let (lower, upper) =
                    (_mm256_permutevar8x32_ps(table[0], places), _mm256_permutevar8x32_ps(table[1], places));
                _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(places)))
            };
            [of(twice), of(_mm_unpackhi_epi64(twice, twice))]
        }
    }
    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; WIDTH]) {
        // SAFETY: as said above the implementation.
        unsafe {
            // Packing alternates between the 128-bit halves of both operands.
            let packed = _mm256_packus_epi32(rounded(x[0]), rounded(x[1]));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        halves!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        halves!(abs, x)
    }
    #[inline(always)]
    fn positive(self, x: Self::F) -> Self::M {
        halves!(positive, x)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_max_ps, a, b)
    }
    /// As with AVX-512.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        halves!(exp, x)
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        // SAFETY: as said above the implementation.
        unsafe {
            let eight = _mm256_add_ps(x[0], x[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        // SAFETY: as said above the implementation.
        unsafe {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn mask(self, mask: RowMask) -> Keep {
        let (low, high, threshold) = mask.parts();
        // SAFETY: as said above the implementation.
        unsafe {
            let low = _mm256_set1_epi32(low as i32);
            let factor = _mm256_set1_epi32(CHANNEL_FACTOR as i32);
            let lanes = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), factor);
            Keep {
                lanes: _mm256_add_epi32(lanes, low),
                high: _mm256_set1_epi32(high as i32),
                threshold: _mm256_set1_epi32(threshold as i32),
            }
        }
    }
    /// See `random_mask::RowMask::keeps`.
    #[inline(always)]
    fn keeps(self, keep: Keep, first: usize) -> Self::M {
        let first = (first as u32).wrapping_mul(CHANNEL_FACTOR);
        // SAFETY: as said above the implementation.
        unsafe {
            let x = _mm256_add_epi32(keep.lanes, _mm256_set1_epi32(first as i32));
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(FIRST_FACTOR as i32));
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<15>(x));
            let x = _mm256_mullo_epi32(_mm256_add_epi32(x, keep.high), _mm256_set1_epi32(SECOND_FACTOR as i32));
            let hash = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            [at_least(hash, keep.threshold), at_least(_mm256_slli_epi32::<16>(hash), keep.threshold)]
        }
    }
    #[inline(always)]
    fn where_set(self, flags: Self::M, x: Self::F) -> Self::F {
        halves!(_mm256_and_ps, flags, x)
    }
}
