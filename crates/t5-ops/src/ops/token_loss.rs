//! What is minimised for a target token: its cross-entropy, and terms beside it.
//!
//! With logits l of a row, Z the sum of their exponentials, V their number and y the label:
//!
//! ```text
//! cross-entropy = log Z - l[y]
//! objective     = log Z - (1 - s) l[y] - s mean(l) + z (log Z)²
//! gradient      = (1 + 2 z log Z) softmax(l) - (1 - s) one-hot(y) - s / V
//! ```
//!
//! Where the logit alone is a score (`is_logit`), log Z is left out of the cross-entropy, of the objective and of the gradient's softmax.
//!
//! s is `label_smoothing` as in `torch.nn.CrossEntropyLoss`: the share s of the label is divided among all V entries. z is `z_loss`, which
//! keeps log Z near zero (Chowdhery et al., 2022, arXiv 2204.02311, section 5; T5's own code has it as well).

use std::iter::Sum;
use std::ops::AddAssign;

/// The terms beside the cross-entropy. By default there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// The factor of `(log Z)²`.
    pub z_loss: f64,
    /// The share of the label that is divided among all entries, below 1.
    pub label_smoothing: f64,
    /// Whether the loss of a token is minus its logit, without log Z.
    pub is_logit: bool,
}

impl TokenLoss {
    /// What a pass without gradients measures: the cross-entropy without other terms, or minus the logit.
    pub fn alone(&self) -> Self {
        Self { is_logit: self.is_logit, ..Self::default() }
    }

    /// The factor of log Z in the cross-entropy.
    pub(crate) fn of_log_z(&self) -> f64 {
        if self.is_logit { 0.0 } else { 1.0 }
    }

    /// The factor of the softmax in the gradient of a row with this `log Z`.
    pub(crate) fn of_softmax(&self, log_z: f64) -> f64 {
        self.of_log_z() + 2.0 * self.z_loss * log_z
    }

    /// Whether that factor is 1 in every row.
    pub(crate) fn has_plain_softmax(&self) -> bool {
        self.z_loss == 0.0 && !self.is_logit
    }

    /// What the label's entry of the gradient loses beside [`TokenLoss::of_each`].
    pub(crate) fn of_label(&self) -> f64 {
        1.0 - self.label_smoothing
    }

    /// What each of `width` entries of the gradient loses.
    pub(crate) fn of_each(&self, width: usize) -> f64 {
        self.label_smoothing / width.max(1) as f64
    }

    /// Cross-entropy and objective of a row with this `log Z`, logit of the label and mean of all logits. Without smoothing the mean is not
    /// used.
    pub(crate) fn of_row(&self, log_z: f64, of_label: f64, mean: impl FnOnce() -> f64) -> LossSums {
        let cross_entropy = if self.is_logit { -of_label } else { log_z - of_label };
        let mut objective = cross_entropy;
        if self.label_smoothing != 0.0 {
            objective += self.label_smoothing * (of_label - mean());
        }
        if self.z_loss != 0.0 {
            objective += self.z_loss * log_z * log_z;
        }
        LossSums { cross_entropy, objective }
    }
}

/// Sums over target tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Of the cross-entropy.
    pub cross_entropy: f64,
    /// Of what is minimised.
    pub objective: f64,
}

/// A cross-entropy alone.
impl From<f64> for LossSums {
    fn from(cross_entropy: f64) -> Self {
        Self { cross_entropy, objective: cross_entropy }
    }
}

impl AddAssign for LossSums {
    fn add_assign(&mut self, other: Self) {
        self.cross_entropy += other.cross_entropy;
        self.objective += other.objective;
    }
}

impl Sum for LossSums {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}
