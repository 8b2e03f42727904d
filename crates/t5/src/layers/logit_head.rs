//! A head by itself: the layer that makes logits of a decoder's output, with its scale and cap.

use super::linear::Linear;
use crate::context::Noise;
use crate::error::Result;
use crate::ops::Ops;

/// A head of a language model. Its weight may lie in a file.
#[derive(Clone, Debug)]
pub(crate) struct LogitHead<T> {
    pub linear: Linear<T>,
    /// Factor of the decoder's output.
    pub scale: f64,
    /// The soft cap of the logits.
    pub cap: Option<f64>,
}

impl<T: Ops> LogitHead<T> {
    /// Logits (.., V) of decoder outputs (.., D).
    pub fn logits(&self, z: &T) -> Result<T> {
        let logits = self.linear.forward(&z.scaled(self.scale)?, &Noise::NONE)?;
        self.cap.map_or(Ok(logits.clone()), |cap| logits.soft_cap(cap))
    }
}
