//! Sixteen lanes in one register of AVX-512.

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __mmask16, _CMP_NLE_UQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm_loadl_epi64, _mm_loadu_si128, _mm_unpacklo_epi8, _mm256_add_epi32, _mm256_cmpge_epu32_mask, _mm256_loadu_si256,
    _mm256_mullo_epi32, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srli_epi32,
    _mm256_storeu_si256, _mm256_xor_si256, _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi16,
    _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_cvtph_ps,
    _mm512_div_ps, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_mask_or_epi32, _mm512_maskz_mov_ps,
    _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_reduce_add_ps, _mm512_reduce_max_ps,
    _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_storeu_ps, _mm512_sub_ps,
};

use half::{bf16, f16};

use super::{Simd, WIDTH};
use crate::random_mask::{CHANNEL_FACTOR, FIRST_FACTOR, RowMask, SECOND_FACTOR};

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

/// A mask: the key's part of the first half of the lanes, which have hashes, and the value that these are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Keep {
    lanes: __m256i,
    high: __m256i,
    threshold: __m256i,
}

// Every block here is sound because a value of the type was made under the promise of `new`; loads and stores are of
// arrays of sixteen elements.
impl<const BF16: bool> Simd for Avx512<BF16> {
    const SUMS: usize = 24;

    type F = __m512;
    type M = __mmask16;
    type Keep = Keep;
    type Table = __m512;

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
    fn load_f16(self, x: &[f16; WIDTH]) -> __m512 {
        // SAFETY: as said above the implementation.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; WIDTH]) -> __m512 {
        // SAFETY: as said above the implementation.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> __m512 {
        self.load(values)
    }
    #[inline(always)]
    fn look_up(self, table: __m512, places: &[u8; WIDTH / 2]) -> __m512 {
        // SAFETY: as said above the implementation; eight bytes are read.
        unsafe {
            let bytes = _mm_loadl_epi64(places.as_ptr().cast());
            let twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            // Only the lowest four bits of each place count.
            let places = _mm512_srlv_epi32(twice, _mm512_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0));
            _mm512_permutexvar_ps(places, table)
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
            let iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let lanes = _mm256_mullo_epi32(iota, _mm256_set1_epi32(CHANNEL_FACTOR as i32));
            Keep {
                lanes: _mm256_add_epi32(lanes, _mm256_set1_epi32(low as i32)),
                high: _mm256_set1_epi32(high as i32),
                threshold: _mm256_set1_epi32(threshold as i32),
            }
        }
    }
    /// See `random_mask::RowMask::keeps`.
    #[inline(always)]
    fn keeps(self, keep: Keep, first: usize) -> __mmask16 {
        let first = (first as u32).wrapping_mul(CHANNEL_FACTOR);
        // SAFETY: as said above the implementation.
        unsafe {
            let x = _mm256_add_epi32(keep.lanes, _mm256_set1_epi32(first as i32));
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(FIRST_FACTOR as i32));
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<15>(x));
            let x = _mm256_mullo_epi32(_mm256_add_epi32(x, keep.high), _mm256_set1_epi32(SECOND_FACTOR as i32));
            // The upper half of the hash does not depend on its last step, and the lower half of the threshold is zero.
            let upper = _mm256_cmpge_epu32_mask(x, keep.threshold);
            let hash = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            let lower = _mm256_cmpge_epu32_mask(_mm256_slli_epi32::<16>(hash), keep.threshold);
            u16::from(upper) | u16::from(lower) << 8
        }
    }
    #[inline(always)]
    fn where_set(self, flags: __mmask16, x: __m512) -> __m512 {
        // SAFETY: as said above the implementation.
        unsafe { _mm512_maskz_mov_ps(flags, x) }
    }
}
