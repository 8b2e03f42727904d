//! Losses of vectors of texts: an anchor, a text that belongs to it, and perhaps one that does not.
//!
//! With a, p and n the vectors of a row's anchor, positive and negative text, and c all positives and negatives of the batch:
//!
//! ```text
//! mnr      -log softmax over c of cos(a, c) / temperature, at the row's own p      (multiple negatives ranking, InfoNCE)
//! triplet  max(0, |a - p| - |a - n| + margin)
//! ```
//!
//! Each is the mean over the batch's rows. With sizes, it is the sum of the loss over vectors that are cut to each of them and scaled to length
//! 1 (Matryoshka representations). van den Oord et al., 2018 (arXiv 1807.03748); Henderson et al., 2017 (arXiv 1705.00652); Schroff et al.,
//! 2015 (arXiv 1503.03832); Kusupati et al., 2022 (arXiv 2205.13147). Values are those of sentence-transformers.
//!
//! A loss is a function of the vectors alone. So a pass without activations computes all vectors first, micro-batch by micro-batch. Their
//! gradients then enter an ordinary step, in which each micro-batch is computed again (Gao et al., 2021, arXiv 2101.06983). The sum is the
//! gradient of one uncut pass over the whole batch, in the memory of a micro-batch.
//!
//! Invariants:
//! * Both passes have the same dropout masks: those of a text's index in the whole batch.
//! * The gradient depends on the whole batch's vectors in their order, on no cut and no number of processes.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use t5::Pooling;

/// A loss of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContrastiveLoss {
    /// Multiple negatives ranking: the positive among all texts of the batch.
    Mnr,
    /// The positive is nearer than the negative by a margin.
    Triplet,
}

impl ContrastiveLoss {
    /// The losses with their names in `embedding.loss`.
    pub const NAMES: [(&'static str, Self); 2] = [("mnr", Self::Mnr), ("triplet", Self::Triplet)];

    /// The loss of this name.
    pub fn named(name: &str) -> Option<Self> {
        let name = if name == "infonce" { "mnr" } else { name };
        Self::NAMES.iter().find(|(other, _)| *other == name).map(|(_, loss)| *loss)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, loss)| *loss == self).map_or("", |(name, _)| name)
    }
}

/// A loss with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contrastive {
    /// The loss.
    pub loss: ContrastiveLoss,
    /// What cosines are divided by.
    pub temperature: f64,
    /// By how much a positive should be nearer than a negative.
    pub margin: f64,
    /// How a text's tokens become its vector.
    pub pooling: Pooling,
    /// Whether vectors are scaled to length 1 before the loss.
    pub normalizes: bool,
    /// The sizes that vectors are cut to, the loss being summed over them; none: they stay whole.
    pub sizes: Vec<usize>,
    /// Whether each row has a negative text.
    pub has_negatives: bool,
}

impl Default for Contrastive {
    fn default() -> Self {
        Contrastive {
            loss: ContrastiveLoss::Mnr,
            temperature: 0.05,
            margin: 5.0,
            pooling: Pooling::Mean,
            normalizes: false,
            sizes: Vec::new(),
            has_negatives: false,
        }
    }
}

/// The numbers of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContrastiveStats {
    /// The loss.
    pub loss: f64,
    /// The share of rows whose positive is nearer than all others.
    pub accuracy: f64,
}

/// How well the anchors of some rows find their own positives among all positives and negatives, by cosine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retrieval {
    /// The mean loss, of as many rows at a time as a step has.
    pub loss: f64,
    /// The share of rows whose positive is the first, and among the first ten.
    pub recall: [f64; 2],
    /// The mean of 1 / rank, and 0 beyond the tenth.
    pub mrr: f64,
    /// The mean of 1 / log2(1 + rank), and 0 beyond the tenth.
    pub ndcg: f64,
}

impl Contrastive {
    /// The scores of rows by the vectors of their texts (T, D), as [`Contrastive::of_batch`] takes them. Of equal cosines, the first comes first.
    pub fn retrieval(&self, vectors: &[f64], width: usize, rows_of_a_step: usize) -> Retrieval {
        let of_a_row = self.texts_of_a_row();
        let rows = self.rows(vectors.len() / width.max(1));
        let mut scores = Retrieval::default();
        for step in vectors.chunks(rows_of_a_step.max(1) * of_a_row * width) {
            scores.loss += self.compute(step, width, false).0.loss * self.rows(step.len() / width) as f64 / rows as f64;
        }
        let lengths: Vec<f64> = vectors.chunks(width).map(|vector| dot(vector, vector).sqrt().max(1e-12)).collect();
        let cosine = |one: usize, other: usize| {
            let of = |text: usize| &vectors[text * width..][..width];
            dot(of(one), of(other)) / (lengths[one] * lengths[other])
        };
        for row in 0..rows {
            let (anchor, own) = (row * of_a_row, row * of_a_row + 1);
            let score = cosine(anchor, own);
            let candidates = (0..rows * of_a_row).filter(|text| text % of_a_row != 0 && *text != own);
            let before = candidates.filter(|&text| {
                let other = cosine(anchor, text);
                other > score || other == score && text < own
            });
            let rank = 1.0 + before.count() as f64;
            let share = 1.0 / rows as f64;
            scores.recall[0] += if rank <= 1.0 { share } else { 0.0 };
            if rank <= 10.0 {
                scores.recall[1] += share;
                scores.mrr += share / rank;
                scores.ndcg += share / (1.0 + rank).log2();
            }
        }
        scores
    }

