//! Rows of scores with AVX-512 and AVX512-BF16. Every processor with tile registers has these, too.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, __mmask16, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_mask3_fmadd_ps, _mm512_maskz_mov_ps, _mm512_max_ps,
    _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_reduce_ps,
    _mm512_scalef_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use half::bf16;

use super::{Gradients, Pairs, Scores, Unit};
use crate::matmul::amx::Amx;
use crate::matmul::avx512::Avx512Bf16;
use crate::matmul::pairs::transpose;
use crate::matmul::tiles::{BLOCK, TILE, Tiles};
use crate::simd::{Avx512, Simd, WIDTH};

/// Kernels of processors that have the instructions.
trait HasVectors: Tiles {}

impl HasVectors for Amx {}
impl HasVectors for Avx512Bf16 {}

impl<K: HasVectors> Unit for K {
    fn softmax(row: Scores, state: &mut (f32, f32), p: &mut [u16]) -> f32 {
        // SAFETY: the machine of such a kernel has the instructions.
        unsafe {
            match row.mask {
                None => softmax_of::<false>(row, state, p),
                Some(_) => softmax_of::<true>(row, state, p),
            }
        }
    }

    fn gradients(rows: [Gradients; 2], dbias: Option<(&mut [f32], &mut [f32])>, to: Pairs) {
        // SAFETY: the machine of such a kernel has the instructions.
        unsafe {
            match (rows[0].scores.mask.is_some(), dbias) {
                (false, None) => gradients_of::<false, false>(rows, (&mut [], &mut []), to),
                (false, Some(dbias)) => gradients_of::<false, true>(rows, dbias, to),
                (true, None) => gradients_of::<true, false>(rows, (&mut [], &mut []), to),
                (true, Some(dbias)) => gradients_of::<true, true>(rows, dbias, to),
            }
        }
    }

    fn turn<'a>(x: &[f32], stride: usize, count: usize, to: impl Fn(usize) -> &'a mut [bf16]) {
        // SAFETY: the machine of such a kernel has the instructions.
        unsafe { turn_of(x, stride, count, to) }
    }
}

// The inlined functions below have no instruction set of their own, because such functions cannot be marked `inline(always)`. Their callers
// are compiled for AVX-512 (F, BW, DQ, VL) with AVX512-BF16.

/// 2^x, to 2e-7, for x up to some hundred; 0 for minus infinity, NaN for NaN.
#[inline(always)]
unsafe fn exp2(x: __m512) -> __m512 {
    /// Rounds towards minus infinity, to whole numbers, without an exception.
    const FLOOR: i32 = 0b1001;
    // SAFETY: by the caller's promise.
    unsafe {
        // The fraction of x; its integer part scales the exponent. The polynomial is the best relative approximation of 2^r on [0, 1)
        // (Remez).
        let r = _mm512_reduce_ps::<FLOOR>(x);
        let p = _mm512_set1_ps(1.877_576_7e-3);
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.989_34e-3));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.582_631_8e-2));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240_153_61));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931_531e-1));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999_999_94));
        _mm512_scalef_ps(p, x)
    }
}

impl Scores<'_> {
    /// Sixteen scores with their bias, times log2(e).
    #[inline(always)]
    unsafe fn at(&self, i: usize) -> __m512 {
        let (scores, bias) = (&self.scores[i..i + WIDTH], &self.bias[i..i + WIDTH]);
        // SAFETY: sixteen elements each, and by the caller's promise.
        unsafe {
            let (scores, bias) = (_mm512_loadu_ps(scores.as_ptr()), _mm512_loadu_ps(bias.as_ptr()));
            _mm512_fmadd_ps(scores, _mm512_set1_ps(self.factor), bias)
        }
    }

    /// Sixteen scores with their bias, minus infinity where keys are hidden.
    #[inline(always)]
    unsafe fn seen_at(&self, i: usize) -> __m512 {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), self.lanes(i), self.at(i)) }
    }

    /// A mask of the visible keys among the sixteen at `i`.
    #[inline(always)]
    fn lanes(&self, i: usize) -> __mmask16 {
        let count = self.visible.saturating_sub(i).min(WIDTH);
        ((1u32 << count) - 1) as u16
    }
}

/// Two times sixteen numbers as bf16, one after the other.
#[inline(always)]
unsafe fn both(first: __m512, second: __m512) -> __m512i {
    // SAFETY: by the caller's promise; the same bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
}

