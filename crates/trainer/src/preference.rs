//! Losses of preferences: a pair of answers to one source, of which one was chosen, or one answer that is desirable or not.
//!
//! With p and r the log-probabilities of an answer under the model and under its reference, T its tokens, a = p / T, and c and x the chosen
//! and the rejected answer:
//!
//! ```text
//! dpo    -log σ(β ((p_c - r_c) - (p_x - r_x)))
//! simpo  -log σ(β (a_c - a_x) - γ)
//! orpo   -β log σ(log odds(a_c) - log odds(a_x)) + mean cross-entropy of the chosen tokens,  odds(a) = eᵃ / (1 - eᵃ)
//! kto    1 - σ(β ((p - r) - z)) of a desirable answer, 1 - σ(β (z - (p - r))) of another, each times its weight
//! ```
//!
//! z is the mean of p - r over the batch's answers, each to the source after it, and at least 0: an estimate of how far the model has moved. It
//! is a constant, without a gradient.
//!
//! Rafailov et al., 2023 (arXiv 2305.18290); Meng et al., 2024 (arXiv 2405.14734); Hong et al., 2024 (arXiv 2403.07691);
//! Ethayarajh et al., 2024 (arXiv 2402.01306). Each is the mean over the batch's rows. Rewards are β (p - r), and β a without a reference.
//!
//! Each is a function of the answers' log-probabilities alone. So a pass without gradients computes these first. What they say is then
//! the weight of each answer's cross-entropy in an ordinary step, which keeps all levers of memory. The alternative, both answers in one
//! graph, holds twice the activations.
//!
//! Invariants:
//! * The weights depend on the whole batch's pairs in their order, on no cut and no number of processes.
//! * The reference is the model without its adapter, so it takes no memory, or a frozen model beside it ([`crate::Trainer::compare_with`]).

use serde::{Deserialize, Serialize};

/// A loss of pairs of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceLoss {
    /// Direct preference optimization.
    Dpo,
    /// Odds ratio preference optimization.
    Orpo,
    /// Simple preference optimization.
    Simpo,
    /// Kahneman-Tversky optimization.
    Kto,
}

/// A row of the table of losses.
struct Row {
    loss: PreferenceLoss,
    name: &'static str,
    /// The usual β.
    beta: f64,
    /// Whether the answers are compared with those of the reference.
    has_reference: bool,
    /// Whether the mean cross-entropy of the chosen tokens is a part of the loss.
    has_likelihood: bool,
    /// Whether rows have one answer and a label. The second answer of a pair is then that of another row.
    has_labels: bool,
    /// The part of a pair, beside how far the model has moved.
    of_pair: fn(&Preference, &Pair, f64) -> OfPair,
}

const ROWS: [Row; 4] = [
    Row {
        loss: PreferenceLoss::Dpo,
        name: "dpo",
        beta: 0.1,
        has_reference: true,
        has_likelihood: false,
        has_labels: false,
        of_pair: |of, pair, _| of.logistic(pair.against_reference(), 0.0),
    },
    Row {
        loss: PreferenceLoss::Orpo,
        name: "orpo",
        beta: 0.1,
        has_reference: false,
        has_likelihood: true,
        has_labels: false,
        of_pair: |of, pair, _| of.odds_ratio(pair),
    },
    Row {
        loss: PreferenceLoss::Simpo,
        name: "simpo",
        beta: 2.0,
        has_reference: false,
        has_likelihood: false,
        has_labels: false,
        of_pair: |of, pair, _| of.logistic(pair.of_a_token(), of.gamma),
    },
    Row {
        loss: PreferenceLoss::Kto,
        name: "kto",
        beta: 0.1,
        has_reference: true,
        has_likelihood: false,
        has_labels: true,
        of_pair: Preference::prospect,
    },
];

impl PreferenceLoss {
    /// All losses.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.loss)
    }

    /// The losses with their names in `preference.loss`.
    pub const NAMES: [(&'static str, Self); ROWS.len()] = {
        let (mut names, mut number) = ([("", Self::Dpo); ROWS.len()], 0);
        while number < names.len() {
            names[number] = (ROWS[number].name, ROWS[number].loss);
            number += 1;
        }
        names
    };

    /// The loss of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|loss| loss.name() == name)
    }

    fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.loss == self).expect("every loss has a row")
    }

    /// The name in `preference.loss`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The usual `preference.beta`.
    pub fn usual_beta(self) -> f64 {
        self.row().beta
    }

    /// Whether rows have one answer, which is desirable or not, instead of a pair.
    pub fn has_labels(self) -> bool {
        self.row().has_labels
    }

    /// Whether the model's answers are compared with those of a reference.
    pub fn has_reference(self) -> bool {
        self.row().has_reference
    }
}

