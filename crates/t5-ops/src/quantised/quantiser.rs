//! Conversion of numbers to codes, some rows at a time.

use candle_core::{Result, bail};

use super::{Precision, Quantisation};
use crate::narrow::tables::{absmax_map, nearest, nearest_of_nf4};
use crate::narrow::{BLOCK, GROUP};
use crate::vector::vectorized;

/// Quantises a weight in pieces of its elements. It holds the scales and at most one block of elements, but no codes.
///
/// The codes are a function of the elements alone, however they are cut into pieces.
#[derive(Debug)]
pub struct Quantiser {
    quantisation: Quantisation,
    /// Elements that do not fill a row (int8) or a block (NF4) yet.
    pending: Vec<f32>,
    /// The largest magnitude of each row or block so far.
    absmax: Vec<f32>,
    /// Elements so far.
    count: usize,
}

impl Quantiser {
    /// A quantiser of a weight that has yet to be read.
    pub fn new(quantisation: Quantisation) -> Self {
        Self { quantisation, pending: Vec::new(), absmax: Vec::new(), count: 0 }
    }

    /// Returns the precision and the shape.
    pub fn quantisation(&self) -> Quantisation {
        self.quantisation
    }

    /// Takes the next elements, row after row, and appends the codes that they complete.
    ///
    /// # Errors
    /// A value that is not finite, or more values than the weight has.
    pub fn values(&mut self, values: &[f32], codes: &mut Vec<u8>) -> Result<()> {
        let (rows, cols) = self.quantisation.shape();
        if let Some(place) = values.iter().position(|x| !x.is_finite()) {
            let (at, value) = (self.count + place, values[place]);
            bail!("element ({}, {}): expected a finite number, got {value}", at / cols.max(1), at % cols.max(1))
        }
        self.count += values.len();
        if self.count > rows * cols {
            bail!("a weight of {rows} x {cols}: expected {} elements, got {}", rows * cols, self.count)
        }
        let unit = self.unit();
        let mut rest = values;
        while self.pending.len() + rest.len() >= unit && !rest.is_empty() {
            let (now, after) = rest.split_at(unit - self.pending.len());
            if self.pending.is_empty() {
                self.unit_of(now, codes);
            } else {
                self.pending.extend_from_slice(now);
                let pending = std::mem::take(&mut self.pending);
                self.unit_of(&pending, codes);
            }
            rest = after;
        }
        self.pending.extend_from_slice(rest);
        Ok(())
    }

    /// Elements that share a scale.
    fn unit(&self) -> usize {
        match self.quantisation.precision() {
            Precision::Int8 => self.quantisation.shape().1,
            Precision::Nf4 => BLOCK,
        }
    }

    /// Appends the codes of elements that share a scale.
    fn unit_of(&mut self, values: &[f32], codes: &mut Vec<u8>) {
        let absmax = largest(values);
        self.absmax.push(absmax);
        let start = codes.len();
        match self.quantisation.precision() {
            Precision::Int8 => {
                // For a tiny magnitude the inverse is infinite: such a row has codes of 0 and 127 only, which are as near.
                let inverse = if absmax == 0.0 { 0.0 } else { 127.0 / absmax };
                codes.resize(start + values.len(), 0);
                int8_codes(values, inverse, &mut codes[start..]);
            }
            Precision::Nf4 => {
                let inverse = 1.0 / absmax.max(1e-38);
                let mut single = [nearest_of_nf4(0.0); BLOCK];
                nf4_codes(values, inverse, &mut single[..values.len()]);
                let pairs = &single.as_chunks::<2>().0[..values.len().div_ceil(2)];
                codes.extend(pairs.iter().map(|[first, second]| first << 4 | second));
            }
        }
    }

    /// Appends the remaining codes, and the scales.
    ///
    /// # Panics
    /// If values are missing.
    pub fn finish(mut self, bytes: &mut Vec<u8>) {
        let (rows, cols) = self.quantisation.shape();
        assert_eq!(self.count, rows * cols, "all elements of a weight");
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.unit_of(&pending, bytes);
        }
        match self.quantisation.precision() {
            Precision::Int8 => {
                // Rows without elements have scales, too.
                self.absmax.resize(rows, 0.0);
                bytes.extend(self.absmax.iter().flat_map(|absmax| (absmax / 127.0).to_le_bytes()));
            }
            Precision::Nf4 => {
                let (absmax, scales, offset) = double_quantised(&self.absmax);
                bytes.extend(absmax);
                bytes.extend(scales.into_iter().chain([offset]).flat_map(f32::to_le_bytes));
            }
        }
    }
}

vectorized! {
    fn largest(values: &[f32]) -> f32 {
        values.iter().fold(0f32, |most, x| if x.abs() > most { x.abs() } else { most })
    }

    fn int8_codes(values: &[f32], inverse: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }

    fn nf4_codes(values: &[f32], inverse: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = nearest_of_nf4((x * inverse).clamp(-1.0, 1.0));
        }
    }
}

/// The codes of scales minus their mean, in groups; the groups' own scales; the mean.
fn double_quantised(absmax: &[f32]) -> (Vec<u8>, Vec<f32>, f32) {
    let sum: f64 = absmax.iter().map(|&x| f64::from(x)).sum();
    let offset = (sum / absmax.len().max(1) as f64) as f32;
    let (mut codes, mut scales) = (Vec::with_capacity(absmax.len()), Vec::new());
    for group in absmax.chunks(GROUP) {
        let scale = group.iter().fold(0f32, |most, x| most.max((x - offset).abs()));
        let inverse = 1.0 / scale.max(1e-38);
        let code = |x: &f32| nearest(absmax_map(), ((x - offset) * inverse).clamp(-1.0, 1.0));
        codes.extend(group.iter().map(code));
        scales.push(scale);
    }
    (codes, scales, offset)
}