/// Two times sixteen numbers as bf16, in pairs of one of each.
#[inline(always)]
unsafe fn pairs(first: __m512, second: __m512) -> __m512i {
    const ORDER: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: by the caller's promise; the same bits.
    unsafe {
        let order = std::mem::transmute::<[u16; 32], __m512i>(ORDER);
        _mm512_permutexvar_epi16(order, both(first, second))
    }
}

#[inline(always)]
unsafe fn store(x: __m512i, to: &mut [u16]) {
    let to = &mut to[..BLOCK];
    // SAFETY: 64 bytes, and by the caller's promise.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn softmax_of<const DROPS: bool>(row: Scores, (largest, total): &mut (f32, f32), p: &mut [u16]) -> f32 {
    let (whole, some) = (row.visible / BLOCK * BLOCK, row.visible.next_multiple_of(BLOCK));
    p[some..].fill(0);
    if some == 0 {
        return 1.0;
    }
    let before = *largest;
    // SAFETY: this function is compiled for the instructions.
    unsafe {
        let simd = Avx512::<true>::new();
        let keep = row.mask.map(|mask| simd.mask(mask));
        // A NaN is never the largest, but a sum with a NaN is NaN.
        let mut top = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for i in (0..whole).step_by(BLOCK) {
            top = [_mm512_max_ps(row.at(i), top[0]), _mm512_max_ps(row.at(i + WIDTH), top[1])];
        }
        if whole < some {
            top = [_mm512_max_ps(row.seen_at(whole), top[0]), _mm512_max_ps(row.seen_at(whole + WIDTH), top[1])];
        }
        let of_tile = _mm512_reduce_max_ps(_mm512_max_ps(top[0], top[1]));
        if of_tile > before {
            *largest = of_tile;
        }
        let shift = _mm512_set1_ps(*largest);
        let mut sum = [_mm512_setzero_ps(); 2];
        for i in (0..some).step_by(BLOCK) {
            let [first, second] =
                if i < whole { [row.at(i), row.at(i + WIDTH)] } else { [row.seen_at(i), row.seen_at(i + WIDTH)] };
            let mut e = [exp2(_mm512_sub_ps(first, shift)), exp2(_mm512_sub_ps(second, shift))];
            sum = [_mm512_add_ps(sum[0], e[0]), _mm512_add_ps(sum[1], e[1])];
            if DROPS && let Some(keep) = keep {
                e[0] = _mm512_maskz_mov_ps(simd.keeps(keep, row.key + i), e[0]);
                e[1] = _mm512_maskz_mov_ps(simd.keeps(keep, row.key + i + WIDTH), e[1]);
            }
            store(both(e[0], e[1]), &mut p[i..]);
        }
        // Nothing was summed before the first keys.
        let smaller = if before == f32::NEG_INFINITY { 0.0 } else { (before - *largest).exp2() };
        *total = *total * smaller + _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
        smaller
    }
}

/// The constants of a row, in every lane.
struct Numbers<'a> {
    row: Scores<'a>,
    dp: &'a [f32],
    keep: Option<<Avx512<true> as Simd>::Keep>,
    scale: __m512,
    lse: __m512,
    delta: __m512,
    minus_delta: __m512,
}

impl<'a> Numbers<'a> {
    #[inline(always)]
    unsafe fn new(simd: Avx512<true>, g: &Gradients<'a>) -> Self {
        // SAFETY: by the caller's promise.
        unsafe {
            Self {
                row: g.scores,
                dp: g.dp,
                keep: g.scores.mask.map(|mask| simd.mask(mask)),
                scale: _mm512_set1_ps(g.scores.mask.map_or(1.0, |mask| mask.scale())),
                lse: _mm512_set1_ps(g.lse),
                delta: _mm512_set1_ps(g.delta),
                minus_delta: _mm512_set1_ps(-g.delta),
            }
        }
    }

