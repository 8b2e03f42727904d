//! Sixteen lanes of any machine: loops over arrays, which the compiler vectorises as it can.
//!
//! Loops, not closures: the compiler makes a function of a closure that it does not inline.

use half::{bf16, f16};

use super::{Simd, WIDTH, code_at, f16_to_f32};
use crate::random_mask::RowMask;
use crate::storage::Element;
use crate::vector;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// An array whose element `$i` is `$element`.
macro_rules! each {
    ($i:ident, $element:expr) => {{
        let mut all = [Default::default(); WIDTH];
        for $i in 0..WIDTH {
            all[$i] = $element;
        }
        all
    }};
}

/// Folds the elements of `$x` pairwise with `$of`: `$a` and `$b` are elements of the lower and the upper half.
macro_rules! fold {
    ($x:ident, $a:ident, $b:ident, $of:expr) => {{
        let mut all = $x;
        let mut width = WIDTH / 2;
        while width > 0 {
            for lane in 0..width {
                let ($a, $b) = (all[lane], all[lane + width]);
                all[lane] = $of;
            }
            width /= 2;
        }
        all[0]
    }};
}

impl Simd for Portable {
    const SUMS: usize = 4;

    type F = [f32; WIDTH];
    type M = [bool; WIDTH];
    type Keep = RowMask;
    type Table = [f32; 16];

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
        each!(i, Element::to_f32(x[i]))
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16; WIDTH]) -> Self::F {
        each!(i, f16_to_f32(x[i]))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; WIDTH]) -> Self::F {
        each!(i, f32::from(x[i] as i8))
    }
    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> Self::Table {
        *values
    }
    #[inline(always)]
    fn look_up(self, table: Self::Table, places: &[u8; WIDTH / 2]) -> Self::F {
        each!(i, table[code_at(places, i)])
    }
    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; WIDTH]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = Element::from_f32(x);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i, a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i, a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i, a[i] * b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(i, a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i, a[i] / b[i])
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        each!(i, x[i].abs())
    }
    #[inline(always)]
    fn positive(self, x: Self::F) -> Self::M {
        each!(i, x[i].is_nan() || x[i] > 0.0)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i, if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        each!(i, vector::exp(x[i]))
    }
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        fold!(x, a, b, a + b)
    }
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        fold!(x, a, b, if a > b { a } else { b })
    }
    #[inline(always)]
    fn mask(self, mask: RowMask) -> Self::Keep {
        mask
    }
    #[inline(always)]
    fn keeps(self, keep: Self::Keep, first: usize) -> Self::M {
        each!(i, keep.keeps(first + i))
    }
    #[inline(always)]
    fn where_set(self, flags: Self::M, x: Self::F) -> Self::F {
        each!(i, if flags[i] { x[i] } else { 0.0 })
    }
}
