//! Rotations on the CPU, in place. A part is some positions of all sequences, so that each angle is computed once.

use candle_core::{Result, Tensor};

use super::Rope;
use crate::parallel::{Shared, for_each_rows};
use crate::storage::{Element, update, with_element};
use crate::vector::vectorized;

pub(super) fn rotated(x: Tensor, heads: usize, rope: &Rope, back: bool) -> Result<Tensor> {
    let (batch, length, width) = x.dims3()?;
    let frequencies = rope.frequencies(width / heads);
    let direction = if back { -1.0 } else { 1.0 };
    with_element!(x.dtype(), T, {
        update::<T, _>("rope", &x, &[], |x| {
            let x = Shared::new(x);
            for_each_rows(length, batch * width, |rows| {
                let mut cos = vec![0f32; frequencies.len()];
                let mut sin = cos.clone();
                for row in rows {
                    circle((rope.first_position + row) as f32, &frequencies, direction, &mut cos, &mut sin);
                    for sequence in 0..batch {
                        // SAFETY: each position belongs to one part.
                        rotate(unsafe { x.slice((sequence * length + row) * width, width) }, &cos, &sin);
                    }
                }
            });
            Ok(())
        })?;
    });
    Ok(x)
}

vectorized! {
    /// The cosines and sines of `position * frequency`, for angles up to 2^24: in f64, less than one place of f32 from the right value.
    ///
    /// The angle is n quarter turns and a rest within an eighth of a turn, whose sine and cosine are series (as in Cephes' `sin`).
    fn circle(position: f32, frequencies: &[f32], direction: f32, cos: &mut [f32], sin: &mut [f32]) {
        // Adding and subtracting it rounds to an integer, whose lowest bits are those of the sum.
        const MAGIC: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
        let (cos, sin) = (&mut cos[..frequencies.len()], &mut sin[..frequencies.len()]);
        for i in 0..frequencies.len() {
            let angle = f64::from(position * frequencies[i]);
            let shifted = angle * std::f64::consts::FRAC_2_PI + MAGIC;
            let turns = shifted - MAGIC;
            // pi / 2 in two parts: the product with the first, of 33 bits, is exact.
            let rest = (angle - turns * 1.570_796_326_734_125_6) - turns * 6.077_100_506_506_192e-11;
            let z = rest * rest;
            let s = rest + rest * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0
                - z * (1.0 / 39_916_800.0)))));
            let c = 1.0 - 0.5 * z + z * z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40_320.0
                - z * (1.0 / 3_628_800.0))));
            let quarter = shifted.to_bits();
            let is_odd = quarter & 1 == 1;
            let (of_cos, of_sin) = (if is_odd { s } else { c }, if is_odd { c } else { s });
            // Cosines are negative in the second and third quarter, sines in the third and fourth.
            let sign_of_cos = ((quarter ^ (quarter >> 1)) & 1) << 63;
            let sign_of_sin = ((quarter >> 1) & 1) << 63;
            cos[i] = f64::from_bits(of_cos.to_bits() ^ sign_of_cos) as f32;
            sin[i] = f64::from_bits(of_sin.to_bits() ^ sign_of_sin) as f32 * direction;
        }
    }

    fn rotate<T: Element>(x: &mut [T], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        let sin = &sin[..half];
        for head in x.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            let second = &mut second[..half];
            for i in 0..half {
                let (a, b) = (first[i].to_f32(), second[i].to_f32());
                first[i] = T::from_f32(a * cos[i] - b * sin[i]);
                second[i] = T::from_f32(b * cos[i] + a * sin[i]);
            }
        }
    }
}
