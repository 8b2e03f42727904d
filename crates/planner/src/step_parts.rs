//! The parts of a micro-batch that the host launches one after the other. A card computes one launch while the host makes the next ones. So
//! each part takes the longer of the card's time and the host's time.

/// The parts of a micro-batch that the host launches one after the other, in average multiply-adds of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parts {
    /// Embeddings and blocks, forward and backward.
    pub blocks: f64,
    /// The output projection and the loss.
    pub head: f64,
}

impl Parts {
    /// The sum.
    pub fn total(self) -> f64 {
        self.blocks + self.head
    }

    /// A share of it.
    pub fn times(self, share: f64) -> Self {
        Self { blocks: share * self.blocks, head: share * self.head }
    }
}
