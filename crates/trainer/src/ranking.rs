//! Losses of rankings: a query, texts, and how relevant each is.
//!
//! The score s of a text is the logit of one token at the decoder's first position (RankT5, Zhuang et al., 2022, arXiv 2210.10634), y its
//! label, from 0 up, and relevant above 0:
//!
//! ```text
//! pointwise  sum over texts of -log σ(s) of a relevant one, and of -log σ(-s) of another
//! pairwise   sum over pairs with y_i > y_j of log(1 + exp(s_j - s_i))
//! softmax    -sum over texts of y_i (s_i - log sum over texts of exp(s))
//! ```
//!
//! Each is the mean over the lists of a batch. `monot5` (Nogueira et al., 2020, arXiv 2003.06713) is a loss of single texts: the cross-entropy
//! of the first answer for a relevant text, of the second for another, and the mean over texts. With weights it is
//! `sum of w c / sum of w`, as `torch.nn.CrossEntropyLoss(weight=w)` has it; `pointwise` multiplies each text's part by its weight.
//!
//! A loss is a function of the scores alone. So a pass without activations computes these first, micro-batch by micro-batch. Their
//! derivatives are then the weights of the texts in an ordinary step. A list of any length trains in the memory of a micro-batch, with the
//! gradient of the uncut list.
//!
//! Invariants:
//! * Both passes have the same dropout masks: those of a text's index in the whole batch.
//! * The weights depend on the whole batch's lists in their order, on no cut and no number of processes.

use serde::{Deserialize, Serialize};
use text_metrics::ranking::Ranking as Ranked;

use crate::preference::{log_sigmoid, sigmoid};

/// A loss of rankings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankingLoss {
    /// The cross-entropy of one of two answers.
    Monot5,
    /// Each text alone.
    Pointwise,
    /// Each pair of texts of which one is more relevant.
    Pairwise,
    /// The whole list.
    Softmax,
}

impl RankingLoss {
    /// The losses with their names in `ranking.loss`.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("monot5", Self::Monot5),
        ("pointwise", Self::Pointwise),
        ("pairwise", Self::Pairwise),
        ("softmax", Self::Softmax),
    ];

    /// The loss of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(other, _)| *other == name).map(|(_, loss)| *loss)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, loss)| *loss == self).map_or("", |(name, _)| name)
    }

    /// Whether a score is the logit of one token. Otherwise it says which of two answers is likelier.
    pub fn is_of_logits(self) -> bool {
        self != Self::Monot5
    }

    /// Whether the texts of a query are compared with each other.
    pub fn is_of_lists(self) -> bool {
        matches!(self, Self::Pairwise | Self::Softmax)
    }
}

/// A loss with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// The loss.
    pub loss: RankingLoss,
    /// The weights of relevant texts and of others, for losses of single texts.
    pub weights: [f64; 2],
}

/// A text of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankedText {
    /// Whether a list begins with it.
    pub is_first: bool,
    /// Its label.
    pub gain: f64,
    /// What the loss is a function of: its logit, or the log-probability of the answer that it should have.
    pub value: f64,
    /// What it is ranked by.
    pub score: f64,
}

impl RankedText {
    pub(crate) const NUMBERS: usize = 4;

    /// All numbers, for a message to other processes; see [`RankedText::from_numbers`].
    pub(crate) fn numbers(&self) -> [f64; Self::NUMBERS] {
        [f64::from(u8::from(self.is_first)), self.gain, self.value, self.score]
    }

    /// The text of [`RankedText::numbers`].
    pub(crate) fn from_numbers([is_first, gain, value, score]: [f64; Self::NUMBERS]) -> Self {
        Self { is_first: is_first > 0.0, gain, value, score }
    }
}

/// What rows say beside sources and targets.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLabels<'a> {
    /// Whether each target is desirable, if the loss is one of such labels.
    pub desirable: &'a [bool],
    /// The numbers of texts of lists that follow each other, if the loss is one of rankings.
    pub lists: &'a [usize],
    /// The label of each of these texts, or the score of each row of two texts.
    pub gains: &'a [f64],
}

impl<'a> From<&'a Vec<bool>> for RowLabels<'a> {
    fn from(desirable: &'a Vec<bool>) -> Self {
        Self { desirable, ..Self::default() }
    }
}

impl RowLabels<'_> {
    /// The texts of the lists, without scores.
    pub(crate) fn texts(&self) -> Vec<RankedText> {
        let firsts = self.lists.iter().flat_map(|&length| (0..length).map(|at| at == 0));
        firsts.zip(self.gains).map(|(is_first, &gain)| RankedText { is_first, gain, ..RankedText::default() }).collect()
    }
}

/// The numbers of some lists.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankingStats {
    /// The loss.
    pub loss: f64,
    /// MRR@10, as trec_eval defines it.
    pub mrr: f64,
    /// NDCG@10.
    pub ndcg: f64,
    /// The number of lists.
    pub lists: u64,
}

/// The score of a text by the losses of both answers: the logarithm of the first one's share of both probabilities.
pub fn score_of_answers(losses: [f64; 2]) -> f64 {
    log_sigmoid(losses[1] - losses[0])
}

impl Ranking {
    /// Whether the step needs the values of texts: otherwise it minimises the cross-entropy of their answers as it is.
    pub fn weighs(&self) -> bool {
        self.loss.is_of_logits() || self.weights != [1.0; 2]
    }