/// A loss with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preference {
    /// The loss.
    pub loss: PreferenceLoss,
    /// β, above 0.
    pub beta: f64,
    /// γ of [`PreferenceLoss::Simpo`], from 0 up.
    pub gamma: f64,
    /// The weight of desirable and of other answers in [`PreferenceLoss::Kto`].
    #[serde(default = "equal_weights")]
    pub weights: [f64; 2],
    /// Whether the reference is a frozen model beside the trained one, rather than that one without its adapter.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_reference_model: bool,
}

/// The weights in checkpoints that have none.
fn equal_weights() -> [f64; 2] {
    [1.0; 2]
}

/// The log-probabilities of a pair of answers: the chosen one, then the rejected one. Of a row with a label: its answer, then that of another
/// row to the same source.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair {
    /// Under the model.
    pub policy: [f64; 2],
    /// Under the reference, or 0.
    pub reference: [f64; 2],
    /// Their tokens.
    pub tokens: [f64; 2],
    /// Whether the first answer is desirable, where rows have a label.
    pub is_desirable: bool,
}

impl Pair {
    pub(crate) const NUMBERS: usize = 7;

    /// All numbers, for a message to other processes; see [`Pair::from_numbers`].
    pub(crate) fn numbers(&self) -> [f64; Self::NUMBERS] {
        let ([a, b], [c, d], [e, f]) = (self.policy, self.reference, self.tokens);
        [a, b, c, d, e, f, f64::from(u8::from(self.is_desirable))]
    }

    /// The pair of [`Pair::numbers`].
    pub(crate) fn from_numbers([a, b, c, d, e, f, label]: [f64; Self::NUMBERS]) -> Self {
        Self { policy: [a, b], reference: [c, d], tokens: [e, f], is_desirable: label > 0.0 }
    }

    /// The log-probabilities under the model (0) or under the reference (1).
    pub(crate) fn stream(&mut self, stream: usize) -> &mut [f64; 2] {
        if stream == 0 { &mut self.policy } else { &mut self.reference }
    }

    /// Both answers' log-probabilities, less those of the reference.
    fn against_reference(&self) -> Compared {
        Compared { values: [0, 1].map(|i| self.policy[i] - self.reference[i]), scale: [1.0; 2] }
    }

    /// Both answers' log-probabilities of a token.
    fn of_a_token(&self) -> Compared {
        Compared { values: [0, 1].map(|i| self.policy[i] / self.tokens[i]), scale: self.tokens.map(f64::recip) }
    }
}

/// The values that a loss compares, and their derivatives by the log-probabilities.
struct Compared {
    values: [f64; 2],
    scale: [f64; 2],
}

/// A pair's part of the loss: the value, its derivatives by both log-probabilities, and the rewards. A row with a label has one reward.
#[derive(Clone, Copy, Debug)]
struct OfPair {
    loss: f64,
    derivatives: [f64; 2],
    rewards: [f64; 2],
}

/// Means over the rows of a batch. In arrays the chosen answers are first; where rows have labels, the desirable ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PreferenceStats {
    /// The loss.
    pub loss: f64,
    /// The mean cross-entropy of a chosen token, and of any token where rows have labels.
    pub cross_entropy: f64,
    /// β times what the loss compares. `None`: there is no such answer.
    pub rewards: [Option<f64>; 2],
    /// The share of pairs whose chosen answer has the larger reward; `None` where rows have labels.
    pub accuracy: Option<f64>,
    /// Log-probabilities under the model.
    pub log_probabilities: [Option<f64>; 2],
    /// How far the model has moved from its reference, where rows have labels.
    pub kl: Option<f64>,
}

impl PreferenceStats {
    /// By how much the reward of chosen answers is larger.
    pub fn margin(&self) -> Option<f64> {
        self.rewards[0].zip(self.rewards[1]).map(|(chosen, rejected)| chosen - rejected)
    }
}

impl Preference {
    /// A loss with its usual β.
    pub fn usual(loss: PreferenceLoss) -> Self {
        Self { loss, beta: loss.usual_beta(), gamma: 1.0, weights: equal_weights(), has_reference_model: false }
    }