    /// Returns p m and the gradient of sixteen scores, which it also adds to `dbias`. `SEES_ALL`: no key is hidden.
    #[inline(always)]
    unsafe fn at<const DROPS: bool, const ADDS: bool, const SEES_ALL: bool>(
        &self,
        simd: Avx512<true>,
        i: usize,
        dbias: &mut [f32],
    ) -> (__m512, __m512) {
        let dp = &self.dp[i..i + WIDTH];
        // SAFETY: sixteen elements each, and by the caller's promise.
        unsafe {
            let dp = _mm512_loadu_ps(dp.as_ptr());
            let mut p = exp2(_mm512_sub_ps(self.row.at(i), self.lse));
            if !SEES_ALL {
                p = _mm512_maskz_mov_ps(self.row.lanes(i), p);
            }
            let (pm, ds) = match self.keep {
                Some(keep) if DROPS => {
                    let keeps = simd.keeps(keep, self.row.key + i);
                    let pm = _mm512_maskz_mov_ps(keeps, _mm512_mul_ps(p, self.scale));
                    (pm, _mm512_mul_ps(p, _mm512_mask3_fmadd_ps(dp, self.scale, self.minus_delta, keeps)))
                }
                _ => (p, _mm512_mul_ps(p, _mm512_sub_ps(dp, self.delta))),
            };
            if ADDS {
                let to = &mut dbias[i..i + WIDTH];
                _mm512_storeu_ps(to.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(to.as_ptr()), ds));
            }
            (pm, ds)
        }
    }
}

/// Computes sixteen keys of two rows: a line of a panel for each, and the gradients of the scores.
#[inline(always)]
unsafe fn half<const DROPS: bool, const ADDS: bool, const SEES_ALL: bool>(
    simd: Avx512<true>,
    rows: &[Numbers; 2],
    i: usize,
    (dbias, other_dbias): (&mut [f32], &mut [f32]),
    (p, ds): (&mut [u16], &mut [u16]),
) -> [__m512; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        let first = rows[0].at::<DROPS, ADDS, SEES_ALL>(simd, i, dbias);
        let second = rows[1].at::<DROPS, ADDS, SEES_ALL>(simd, i, other_dbias);
        store(pairs(first.0, second.0), p);
        store(pairs(first.1, second.1), ds);
        [first.1, second.1]
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn gradients_of<const DROPS: bool, const ADDS: bool>(
    [first, second]: [Gradients; 2],
    (dbias, other_dbias): (&mut [f32], &mut [f32]),
    to: Pairs,
) {
    let (least, most) = (
        first.scores.visible.min(second.scores.visible) / BLOCK * BLOCK,
        first.scores.visible.max(second.scores.visible).next_multiple_of(BLOCK),
    );
    let Pairs { p, ds, panel, count, rows, apart } = to;
    let (row, other_row) = rows.split_at_mut(apart);
    // SAFETY: this function is compiled for the instructions.
    unsafe {
        let simd = Avx512::<true>::new();
        let rows = [Numbers::new(simd, &first), Numbers::new(simd, &second)];
        for i in (0..most).step_by(BLOCK) {
            let mut of_half = [[_mm512_setzero_ps(); 2]; 2];
            for (half_of, lower) in of_half.iter_mut().zip([0, WIDTH]) {
                let at = i / BLOCK * panel + lower / WIDTH * TILE;
                let (dbias, to) = ((&mut *dbias, &mut *other_dbias), (&mut p[at..], &mut ds[at..]));
                *half_of = if i < least {
                    half::<DROPS, ADDS, true>(simd, &rows, i + lower, dbias, to)
                } else {
                    half::<DROPS, ADDS, false>(simd, &rows, i + lower, dbias, to)
                };
            }
            store(both(of_half[0][0], of_half[1][0]), &mut row[i..]);
            store(both(of_half[0][1], of_half[1][1]), &mut other_row[i..]);
        }
    }
    // Keys that neither of the two queries sees, and other queries of the strip or the group do.
    for i in (most..count).step_by(BLOCK) {
        for at in [i / BLOCK * panel, i / BLOCK * panel + TILE] {
            p[at..at + BLOCK].fill(0);
            ds[at..at + BLOCK].fill(0);
        }
        row[i..i + BLOCK].fill(0);
        other_row[i..i + BLOCK].fill(0);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn turn_of<'a>(x: &[f32], stride: usize, count: usize, to: impl Fn(usize) -> &'a mut [bf16]) {
    // SAFETY: this function is compiled for the instructions.
    let simd = unsafe { Avx512::<true>::new() };
    let mut rows = [_mm512_castps_si512(simd.splat(0.0)); WIDTH];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = _mm512_castps_si512(simd.load(x[i * stride..].first_chunk().expect("sixteen numbers")));
    }
    transpose(&mut rows);
    for (i, row) in rows.into_iter().enumerate().take(count) {
        simd.store_bf16(_mm512_castsi512_ps(row), to(i).first_chunk_mut().expect("sixteen numbers"));
    }
}
