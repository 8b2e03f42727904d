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
    /// `self + a b`.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;
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
        __m256, __m512, _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
        _mm256_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_storeu_ps,
    };

    use super::Lanes;

    impl Lanes for __m512 {
        const WIDTH: usize = 16;
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
    }

    impl Lanes for __m256 {
        const WIDTH: usize = 8;
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
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::{float32x4_t, vaddq_f32, vdupq_n_f32, vfmaq_f32, vld1q_f32, vst1q_f32};

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
    }
}
