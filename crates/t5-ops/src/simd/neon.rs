//! Sixteen lanes in four registers of NEON.

use std::arch::aarch64::{
    float32x4_t, int32x4_t, uint16x4_t, uint32x4_t, vabsq_f32, vaddq_f32, vaddq_s32, vaddq_u32, vaddvq_f32, vandq_u32,
    vbslq_f32, vbslq_u32, vceqq_f32, vcgeq_u32, vcgtq_f32, vcleq_f32, vcombine_u16, vcvtq_s32_f32, vdivq_f32,
    vdupq_n_f32, vdupq_n_s32, vdupq_n_u32, veorq_u32, vfmaq_f32, vget_high_u16, vget_low_u16, vld1q_f32, vld1q_u16,
    vld1q_u32, vmaxnmq_f32, vmaxnmvq_f32, vmovn_u32, vmulq_f32, vmulq_u32, vmvnq_u32, vorrq_u32, vreinterpretq_f32_s32,
    vreinterpretq_f32_u32, vreinterpretq_u32_f32, vrndnq_f32, vshll_n_u16, vshlq_n_s32, vshrq_n_s32, vshrq_n_u32,
    vst1q_f32, vst1q_u16, vsubq_f32, vsubq_s32,
};

use half::{bf16, f16};

use super::{Simd, WIDTH, code_at, f16_to_f32};
use crate::random_mask::{CHANNEL_FACTOR, FIRST_FACTOR, RowMask, SECOND_FACTOR};

/// NEON is part of the baseline of aarch64: every block here is sound because of that, and because loads and stores are of
/// arrays of sixteen elements.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// A mask: the key's part of the first half of the lanes, which have hashes, and the value that these are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Keep {
    lanes: [uint32x4_t; 2],
    high: uint32x4_t,
    threshold: uint32x4_t,
}

/// Lanes of a register.
const QUARTER: usize = WIDTH / 4;

/// Applies `$quarter` to the quarters of the arguments.
macro_rules! quarters {
    ($quarter:ident, $($x:expr),+) => {
        // SAFETY: as said above.
        unsafe { [$quarter($($x[0]),+), $quarter($($x[1]),+), $quarter($($x[2]),+), $quarter($($x[3]),+)] }
    };
}

#[inline(always)]
unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    // SAFETY: as said above; so below.
    unsafe { vfmaq_f32(c, a, b) }
}

/// The larger lane; `b` if one is NaN.
#[inline(always)]
unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

#[inline(always)]
unsafe fn exp(x: float32x4_t) -> float32x4_t {
    // log2(e) in two parts.
    const HIGH: f32 = std::f32::consts::LOG2_E;
    const LOW: f32 = 1.925_963e-8;
    // SAFETY: as above.
    unsafe {
        let (least, most) = (vdupq_n_f32(-110.0), vdupq_n_f32(100.0));
        // NaN passes: it is not larger.
        let x = max(least, x);
        let x = vbslq_f32(vcgtq_f32(x, most), most, x);
        let n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(HIGH)));
        let r = mul_add(x, vdupq_n_f32(LOW), vfmaq_f32(vsubq_f32(vdupq_n_f32(0.0), n), x, vdupq_n_f32(HIGH)));
        let p = vdupq_n_f32(1.535_336_2e-4);
        let p = mul_add(p, r, vdupq_n_f32(1.339_887_4e-3));
        let p = mul_add(p, r, vdupq_n_f32(9.618_437e-3));
        let p = mul_add(p, r, vdupq_n_f32(5.550_332_5e-2));
        let p = mul_add(p, r, vdupq_n_f32(2.402_264_8e-1));
        let p = mul_add(p, r, vdupq_n_f32(6.931_472e-1));
        let p = mul_add(p, r, vdupq_n_f32(1.0));
        // 2^n goes beyond the exponents of f32 on both sides: in two steps it does not.
        let n = vcvtq_s32_f32(n);
        let some = vshrq_n_s32::<1>(n);
        vmulq_f32(vmulq_f32(p, power(some)), power(vsubq_s32(n, some)))
    }
}

/// 2^n for exponents of f32.
#[inline(always)]
unsafe fn power(n: int32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) }
}

/// Four bf16, rounded to nearest, ties to even.
#[inline(always)]
unsafe fn rounded(x: float32x4_t) -> uint16x4_t {
    // SAFETY: as above.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        vmovn_u32(vshrq_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), sum, quiet)))
    }
}

/// See `random_mask::hash`.
#[inline(always)]
unsafe fn hash(lanes: uint32x4_t, first: uint32x4_t, high: uint32x4_t) -> uint32x4_t {
    // SAFETY: as above.
    unsafe {
        let x = vaddq_u32(lanes, first);
        let x = veorq_u32(x, vshrq_n_u32::<16>(x));
        let x = vmulq_u32(x, vdupq_n_u32(FIRST_FACTOR));
        let x = veorq_u32(x, vshrq_n_u32::<15>(x));
        let x = vmulq_u32(vaddq_u32(x, high), vdupq_n_u32(SECOND_FACTOR));
        veorq_u32(x, vshrq_n_u32::<16>(x))
    }
}

