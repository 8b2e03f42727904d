//! The bytes of a step's rows at one moment.

/// Bytes that are held at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Live {
    /// Weights that lie in a file.
    pub weights: u64,
    pub activations: u64,
    pub gradients: u64,
    pub loss: u64,
    pub workspace: u64,
}

impl Live {
    pub fn total(&self) -> u64 {
        self.weights + self.activations + self.gradients + self.loss + self.workspace
    }
}
