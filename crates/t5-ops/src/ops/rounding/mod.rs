//! Rounding of an updated parameter to bf16: to the nearest value, or stochastically.
//!
//! A bf16 has eight significant bits: an update below 1/512 of its parameter is lost when it is rounded to
//! the nearest value, every time. Rounded up or down with the probabilities that make the expected value the
//! exact one, it is kept on average, and no copy of the parameters in f32 is needed (Zamirai et al. 2020,
//! "Revisiting BFloat16 Training", section 4).
//!
//! The noise is a hash of (key, row, column): a function of what an element is, never of threads or order.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::random_mask::RowKey;

/// How an updated parameter in bf16 is rounded; in f32 and f64 there is nothing to round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    Nearest,
    /// Up or down, at random and right on average.
    Stochastic {
        /// What the noise of this tensor at this update is a function of, beside the element's place.
        key: u64,
    },
}

impl Rounding {
    /// The noise of a row, if there is any.
    pub(crate) fn row(self, row: usize) -> Option<RowKey> {
        match self {
            Rounding::Nearest => None,
            Rounding::Stochastic { key } => Some(RowKey::new(key, row as u64)),
        }
    }
}
