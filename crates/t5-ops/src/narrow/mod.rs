//! Elements that are stored narrower than kernels compute with, and their conversion to f32: f16, and the codes of [`crate::Quantised`].
//!
//! Frozen weights stay as they are stored. A product widens a piece of them at a time, just before it is packed, so they
//! never exist wider than a panel. Widening is one product (for NF4's scales a product and a sum) of each element in f32:
//! the same bits with every instruction set.

pub(crate) mod tables;

use half::f16;
use tables::{NF4, absmax_map};

use crate::simd::{WIDTH, code_at, f16_to_f32, simd};

/// Elements of a block of NF4 that share a scale.
pub(crate) const BLOCK: usize = 64;
/// Blocks whose scales share a scale.
pub(crate) const GROUP: usize = 256;

/// Narrow elements, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Narrow<'a> {
    form: Form<'a>,
    /// Skips this many elements of the form.
    first: usize,
    count: usize,
}

/// The form in which they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Form<'a> {
    F16(&'a [f16]),
    Int8(Int8<'a>),
    Nf4(Nf4<'a>),
}

/// A signed code for each element, times the scale of its row.
#[derive(Clone, Copy)]
pub(crate) struct Int8<'a> {
    pub codes: &'a [u8],
    /// For each row an f32, little endian.
    pub scales: &'a [[u8; 4]],
    /// Elements of a row.
    pub width: usize,
}

/// Two codes a byte, the first in its upper half; element i belongs to block i / 64.
#[derive(Clone, Copy)]
pub(crate) struct Nf4<'a> {
    pub codes: &'a [u8],
    /// For each block a code of its scale.
    pub absmax: &'a [u8],
    /// For each group of blocks an f32, little endian.
    pub scales: &'a [[u8; 4]],
    /// Added to each scale.
    pub offset: f32,
}

impl Nf4<'_> {
    /// The scale of a block.
    pub(crate) fn scale(&self, map: &[f32; 256], block: usize) -> f32 {
        map[usize::from(self.absmax[block])] * f32::from_le_bytes(self.scales[block / GROUP]) + self.offset
    }
}

impl<'a> Narrow<'a> {
    /// All elements of a form, `count` of them.
    pub(crate) fn new(form: Form<'a>, count: usize) -> Self {
        let is_there = match form {
            Form::F16(data) => data.len() == count,
            Form::Int8(Int8 { codes, scales, width }) => codes.len() == count && scales.len() * width == count,
            Form::Nf4(Nf4 { codes, absmax, scales, .. }) => {
                let blocks = count.div_ceil(BLOCK);
                codes.len() == count.div_ceil(2) && absmax.len() == blocks && scales.len() == blocks.div_ceil(GROUP)
            }
        };
        assert!(is_there, "codes and scales of {count} elements");
        Self { form, first: 0, count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The elements from `first` on.
    pub(crate) fn skip(self, first: usize) -> Self {
        assert!(first <= self.count, "element {first} of {}", self.count);
        Self { first: self.first + first, count: self.count - first, ..self }
    }

    /// The elements, if they are numbers and not codes.
    pub(crate) fn f16(&self) -> Option<&'a [f16]> {
        match self.form {
            Form::F16(data) => Some(&data[self.first..][..self.count]),
            Form::Int8(_) | Form::Nf4(_) => None,
        }
    }

    /// Converts elements from `first` on to f32, as many as `to` has room for.
    pub(crate) fn widen(&self, first: usize, to: &mut [f32]) {
        assert!(first <= self.count && to.len() <= self.count - first, "{first} and {} of {}", to.len(), self.count);
        let first = self.first + first;
        match &self.form {
            Form::F16(data) => widen_f16(&data[first..][..to.len()], to),
            Form::Int8(int8) => {
                let (mut at, mut rest) = (first, to);
                while !rest.is_empty() {
                    let (row, place) = (at / int8.width, at % int8.width);
                    let (part, after) = rest.split_at_mut(rest.len().min(int8.width - place));
                    widen_int8(&int8.codes[at..][..part.len()], f32::from_le_bytes(int8.scales[row]), part);
                    (at, rest) = (at + part.len(), after);
                }
            }
            Form::Nf4(nf4) => widen_nf4(nf4, first, to),
        }
    }
}

simd! {
    fn widen_f16<S>(s, from: &[f16], to: &mut [f32]) {
        let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<WIDTH>(), to.as_chunks_mut::<WIDTH>());
        for (from, to) in from.iter().zip(to) {
            s.store(s.load_f16(from), to);
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = f16_to_f32(*from);
        }
    }

