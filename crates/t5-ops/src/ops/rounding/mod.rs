//! Rounding of an updated parameter to bf16: to the nearest value, or stochastically.
//!
//! A bf16 has eight significant bits: rounding to the nearest value loses every update below 1/512 of its parameter, every time. Rounding
//! up or down at random, so that the expected value is exact, keeps such updates on average. Then no copy of the parameters in f32 is
//! needed (Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4).
//!
//! The noise is a hash of (key, row, column): a function of an element's identity, never of threads or order.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::random_mask::RowKey;

/// How an updated parameter in bf16 is rounded; f32 and f64 are not rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    Nearest,
    /// Up or down, at random; the expected value is exact.
    Stochastic {
        /// The key of this tensor's noise at this update. The noise also depends on the element's place.
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