    /// `-log σ(β (chosen - rejected) - γ)`.
    fn logistic(&self, of: Compared, gamma: f64) -> OfPair {
        let z = self.beta * (of.values[0] - of.values[1]) - gamma;
        let slope = self.beta * sigmoid(-z);
        OfPair {
            loss: -log_sigmoid(z),
            derivatives: [-slope * of.scale[0], slope * of.scale[1]],
            rewards: of.values.map(|value| self.beta * value),
        }
    }

    /// `-β log σ(log odds(chosen) - log odds(rejected))`.
    fn odds_ratio(&self, pair: &Pair) -> OfPair {
        let of = pair.of_a_token();
        // 1 - eᵃ, the probability of anything else.
        let other = of.values.map(|value| -value.exp_m1());
        let odds = [0, 1].map(|i| of.values[i] - other[i].ln());
        let z = odds[0] - odds[1];
        let slope = self.beta * sigmoid(-z);
        OfPair {
            loss: -self.beta * log_sigmoid(z),
            derivatives: [-slope * of.scale[0] / other[0], slope * of.scale[1] / other[1]],
            rewards: of.values.map(|value| self.beta * value),
        }
    }

    /// `1 - σ(±β ((p - r) - moved))`, with + for a desirable answer.
    fn prospect(&self, pair: &Pair, moved: f64) -> OfPair {
        let ratio = pair.against_reference().values[0];
        let (sign, weight) = if pair.is_desirable { (1.0, self.weights[0]) } else { (-1.0, self.weights[1]) };
        let z = sign * self.beta * (ratio - moved);
        OfPair {
            loss: weight * sigmoid(-z),
            derivatives: [-sign * weight * self.beta * sigmoid(z) * sigmoid(-z), 0.0],
            rewards: [self.beta * ratio; 2],
        }
    }

    /// The weight of the cross-entropies of each pair's two answers, and the numbers of the batch. There is at least one pair.
    pub fn of_batch(&self, pairs: &[Pair]) -> (Vec<[f64; 2]>, PreferenceStats) {
        let (row, count) = (self.loss.row(), pairs.len() as f64);
        let chosen_tokens: f64 = pairs.iter().map(|pair| pair.tokens[0]).sum();
        let mut stats = PreferenceStats {
            cross_entropy: pairs.iter().map(|pair| -pair.policy[0]).sum::<f64>() / chosen_tokens,
            ..PreferenceStats::default()
        };
        let moved: f64 = pairs.iter().map(|pair| pair.against_reference().values[1]).sum::<f64>() / count;
        let moved = moved.max(0.0);
        let (mut preferred, mut rewards, mut log_probabilities) = (0.0, [Mean::default(); 2], [Mean::default(); 2]);
        let weights = pairs.iter().map(|pair| {
            let of = (row.of_pair)(self, pair, moved);
            stats.loss += of.loss / count;
            preferred += f64::from(u8::from(of.rewards[0] > of.rewards[1]));
            // A row with a label has one answer, on one of both sides.
            let sides = if row.has_labels { [pair.is_desirable, !pair.is_desirable] } else { [true; 2] };
            for i in [0, 1].into_iter().filter(|i| sides[*i]) {
                rewards[i].add(of.rewards[i]);
                log_probabilities[i].add(pair.policy[if row.has_labels { 0 } else { i }]);
            }
            // A cross-entropy is minus a log-probability.
            let [chosen, rejected] = of.derivatives.map(|derivative| -derivative / count);
            [chosen + if row.has_likelihood { 1.0 / chosen_tokens } else { 0.0 }, rejected]
        });
        let weights = weights.collect();
        (stats.rewards, stats.log_probabilities) = (rewards.map(Mean::get), log_probabilities.map(Mean::get));
        stats.accuracy = (!row.has_labels).then_some(preferred / count);
        stats.kl = row.has_labels.then_some(moved);
        stats.loss += if row.has_likelihood { stats.cross_entropy } else { 0.0 };
        (weights, stats)
    }
}

/// A mean of some numbers.
#[derive(Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1.0;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

pub(crate) fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

