//! Vectors of f32 of each instruction set, as the f32 kernels see them.

/// A vector of an instruction set.
///
/// # Safety
///
/// The functions may be called only where the machine has the instructions.
pub(super) trait Lanes: Copy {
    /// Elements of a vector.
    const WIDTH: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn splat(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    /// Prefetches a vector, if the instruction set can.
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}
    /// `self + a b`.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;
    /// Transposes `WIDTH` rows of `WIDTH` elements, `from_stride` apart, into rows that are `to_stride` apart.
    #[inline(always)]
    unsafe fn turn(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..Self::WIDTH {
            for j in 0..Self::WIDTH {
                // SAFETY: the caller promises the rows on both sides.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}

/// Four lanes that any machine has.
#[derive(Clone, Copy)]
pub(super) struct Four([f32; 4]);

impl Lanes for Four {
    const WIDTH: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Four([0.0; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promises the elements.
        Four(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        // SAFETY: as above.
        Four([unsafe { *from }; 4])
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Four(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
        Four(std::array::from_fn(|i| self.0[i] + a.0[i] * b.0[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps,
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
    };

    use super::Lanes;

    impl Lanes for __m512 {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn prefetch(from: *const f32) {
            // SAFETY: nothing is loaded.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: by the promise of the trait; so below.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { _mm512_set1_ps(*from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm512_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        unsafe fn turn(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // SAFETY: as above; the caller promises the rows on both sides.
            unsafe {
                // A loop and not `array::from_fn`, whose closure would be compiled without AVX-512 unless it is inlined.
                let mut rows = [_mm512_setzero_si512(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_castps_si512(_mm512_loadu_ps(from.add(i * from_stride)));
                }
                crate::matmul::pairs::transpose(&mut rows);
                for (i, row) in rows.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add(i * to_stride), _mm512_castsi512_ps(row));
                }
            }
        }
    }

    impl Lanes for __m256 {
        const WIDTH: usize = 8;
        #[inline(always)]
        unsafe fn prefetch(from: *const f32) {
            // SAFETY: nothing is loaded.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_broadcast_ss(&*from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_fmadd_ps(a, b, self) }
        }
        #[inline(always)]
        unsafe fn turn(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // SAFETY: as above; the caller promises the rows on both sides.
            unsafe {
                let row = |i: usize| _mm256_loadu_ps(from.add(i * from_stride));
                // Within each half: 4 x 4 transposes of rows 0 to 3 and of rows 4 to 7.
                let four = |i: usize| {
                    let (a, b, c, d) = (row(i), row(i + 1), row(i + 2), row(i + 3));
                    let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                    let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                    [
                        _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                        _mm256_shuffle_ps::<0xEE>(ab_low, cd_low),
                        _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                        _mm256_shuffle_ps::<0xEE>(ab_high, cd_high),
                    ]
                };
                // Then the halves: columns 0 to 3 are in the lower ones, 4 to 7 in the upper ones.
                for (i, (above, below)) in four(0).into_iter().zip(four(4)).enumerate() {
                    _mm256_storeu_ps(to.add(i * to_stride), _mm256_permute2f128_ps::<0x20>(above, below));
                    _mm256_storeu_ps(to.add((i + 4) * to_stride), _mm256_permute2f128_ps::<0x31>(above, below));
                }
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::{
        float32x4_t, vaddq_f32, vdupq_n_f32, vfmaq_f32, vld1q_f32, vreinterpretq_f32_f64, vreinterpretq_f64_f32,
        vst1q_f32, vtrn1q_f32, vtrn1q_f64, vtrn2q_f32, vtrn2q_f64,
    };

    use super::Lanes;

    impl Lanes for float32x4_t {
        const WIDTH: usize = 4;
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: NEON is part of the baseline of aarch64; so below.
            unsafe { vdupq_n_f32(0.0) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above; the caller promises the elements.
            unsafe { vld1q_f32(from) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { vdupq_n_f32(*from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { vst1q_f32(to, self) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { vaddq_f32(self, other) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
            // SAFETY: as above.
            unsafe { vfmaq_f32(self, a, b) }
        }
        #[inline(always)]
        unsafe fn turn(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // SAFETY: as above; the caller promises the rows on both sides.
            unsafe {
                let [a, b, c, d] = std::array::from_fn(|i| vld1q_f32(from.add(i * from_stride)));
                // Pairs of elements change places first, then pairs of pairs.
                let turned = [(vtrn1q_f32(a, b), vtrn1q_f32(c, d)), (vtrn2q_f32(a, b), vtrn2q_f32(c, d))];
                for (i, (ab, cd)) in turned.into_iter().enumerate() {
                    let (ab, cd) = (vreinterpretq_f64_f32(ab), vreinterpretq_f64_f32(cd));
                    vst1q_f32(to.add(i * to_stride), vreinterpretq_f32_f64(vtrn1q_f64(ab, cd)));
                    vst1q_f32(to.add((i + 2) * to_stride), vreinterpretq_f32_f64(vtrn2q_f64(ab, cd)));
                }
            }
        }
    }
}