    /// The loss of a batch, and the weight of each text's loss in the step that has its gradient: minus the derivative by its value.
    pub fn of_batch(&self, texts: &[RankedText]) -> (f64, Vec<f64>) {
        let lists: Vec<&[RankedText]> = lists(texts).collect();
        let count = lists.len().max(1) as f64;
        let (mut loss, mut weights) = (0.0, Vec::with_capacity(texts.len()));
        for list in lists {
            let (of_list, of_texts) = self.of_list(list);
            loss += of_list;
            weights.extend(of_texts);
        }
        let divisor = match self.loss {
            RankingLoss::Monot5 => texts.iter().map(|text| self.weight(text)).sum::<f64>(),
            _ => count,
        };
        // No text counts.
        let scale = if divisor > 0.0 { 1.0 / divisor } else { 0.0 };
        weights.iter_mut().for_each(|weight| *weight *= scale);
        (loss * scale, weights)
    }

    /// The loss of some lists, and how well their texts are ranked.
    pub fn stats(&self, texts: &[RankedText]) -> RankingStats {
        let mut ranked = Ranked::default();
        for list in lists(texts) {
            ranked.add(&list.iter().map(|text| (text.score, text.gain)).collect::<Vec<_>>());
        }
        let [mrr, ndcg] = ranked.means().unwrap_or_default();
        RankingStats { loss: self.of_batch(texts).0, mrr, ndcg, lists: ranked.queries() }
    }

    fn weight(&self, text: &RankedText) -> f64 {
        self.weights[usize::from(text.gain <= 0.0)]
    }

    /// The part of a list, and minus its derivative by the value of each text.
    fn of_list(&self, list: &[RankedText]) -> (f64, Vec<f64>) {
        let mut loss = 0.0;
        let mut weights = vec![0.0; list.len()];
        match self.loss {
            RankingLoss::Monot5 => {
                for (text, weight) in list.iter().zip(&mut weights) {
                    *weight = self.weight(text);
                    loss -= *weight * text.value;
                }
            }
            RankingLoss::Pointwise => {
                for (text, weight) in list.iter().zip(&mut weights) {
                    let (sign, scale) = (if text.gain > 0.0 { 1.0 } else { -1.0 }, self.weight(text));
                    loss -= scale * log_sigmoid(sign * text.value);
                    *weight = scale * sign * sigmoid(-sign * text.value);
                }
            }
            RankingLoss::Pairwise => {
                for (better, one) in list.iter().enumerate() {
                    for (worse, other) in list.iter().enumerate().filter(|(_, other)| one.gain > other.gain) {
                        let lead = one.value - other.value;
                        loss -= log_sigmoid(lead);
                        weights[better] += sigmoid(-lead);
                        weights[worse] -= sigmoid(-lead);
                    }
                }
            }
            RankingLoss::Softmax => {
                let most = list.iter().map(|text| text.value).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = list.iter().map(|text| (text.value - most).exp()).sum();
                let gains: f64 = list.iter().map(|text| text.gain.max(0.0)).sum();
                for (text, weight) in list.iter().zip(&mut weights) {
                    let gain = text.gain.max(0.0);
                    loss -= if gain > 0.0 { gain * (text.value - most - sum.ln()) } else { 0.0 };
                    *weight = gain - gains * (text.value - most).exp() / sum;
                }
            }
        }
        (loss, weights)
    }
}

/// The lists of some texts.
fn lists(texts: &[RankedText]) -> impl Iterator<Item = &[RankedText]> {
    texts.chunk_by(|_, next| !next.is_first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> Vec<RankedText> {
        let gains = [[2.0, 0.0, 1.0, 0.0], [0.0, 0.0, 3.0, 1.0]];
        let text = |at: usize| {
            let value = ((at * 37 % 11) as f64 - 5.0) / 3.0;
            RankedText { is_first: at.is_multiple_of(4), gain: gains.as_flattened()[at], value, score: value }
        };
        (0..8).map(text).collect()
    }

    #[test]
    fn weights_of_every_loss_are_minus_its_differences() {
        for (name, loss) in RankingLoss::NAMES {
            let of = Ranking { loss, weights: [3.0, 0.5] };
            let texts = texts();
            let (value, weights) = of.of_batch(&texts);
            assert!(value > 0.0, "{name}: {value}");
            for at in 0..texts.len() {
                let loss_at = |by: f64| {
                    let mut moved = texts.clone();
                    moved[at].value += by;
                    of.of_batch(&moved).0
                };
                let difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
                assert!((difference + weights[at]).abs() < 1e-9, "{name}, {at}: {difference}, {}", weights[at]);
            }
        }
    }

    #[test]
    fn a_list_without_a_relevant_text_or_with_one_text_teaches_no_comparison() {
        for loss in [RankingLoss::Pairwise, RankingLoss::Softmax] {
            let of = Ranking { loss, weights: [1.0; 2] };
            let one = RankedText { is_first: true, gain: 1.0, value: 0.3, score: 0.3 };
            let none = [RankedText { gain: 0.0, ..one }, RankedText { is_first: false, gain: 0.0, ..one }];
            for texts in [&[one][..], &none, &[]] {
                let (loss, weights) = of.of_batch(texts);
                assert!(loss.abs() < 1e-12 && weights.iter().all(|weight| weight.abs() < 1e-12), "{texts:?}");
            }
        }
    }

    #[test]
    fn lists_are_ranked_by_their_scores() {
        let text = |is_first, gain, score| RankedText { is_first, gain, value: score, score };
        let texts = [text(true, 0.0, 2.0), text(false, 1.0, 1.0), text(true, 1.0, 0.0)];
        let stats = Ranking { loss: RankingLoss::Softmax, weights: [1.0; 2] }.stats(&texts);
        assert_eq!((stats.mrr, stats.lists), (0.75, 2));
        assert!((stats.ndcg - (1.0 / 3_f64.log2() + 1.0) / 2.0).abs() < 1e-12);
    }
}