pub(crate) fn log_sigmoid(z: f64) -> f64 {
    z.min(0.0) - (-z.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs() -> Vec<Pair> {
        let of = |policy, reference, tokens| Pair { policy, reference, tokens, is_desirable: tokens[0] > 4.0 };
        vec![
            of([-3.0, -9.5], [-4.0, -9.0], [4.0, 7.0]),
            of([-12.0, -2.0], [-10.0, -2.5], [9.0, 2.0]),
            of([-0.25, -40.0], [-0.5, -30.0], [1.0, 31.0]),
        ]
    }

    #[test]
    fn weights_are_the_derivatives_of_the_loss() {
        for loss in PreferenceLoss::all() {
            let of = Preference::usual(loss);
            let (weights, _) = of.of_batch(&pairs());
            for (number, answer) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                let at = |step: f64| {
                    let mut pairs = pairs();
                    pairs[number].policy[answer] += step;
                    of.of_batch(&pairs).1.loss
                };
                // What another row's answer says is a constant.
                let is_constant = loss.has_labels() && answer == 1;
                let expected = if is_constant { 0.0 } else { -(at(1e-6) - at(-1e-6)) / 2e-6 };
                let got = weights[number][answer];
                assert!((got - expected).abs() < 1e-8, "{}: {got}, not {expected}", loss.name());
            }
        }
    }

    #[test]
    fn losses_are_those_of_their_papers() {
        let pair = pairs()[..1].to_vec();
        let of = |loss| Preference { gamma: 0.5, ..Preference::usual(loss) }.of_batch(&pair).1;
        let minus_log_sigmoid = |z: f64| (1.0 + (-z).exp()).ln();
        let dpo = of(PreferenceLoss::Dpo);
        // The chosen answer gained 1, the rejected one lost 0.5.
        assert!((dpo.loss - minus_log_sigmoid(0.1 * 1.5)).abs() < 1e-12);
        let rewards = dpo.rewards.map(Option::unwrap);
        assert!((rewards[0] - 0.1).abs() < 1e-12 && (rewards[1] + 0.05).abs() < 1e-12);
        let expected = (Some(1.0), [Some(-3.0), Some(-9.5)], 0.75, None);
        assert_eq!((dpo.accuracy, dpo.log_probabilities, dpo.cross_entropy, dpo.kl), expected);
        let (chosen, rejected) = (-3.0 / 4.0, -9.5 / 7.0);
        assert!((of(PreferenceLoss::Simpo).loss - minus_log_sigmoid(2.0 * (chosen - rejected) - 0.5)).abs() < 1e-12);
        let odds = |a: f64| (a.exp() / (1.0 - a.exp())).ln();
        let orpo = of(PreferenceLoss::Orpo).loss;
        assert!((orpo - (0.75 + 0.1 * minus_log_sigmoid(odds(chosen) - odds(rejected)))).abs() < 1e-12);
    }

    #[test]
    fn labels_weigh_answers_beside_how_far_the_model_has_moved() {
        let of = Preference { weights: [2.0, 0.5], ..Preference::usual(PreferenceLoss::Kto) };
        let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
        let (weights, stats) = of.of_batch(&pairs());
        // The answers to other sources gained -0.5, 0.5 and -10: nothing has moved. The answers gained 1, -2 and 0.25.
        assert_eq!(stats.kl, Some(0.0));
        let losses = [0.5 * sigmoid(0.1), 2.0 * sigmoid(0.2), 0.5 * sigmoid(0.025)];
        assert!((stats.loss - losses.iter().sum::<f64>() / 3.0).abs() < 1e-12);
        let close = |got: Option<f64>, expected: f64| (got.unwrap() - expected).abs() < 1e-12;
        assert!(close(stats.rewards[0], -0.2) && close(stats.rewards[1], 0.0625), "{:?}", stats.rewards);
        assert_eq!((stats.accuracy, stats.log_probabilities), (None, [Some(-12.0), Some((-3.0 - 0.25) / 2.0)]));
        assert!(weights[0][0] < 0.0 && weights[1][0] > 0.0 && weights.iter().all(|of| of[1] == 0.0));
        let mut moved = pairs();
        moved[0].policy[1] += 40.0;
        let (_, stats) = of.of_batch(&moved);
        assert_eq!(stats.kl, Some(10.0));
        assert!((stats.loss - (0.5 * sigmoid(-0.9) + 2.0 * sigmoid(1.2) + 0.5 * sigmoid(-0.975)) / 3.0).abs() < 1e-12);
        moved.retain(|pair| pair.is_desirable);
        assert_eq!(of.of_batch(&moved).1.rewards[1], None);
    }

    #[test]
    fn extreme_pairs_have_finite_losses() {
        let pair = |policy| Pair { policy, tokens: [1.0; 2], ..Pair::default() };
        for loss in PreferenceLoss::all() {
            for policy in [[-1e-9, -2000.0], [-2000.0, -1e-9]] {
                let (weights, stats) = Preference::usual(loss).of_batch(&[pair(policy)]);
                assert!(
                    stats.loss.is_finite() && weights[0].iter().all(|weight| weight.is_finite()),
                    "{}",
                    loss.name()
                );
            }
        }
    }
}
