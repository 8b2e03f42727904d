//! Losses of vectors of texts: an anchor, a text that belongs to it, and perhaps one that does not.
//!
//! With a, p and n the vectors of a row's anchor, positive and negative text, and c all positives and negatives of the batch:
//!
//! ```text
//! mnr      -log softmax over c of cos(a, c) / temperature, at the row's own p      (multiple negatives ranking, InfoNCE)
//! triplet  max(0, |a - p| - |a - n| + margin)
//! cosine   (cos(a, p) - y)²                                                          (y: the row's score)
//! cosent   log(1 + sum over rows i, j with y_i > y_j of exp((cos_j - cos_i) / temperature)), for the whole batch
//! ```
//!
//! All but `cosent` are the mean over the batch's rows. With sizes, it is the sum of the loss over vectors that are cut to each of them and scaled to length
//! 1 (Matryoshka representations). van den Oord et al., 2018 (arXiv 1807.03748); Henderson et al., 2017 (arXiv 1705.00652); Schroff et al.,
//! 2015 (arXiv 1503.03832); Su, 2022 (CoSENT); Kusupati et al., 2022 (arXiv 2205.13147). Values are those of sentence-transformers.
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
use text_metrics::numbers::Numbers;
use text_metrics::searches::CUTS;

use crate::error::{Error, Result};
use crate::stats::ContrastiveStats;

/// A loss of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContrastiveLoss {
    /// Multiple negatives ranking: the positive among all texts of the batch.
    Mnr,
    /// The positive is nearer than the negative by a margin.
    Triplet,
    /// The cosine of both texts is the row's score.
    Cosine,
    /// Cosines have the order of the rows' scores.
    Cosent,
}

impl ContrastiveLoss {
    /// The losses with their names in `embedding.loss`.
    pub const NAMES: [(&'static str, Self); 4] =
        [("mnr", Self::Mnr), ("triplet", Self::Triplet), ("cosine", Self::Cosine), ("cosent", Self::Cosent)];

    /// The loss of this name.
    pub fn named(name: &str) -> Option<Self> {
        let name = if name == "infonce" { "mnr" } else { name };
        Self::NAMES.iter().find(|(other, _)| *other == name).map(|(_, loss)| *loss)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, loss)| *loss == self).map_or("", |(name, _)| name)
    }

    /// Whether rows have a score beside both texts.
    pub fn has_scores(self) -> bool {
        matches!(self, Self::Cosine | Self::Cosent)
    }

    /// Whether cosines are divided by a temperature.
    pub fn has_temperature(self) -> bool {
        matches!(self, Self::Mnr | Self::Cosent)
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
    /// What the rows' scores are divided by, to be cosines.
    pub largest_score: f64,
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
            largest_score: 1.0,
        }
    }
}

/// How the cosines of pairs agree with the scores of their rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Agreement {
    /// The mean loss, of as many rows at a time as a step has.
    pub loss: f64,
    /// Pearson's correlation.
    pub pearson: f64,
    /// Spearman's correlation.
    pub spearman: f64,
}