    fn widen_int8<S>(s, from: &[u8], scale: f32, to: &mut [f32]) {
        let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<WIDTH>(), to.as_chunks_mut::<WIDTH>());
        for (from, to) in from.iter().zip(to) {
            s.store(s.mul(s.load_i8(from), s.splat(scale)), to);
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = f32::from(*from as i8) * scale;
        }
    }

    fn widen_nf4<S>(s, nf4: &Nf4, first: usize, to: &mut [f32]) {
        let (map, table) = (absmax_map(), s.table(&NF4));
        let (mut at, mut rest) = (first, to);
        while !rest.is_empty() {
            let (part, after) = rest.split_at_mut(rest.len().min(BLOCK - at % BLOCK));
            let scale = nf4.scale(map, at / BLOCK);
            let single = at % 2;
            let (first, pairs) = part.split_at_mut(single);
            for to in first {
                *to = NF4[code_at(nf4.codes, at)] * scale;
            }
            let codes = &nf4.codes[(at + single) / 2..];
            let (chunks, last) = pairs.as_chunks_mut::<WIDTH>();
            let (of_chunks, of_last) = codes.split_at(chunks.len() * WIDTH / 2);
            for (codes, to) in of_chunks.as_chunks::<{ WIDTH / 2 }>().0.iter().zip(chunks) {
                s.store(s.mul(s.look_up(table, codes), s.splat(scale)), to);
            }
            for (place, to) in last.iter_mut().enumerate() {
                *to = NF4[code_at(of_last, place)] * scale;
            }
            (at, rest) = (at + single + pairs.len(), after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn every_f16_has_its_value() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut wide = vec![0.0; all.len()];
        Narrow::new(Form::F16(&all), all.len()).widen(0, &mut wide);
        for (x, got) in all.into_iter().zip(wide) {
            let expected = x.to_f32();
            assert!(got.to_bits() == expected.to_bits() || x.is_nan() && got.is_nan(), "{x:?}: {got}");
            assert!(f16_to_f32(x).to_bits() == expected.to_bits() || x.is_nan(), "{x:?}");
        }
    }

    #[test]
    fn any_stretch_of_codes_has_the_values_of_its_elements() {
        let (rows, width) = (37, 101);
        let count: usize = rows * width;
        let mut numbers = Numbers::new(3);
        let mut bytes = |n: usize| (0..n).map(|_| numbers.below(256) as u8).collect::<Vec<u8>>();
        let (codes, pairs, absmax) = (bytes(count), bytes(count.div_ceil(2)), bytes(count.div_ceil(BLOCK)));
        let scales: Vec<[u8; 4]> = (0..rows).map(|i| (0.01 * i as f32 - 0.1).to_le_bytes()).collect();
        let groups = count.div_ceil(BLOCK).div_ceil(GROUP);
        let int8 = Int8 { codes: &codes, scales: &scales, width };
        let nf4 = Nf4 { codes: &pairs, absmax: &absmax, scales: &scales[3..][..groups], offset: 0.3 };
        let of_int8 = |i: usize| f32::from(codes[i] as i8) * f32::from_le_bytes(scales[i / width]);
        let of_nf4 = |i: usize| NF4[code_at(&pairs, i)] * nf4.scale(absmax_map(), i / BLOCK);
        for (first, len) in [(0, count), (1, 300), (63, 66), (64, 64), (101, 101), (3000, 737), (7, 1), (9, 0)] {
            let mut wide = vec![0.0; len];
            for skipped in [0, first.min(5)] {
                Narrow::new(Form::Int8(int8), count).skip(skipped).widen(first - skipped, &mut wide);
                assert_eq!(wide, (first..first + len).map(of_int8).collect::<Vec<_>>(), "{first} {len}");
                Narrow::new(Form::Nf4(nf4), count).skip(skipped).widen(first - skipped, &mut wide);
                assert_eq!(wide, (first..first + len).map(of_nf4).collect::<Vec<_>>(), "{first} {len}");
            }
        }
    }
}