    /// The texts of a row.
    pub fn texts_of_a_row(&self) -> usize {
        if self.has_negatives { 3 } else { 2 }
    }

    /// The bytes of the vectors of so many texts, and of their gradients, while a loss is computed.
    pub fn bytes(&self, texts: usize, width: usize) -> u64 {
        (4 * width * size_of::<f64>()).saturating_mul(texts) as u64
    }

    /// The loss of a batch, and its gradient by each vector. `vectors` (T, D) has the texts of one row after the other: anchor, positive, and
    /// negative if there is one.
    pub fn of_batch(&self, vectors: &[f64], width: usize) -> (ContrastiveStats, Vec<f64>) {
        self.compute(vectors, width, true)
    }

    /// As [`Contrastive::of_batch`], with gradients of zero if they are not wanted.
    fn compute(&self, vectors: &[f64], width: usize, wants: bool) -> (ContrastiveStats, Vec<f64>) {
        let mut gradients = vec![0.0; vectors.len()];
        let mut stats = ContrastiveStats::default();
        if vectors.is_empty() {
            return (stats, gradients);
        }
        let whole = [width];
        let sizes = if self.sizes.is_empty() { &whole[..] } else { &self.sizes };
        for &size in sizes {
            let size = size.min(width);
            let is_scaled = self.normalizes || self.loss == ContrastiveLoss::Mnr || !self.sizes.is_empty();
            let (of_size, mut lengths) = (vectors.chunks(width).flat_map(|vector| &vector[..size]), Vec::new());
            let mut cut: Vec<f64> = of_size.copied().collect();
            for vector in cut.chunks_mut(size) {
                let length = if is_scaled { dot(vector, vector).sqrt().max(1e-12) } else { 1.0 };
                vector.iter_mut().for_each(|value| *value /= length);
                lengths.push(length);
            }
            let (of_cut, by_cut) = match self.loss {
                ContrastiveLoss::Mnr => self.mnr(&cut, size, wants),
                ContrastiveLoss::Triplet => self.triplet(&cut, size, wants),
            };
            stats = ContrastiveStats { loss: stats.loss + of_cut.loss, ..of_cut };
            if !wants {
                continue;
            }
            for (text, (unit, by_unit)) in cut.chunks(size).zip(by_cut.chunks(size)).enumerate() {
                // Of u = v / |v|: (du - u (u · du)) / |v|.
                let along = if is_scaled { dot(unit, by_unit) } else { 0.0 };
                let gradient = gradients[text * width..].iter_mut();
                gradient.zip(unit.iter().zip(by_unit)).for_each(|(to, (unit, by_unit))| {
                    *to += (by_unit - unit * along) / lengths[text];
                });
            }
        }
        (stats, gradients)
    }

    /// The rows of a batch of so many texts.
    fn rows(&self, texts: usize) -> usize {
        texts / self.texts_of_a_row()
    }

    fn mnr(&self, vectors: &[f64], size: usize, wants: bool) -> (ContrastiveStats, Vec<f64>) {
        let (of_a_row, texts) = (self.texts_of_a_row(), vectors.len() / size);
        let rows = self.rows(texts);
        let at = |text: usize| -> Range<usize> { text * size..(text + 1) * size };
        let candidates: Vec<usize> = (0..texts).filter(|text| text % of_a_row != 0).collect();
        let mut gradients = vec![0.0; vectors.len()];
        let (mut loss, mut nearest) = (0.0, 0_usize);
        let mut weights = vec![0.0; candidates.len()];
        for row in 0..rows {
            let anchor = of_a_row * row;
            for (weight, &text) in weights.iter_mut().zip(&candidates) {
                *weight = dot(&vectors[at(anchor)], &vectors[at(text)]) / self.temperature;
            }
            // Each row has all its texts but the anchor among them.
            let of_own = row * (of_a_row - 1);
            let (most, score) = (weights.iter().copied().fold(f64::NEG_INFINITY, f64::max), weights[of_own]);
            let is_nearest = weights.iter().enumerate().all(|(other, weight)| other == of_own || *weight < score);
            nearest += usize::from(is_nearest);
            let sum: f64 = weights.iter().map(|weight| (weight - most).exp()).sum();
            loss += most + sum.ln() - score;
            if !wants {
                continue;
            }
            let mut by_anchor = vec![0.0; size];
            for (place, (weight, &text)) in weights.iter().zip(&candidates).enumerate() {
                let share = (weight - most).exp() / sum - if place == of_own { 1.0 } else { 0.0 };
                let scale = share / (self.temperature * rows as f64);
                by_anchor.iter_mut().zip(&vectors[at(text)]).for_each(|(to, value)| *to += scale * value);
                gradients[at(text)].iter_mut().zip(&vectors[at(anchor)]).for_each(|(to, value)| *to += scale * value);
            }
            gradients[at(anchor)].iter_mut().zip(by_anchor).for_each(|(to, value)| *to += value);
        }
        (ContrastiveStats { loss: loss / rows as f64, accuracy: nearest as f64 / rows as f64 }, gradients)
    }

