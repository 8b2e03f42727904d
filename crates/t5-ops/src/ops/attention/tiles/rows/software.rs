//! Rows of scores in plain code, for tiles in software. Exponentials are those of the standard library.

use half::bf16;

use super::{Gradients, Pairs, Scores, Unit};
use crate::matmul::software::SoftwareTiles;
use crate::matmul::tiles::{BLOCK, TILE};
use crate::storage::Element;

impl Scores<'_> {
    /// A score with its bias, times log2(e).
    fn score(&self, i: usize) -> f32 {
        self.scores[i] * self.factor + self.bias[i]
    }

    fn keeps(&self, i: usize) -> bool {
        self.mask.is_none_or(|mask| mask.keeps(self.key + i))
    }
}

impl Unit for SoftwareTiles {
    fn softmax(row: Scores, (largest, total): &mut (f32, f32), p: &mut [u16]) -> f32 {
        p.fill(0);
        if row.visible == 0 {
            return 1.0;
        }
        let before = *largest;
        // A NaN is never the largest, but a sum with a NaN is NaN.
        *largest = (0..row.visible).map(|i| row.score(i)).fold(before, f32::max);
        let mut sum = 0.0;
        for (i, p) in p.iter_mut().enumerate().take(row.visible) {
            let e = (row.score(i) - *largest).exp2();
            sum += e;
            if row.keeps(i) {
                *p = rounded(e);
            }
        }
        // Nothing was summed before the first keys.
        let smaller = if before == f32::NEG_INFINITY { 0.0 } else { (before - *largest).exp2() };
        *total = *total * smaller + sum;
        smaller
    }

    fn gradients(rows: [Gradients; 2], dbias: Option<(&mut [f32], &mut [f32])>, to: Pairs) {
        let mut dbias = dbias.map(|(even, odd)| [even, odd]);
        for (which, row) in rows.into_iter().enumerate() {
            for i in 0..to.count {
                let (mut pm, mut ds) = (0.0, 0.0);
                if i < row.scores.visible {
                    let scale = row.scores.mask.map_or(1.0, |mask| mask.scale());
                    let p = (row.scores.score(i) - row.lse).exp2();
                    let m = if row.scores.keeps(i) { scale } else { 0.0 };
                    (pm, ds) = (p * m, p * (row.dp[i] * m - row.delta));
                    if let Some(dbias) = &mut dbias {
                        dbias[which][i] += ds;
                    }
                }
                let at = i / BLOCK * to.panel + i % BLOCK / 16 * TILE + i % 16 * 2 + which;
                (to.p[at], to.ds[at]) = (rounded(pm), rounded(ds));
                to.rows[which * to.apart + i] = rounded(ds);
            }
        }
    }

    fn turn<'a>(x: &[f32], stride: usize, count: usize, to: impl Fn(usize) -> &'a mut [bf16]) {
        for i in 0..count {
            for (j, to) in to(i)[..16].iter_mut().enumerate() {
                *to = Element::from_f32(x[j * stride + i]);
            }
        }
    }
}

fn rounded(x: f32) -> u16 {
    <bf16 as Element>::from_f32(x).to_bits()
}
