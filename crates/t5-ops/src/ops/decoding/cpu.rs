//! Scores and copies of rows on the CPU.

use candle_core::{Result, Tensor};

use crate::parallel::{Shared, for_each_part};
use crate::storage::{Element, View, update, with_element};
use crate::vector::{LANES, exp, sum, vectorized};

pub(super) fn scores(logits: &Tensor, normalised: bool) -> Result<Vec<f32>> {
    let logits = logits.contiguous()?;
    let (rows, width) = logits.dims2()?;
    let mut scores = vec![0f32; rows * width];
    let (shared, view) = (Shared::new(&mut scores), View::new(&logits)?);
    with_element!(logits.dtype(), T, {
        let logits = view.slice::<T>()?;
        for_each_part(rows, |row| {
            // SAFETY: each row belongs to one part.
            let to = unsafe { shared.slice(row * width, width) };
            widen(&logits[row * width..][..width], to);
            if normalised {
                log_softmax(to);
            }
        });
    });
    Ok(scores)
}

vectorized! {
    fn widen<T: Element>(x: &[T], to: &mut [f32]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = x.to_f32();
        }
    }

    fn log_softmax(x: &mut [f32]) {
        let mut largest = [f32::NEG_INFINITY; LANES];
        let (whole, rest) = x.as_chunks::<LANES>();
        for part in whole {
            for (largest, &x) in largest.iter_mut().zip(part) {
                *largest = if x > *largest { x } else { *largest };
            }
        }
        let largest = largest.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
        let total = sum(x, |x| exp(x - largest));
        let shift = largest + total.ln();
        for x in x {
            *x -= shift;
        }
    }
}

pub(super) fn copy_rows(cache: &Tensor, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
    let (_, length, width) = cache.dims3()?;
    with_element!(cache.dtype(), T, {
        update::<T, _>("copy_rows", cache, &[], |data| {
            for (from, to) in pairs.iter().map(|(from, to)| (from * length * width, to * length * width)) {
                data.copy_within(from..from + positions * width, to);
            }
            Ok(())
        })
    })
}