    fn triplet(&self, vectors: &[f64], size: usize, wants: bool) -> (ContrastiveStats, Vec<f64>) {
        let rows = self.rows(vectors.len() / size);
        let mut gradients = vec![0.0; vectors.len()];
        let (mut loss, mut nearer) = (0.0, 0_usize);
        for (row, gradients) in vectors.chunks(3 * size).zip(gradients.chunks_mut(3 * size)) {
            let (anchor, others) = row.split_at(size);
            let others = [&others[..size], &others[size..]];
            let distances = others.map(|other| {
                let squares: f64 = anchor.iter().zip(other).map(|(a, b)| (a - b + 1e-6).powi(2)).sum();
                squares.sqrt()
            });
            nearer += usize::from(distances[0] < distances[1]);
            let of_row = distances[0] - distances[1] + self.margin;
            if of_row <= 0.0 {
                continue;
            }
            loss += of_row;
            if !wants {
                continue;
            }
            for (text, sign) in [1.0, -1.0].into_iter().enumerate() {
                for column in 0..size {
                    let part = sign * (anchor[column] - others[text][column] + 1e-6) / (distances[text] * rows as f64);
                    gradients[column] += part;
                    gradients[(text + 1) * size + column] -= part;
                }
            }
        }
        (ContrastiveStats { loss: loss / rows as f64, accuracy: nearer as f64 / rows as f64 }, gradients)
    }
}

/// Summed in an order that depends on the length alone.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (ones, others) = (one.as_chunks::<LANES>(), other.as_chunks::<LANES>());
    for (one, other) in ones.0.iter().zip(others.0) {
        for lane in 0..LANES {
            sums[lane] += one[lane] * other[lane];
        }
    }
    let rest: f64 = ones.1.iter().zip(others.1).map(|(one, other)| one * other).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of some texts, of unlike lengths.
    fn vectors(texts: usize, width: usize) -> Vec<f64> {
        (0..texts * width).map(|at| ((at * 7919 % 101) as f64 - 50.0) / 37.0 + 0.01 * at as f64).collect()
    }

    #[test]
    fn gradients_of_every_loss_are_those_of_its_differences() {
        let width = 11;
        for has_negatives in [false, true] {
            for (loss, sizes) in [
                (ContrastiveLoss::Mnr, vec![]),
                (ContrastiveLoss::Mnr, vec![11, 4]),
                (ContrastiveLoss::Triplet, vec![]),
                (ContrastiveLoss::Triplet, vec![3, 8]),
            ] {
                if loss == ContrastiveLoss::Triplet && !has_negatives {
                    continue;
                }
                for normalizes in [false, true] {
                    let of = Contrastive {
                        loss,
                        sizes: sizes.clone(),
                        normalizes,
                        has_negatives,
                        temperature: 0.3,
                        ..Contrastive::default()
                    };
                    let values = vectors(4 * of.texts_of_a_row(), width);
                    let (stats, gradients) = of.of_batch(&values, width);
                    assert!(stats.loss > 0.0 && (0.0..=1.0).contains(&stats.accuracy));
                    for at in (0..values.len()).step_by(5) {
                        let loss_at = |by: f64| {
                            let mut moved = values.clone();
                            moved[at] += by;
                            of.of_batch(&moved, width).0.loss
                        };
                        let difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
                        assert!(
                            (difference - gradients[at]).abs() < 1e-7,
                            "{of:?}, {at}: {difference}, {}",
                            gradients[at]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_of_own_positives_are_counted_with_the_first_of_equal_ones_first() {
        let third = 1.0 / 3.0;
        // The anchors find their positives in places 1, 2 and 1.
        let texts = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.2], [1.0, 2.0], [0.5, 1.0]];
        let found = Contrastive::default().retrieval(texts.as_flattened(), 2, 2);
        assert!((found.recall[0] - 2.0 * third).abs() < 1e-12 && (found.recall[1] - 1.0).abs() < 1e-12, "{found:?}");
        assert!((found.mrr - 2.5 * third).abs() < 1e-12, "{found:?}");
        assert!((found.ndcg - third * (2.0 + 1.0 / 3_f64.log2())).abs() < 1e-12, "{found:?}");
        let all_equal = Contrastive::default().retrieval(&[1.0; 12], 2, 8);
        assert_eq!(all_equal.recall, [third, 1.0]);
        assert!((all_equal.mrr - third * (1.0 + 0.5 + third)).abs() < 1e-12);
        let ndcg = third * (1.0 + 1.0 / 3_f64.log2() + 0.5);
        assert!((all_equal.ndcg - ndcg).abs() < 1e-12);
        assert!((all_equal.loss - 3_f64.ln()).abs() < 1e-12);
    }
}