#[inline(always)]
unsafe fn positive(x: float32x4_t) -> uint32x4_t {
    // SAFETY: as above.
    unsafe { vmvnq_u32(vcleq_f32(x, vdupq_n_f32(0.0))) }
}

#[inline(always)]
unsafe fn where_set(flags: uint32x4_t, x: float32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_f32_u32(vandq_u32(flags, vreinterpretq_u32_f32(x))) }
}

impl Simd for Neon {
    const SUMS: usize = 6;

    type F = [float32x4_t; 4];
    /// All bits of a lane, or none.
    type M = [uint32x4_t; 4];
    type Keep = Keep;
    type Table = [f32; 16];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: as said above.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; WIDTH]) -> Self::F {
        let x = x.as_ptr();
        // SAFETY: as said above.
        unsafe {
            [vld1q_f32(x), vld1q_f32(x.add(QUARTER)), vld1q_f32(x.add(2 * QUARTER)), vld1q_f32(x.add(3 * QUARTER))]
        }
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; WIDTH]) {
        for (to, x) in to.chunks_exact_mut(QUARTER).zip(x) {
            // SAFETY: as said above.
            unsafe { vst1q_f32(to.as_mut_ptr(), x) };
        }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16; WIDTH]) -> Self::F {
        // SAFETY: as said above.
        unsafe {
            let (lower, upper) = (vld1q_u16(x.as_ptr().cast()), vld1q_u16(x[2 * QUARTER..].as_ptr().cast()));
            let wide = [vget_low_u16(lower), vget_high_u16(lower), vget_low_u16(upper), vget_high_u16(upper)];
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(wide[0])),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(wide[1])),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(wide[2])),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(wide[3])),
            ]
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; WIDTH]) -> Self::F {
        self.load(&x.map(f16_to_f32))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; WIDTH]) -> Self::F {
        self.load(&x.map(|x| f32::from(x as i8)))
    }
    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> Self::Table {
        *values
    }
    #[inline(always)]
    fn look_up(self, table: Self::Table, places: &[u8; WIDTH / 2]) -> Self::F {
        self.load(&std::array::from_fn(|i| table[code_at(places, i)]))
    }
    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; WIDTH]) {
        // SAFETY: as said above.
        unsafe {
            vst1q_u16(to.as_mut_ptr().cast(), vcombine_u16(rounded(x[0]), rounded(x[1])));
            vst1q_u16(to[2 * QUARTER..].as_mut_ptr().cast(), vcombine_u16(rounded(x[2]), rounded(x[3])));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        quarters!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        quarters!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        quarters!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        quarters!(mul_add, a, b, c)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        quarters!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        quarters!(vabsq_f32, x)
    }
    #[inline(always)]
    fn positive(self, x: Self::F) -> Self::M {
        quarters!(positive, x)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        quarters!(max, a, b)
    }
    /// As with AVX-512.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        quarters!(exp, x)
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        // SAFETY: as said above.
        unsafe { vaddvq_f32(vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]))) }
    }
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        // SAFETY: as said above.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x[0], x[2]), vmaxnmq_f32(x[1], x[3]))) }
    }
    #[inline(always)]
    fn mask(self, mask: RowMask) -> Keep {
        let (low, high, threshold) = mask.parts();
        // SAFETY: as said above; eight numbers of a constant.
        unsafe {
            const IOTA: [u32; WIDTH / 2] = [0, 1, 2, 3, 4, 5, 6, 7];
            let (low, factor) = (vdupq_n_u32(low), vdupq_n_u32(CHANNEL_FACTOR));
            let mut lanes = [low; 2];
            for (lanes, iota) in lanes.iter_mut().zip(IOTA.chunks_exact(QUARTER)) {
                *lanes = vaddq_u32(*lanes, vmulq_u32(vld1q_u32(iota.as_ptr()), factor));
            }
            Keep { lanes, high: vdupq_n_u32(high), threshold: vdupq_n_u32(threshold) }
        }
    }
    /// See `random_mask::RowMask::keeps`.
    #[inline(always)]
    fn keeps(self, keep: Keep, first: usize) -> Self::M {
        let Keep { lanes, high, threshold } = keep;
        // SAFETY: as said above.
        unsafe {
            let first = vdupq_n_u32((first as u32).wrapping_mul(CHANNEL_FACTOR));
            let (left, right) = (hash(lanes[0], first, high), hash(lanes[1], first, high));
            [
                vcgeq_u32(left, threshold),
                vcgeq_u32(right, threshold),
                vcgeq_u32(vshlq_n_u32::<16>(left), threshold),
                vcgeq_u32(vshlq_n_u32::<16>(right), threshold),
            ]
        }
    }
    #[inline(always)]
    fn where_set(self, flags: Self::M, x: Self::F) -> Self::F {
        quarters!(where_set, flags, x)
    }
}