/// How well the anchors of some rows find their own positives among all positives and negatives, by cosine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retrieval {
    /// The mean loss, of as many rows at a time as a step has.
    pub loss: f64,
    /// The share of rows whose positive is among the first, by [`CUTS`].
    pub recall: [f64; CUTS.len()],
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
            let of_step = self.compute((step, width), &[], false).0.loss;
            scores.loss += of_step * self.rows(step.len() / width) as f64 / rows as f64;
        }
        let cosine = cosines(vectors, width);
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
            for (recall, cut) in scores.recall.iter_mut().zip(CUTS) {
                *recall += if rank <= cut as f64 { share } else { 0.0 };
            }
            if rank <= 10.0 {
                scores.mrr += share / rank;
                scores.ndcg += share / (1.0 + rank).log2();
            }
        }
        scores
    }

    /// How the cosines of rows agree with their scores; see [`Contrastive::retrieval`].
    ///
    /// # Errors
    /// As [`Contrastive::check_scores`].
    pub fn agreement(&self, vectors: &[f64], scores: &[f64], rows_of_a_step: usize) -> Result<Agreement> {
        self.check_scores(scores)?;
        let (rows, width) = (scores.len(), vectors.len() / (2 * scores.len()).max(1));
        let of_a_step = rows_of_a_step.max(1);
        let steps = vectors.chunks((2 * of_a_step * width).max(1)).zip(scores.chunks(of_a_step));
        let loss = steps.map(|(step, scores)| {
            self.compute((step, width), scores, false).0.loss * scores.len() as f64 / rows as f64
        });
        let (loss, cosine) = (loss.sum(), cosines(vectors, width));
        let mut numbers = Numbers::default();
        scores.iter().enumerate().for_each(|(row, score)| numbers.add(cosine(2 * row, 2 * row + 1), *score));
        Ok(Agreement { loss, pearson: numbers.pearson(), spearman: numbers.spearman() })
    }

    /// Refuses scores that cannot be cosines, where the loss compares them.
    ///
    /// # Errors
    /// Names `embedding.largest_score`.
    pub fn check_scores(&self, scores: &[f64]) -> Result<()> {
        let is_of_cosines = self.loss == ContrastiveLoss::Cosine;
        match scores.iter().find(|score| is_of_cosines && score.abs() > self.largest_score) {
            Some(score) => {
                let expected = "at least the largest score of the rows, whose quotients are cosines";
                Err(Error::invalid_option(
                    "embedding.largest_score",
                    expected,
                    format!("{} beside a score of {score}", self.largest_score),
                ))
            }
            None => Ok(()),
        }
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
    /// negative if there is one. `scores` has the number of each row, for losses that compare with it.
    pub fn of_batch(&self, (vectors, width): (&[f64], usize), scores: &[f64]) -> (ContrastiveStats, Vec<f64>) {
        self.compute((vectors, width), scores, true)
    }

    /// As [`Contrastive::of_batch`], with gradients of zero if they are not wanted.
    fn compute(&self, (vectors, width): (&[f64], usize), scores: &[f64], wants: bool) -> (ContrastiveStats, Vec<f64>) {
        let mut gradients = vec![0.0; vectors.len()];
        let mut stats = ContrastiveStats::default();
        if vectors.is_empty() {
            return (stats, gradients);
        }
        let whole = [width];
        let sizes = if self.sizes.is_empty() { &whole[..] } else { &self.sizes };
        for &size in sizes {
            let size = size.min(width);
            let is_scaled = self.normalizes || self.loss != ContrastiveLoss::Triplet || !self.sizes.is_empty();
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
                ContrastiveLoss::Cosine | ContrastiveLoss::Cosent => self.of_scores((&cut, size), scores),
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
        (ContrastiveStats { loss: loss / rows as f64, accuracy: Some(nearest as f64 / rows as f64) }, gradients)
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
        (ContrastiveStats { loss: loss / rows as f64, accuracy: Some(nearer as f64 / rows as f64) }, gradients)
    }

    /// Of vectors of length 1.
    fn of_scores(&self, (vectors, size): (&[f64], usize), scores: &[f64]) -> (ContrastiveStats, Vec<f64>) {
        let pairs = || vectors.chunks(2 * size).map(|pair| pair.split_at(size));
        let cosines: Vec<f64> = pairs().map(|(anchor, other)| dot(anchor, other)).collect();
        let (loss, by_cosine) = match self.loss {
            ContrastiveLoss::Cosent => self.cosent(&cosines, scores),
            _ => {
                let rows = cosines.len() as f64;
                let errors = cosines.iter().zip(scores).map(|(cosine, score)| cosine - score / self.largest_score);
                let errors: Vec<f64> = errors.collect();
                let loss = errors.iter().map(|error| error * error).sum::<f64>() / rows;
                (loss, errors.into_iter().map(|error| 2.0 * error / rows).collect())
            }
        };
        let mut gradients = Vec::with_capacity(vectors.len());
        for ((anchor, other), by_cosine) in pairs().zip(by_cosine) {
            gradients.extend(other.iter().chain(anchor).map(|value| by_cosine * value));
        }
        (ContrastiveStats { loss, accuracy: None }, gradients)
    }

    /// The loss of the order of cosines, and its derivative by each.
    fn cosent(&self, cosines: &[f64], scores: &[f64]) -> (f64, Vec<f64>) {
        let pairs = || {
            let of_row = |above: usize| (0..cosines.len()).map(move |below| (above, below));
            let all = (0..cosines.len()).flat_map(of_row).filter(|&(above, below)| scores[above] > scores[below]);
            all.map(|(above, below)| (above, below, (cosines[below] - cosines[above]) / self.temperature))
        };
        // One term is exp(0).
        let most = pairs().map(|(.., value)| value).fold(0.0, f64::max);
        let sum = (-most).exp() + pairs().map(|(.., value)| (value - most).exp()).sum::<f64>();
        let mut by_cosine = vec![0.0; cosines.len()];
        for (above, below, value) in pairs() {
            let share = (value - most).exp() / (sum * self.temperature);
            by_cosine[below] += share;
            by_cosine[above] -= share;
        }
        (most + sum.ln(), by_cosine)
    }
}

/// The cosine of two of some texts, by their vectors.
fn cosines(vectors: &[f64], width: usize) -> impl Fn(usize, usize) -> f64 {
    let length = |vector: &[f64]| dot(vector, vector).sqrt().max(1e-12);
    let lengths: Vec<f64> = vectors.chunks(width.max(1)).map(length).collect();
    move |one, other| {
        let of = |text: usize| &vectors[text * width..][..width];
        dot(of(one), of(other)) / (lengths[one] * lengths[other])
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
                (ContrastiveLoss::Cosine, vec![]),
                (ContrastiveLoss::Cosine, vec![5, 11]),
                (ContrastiveLoss::Cosent, vec![]),
            ] {
                if has_negatives == loss.has_scores() && loss != ContrastiveLoss::Mnr {
                    continue;
                }
                for normalizes in [false, true] {
                    let of = Contrastive {
                        loss,
                        sizes: sizes.clone(),
                        normalizes,
                        has_negatives,
                        temperature: 0.3,
                        largest_score: 5.0,
                        ..Contrastive::default()
                    };
                    let scores = [4.0, -1.0, 2.5, 4.0];
                    let values = vectors(4 * of.texts_of_a_row(), width);
                    let (stats, gradients) = of.of_batch((&values, width), &scores);
                    assert!(stats.loss > 0.0 && stats.accuracy.is_none() == loss.has_scores());
                    assert!((0.0..=1.0).contains(&stats.accuracy.unwrap_or_default()));
                    for at in (0..values.len()).step_by(5) {
                        let loss_at = |by: f64| {
                            let mut moved = values.clone();
                            moved[at] += by;
                            of.of_batch((&moved, width), &scores).0.loss
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
    fn cosines_agree_with_their_scores_in_order_and_scores_beyond_the_largest_are_refused() {
        let texts = [[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [1.0, 1.0], [1.0, 0.0]];
        let of = Contrastive { loss: ContrastiveLoss::Cosine, largest_score: 5.0, ..Contrastive::default() };
        let agreement = |scores: &[f64]| of.agreement(texts.as_flattened(), scores, 2);
        let found = agreement(&[5.0, 0.0, 4.0]).unwrap();
        let error = 0.5_f64.sqrt() - 0.8;
        assert!((found.loss - error * error / 3.0).abs() < 1e-12 && found.pearson > 0.99, "{found:?}");
        assert!((found.spearman - 1.0).abs() < 1e-12, "{found:?}");
        let refused = agreement(&[5.0, 0.0, 5.5]).unwrap_err().to_string();
        assert!(refused.contains("embedding.largest_score") && refused.contains("5.5"), "{refused}");
        // An order has no bound.
        let order = Contrastive { loss: ContrastiveLoss::Cosent, ..of };
        assert!(order.agreement(texts.as_flattened(), &[5.0, 0.0, 5.5], 8).is_ok());
    }

    #[test]
    fn ranks_of_own_positives_are_counted_with_the_first_of_equal_ones_first() {
        let third = 1.0 / 3.0;
        // The anchors find their positives in places 1, 2 and 1.
        let texts = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.2], [1.0, 2.0], [0.5, 1.0]];
        let found = Contrastive::default().retrieval(texts.as_flattened(), 2, 2);
        let expected = [2.0 * third, 1.0, 1.0, 1.0, 1.0, 1.0];
        assert!(found.recall.iter().zip(expected).all(|(got, of)| (got - of).abs() < 1e-12), "{found:?}");
        assert!((found.mrr - 2.5 * third).abs() < 1e-12, "{found:?}");
        assert!((found.ndcg - third * (2.0 + 1.0 / 3_f64.log2())).abs() < 1e-12, "{found:?}");
        let all_equal = Contrastive::default().retrieval(&[1.0; 12], 2, 8);
        assert_eq!(all_equal.recall[..2], [third, 1.0]);
        assert!((all_equal.mrr - third * (1.0 + 0.5 + third)).abs() < 1e-12);
        let ndcg = third * (1.0 + 1.0 / 3_f64.log2() + 0.5);
        assert!((all_equal.ndcg - ndcg).abs() < 1e-12);
        assert!((all_equal.loss - 3_f64.ln()).abs() < 1e-12);
    }
}
