//! Why there is no plan.

use crate::DoesNotFit;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No choice fits the budget.
    #[error(transparent)]
    DoesNotFit(#[from] Box<DoesNotFit>),
    /// The trainer refuses the options: everything is frozen, or an item of `freeze` is unknown.
    #[error(transparent)]
    Trainer(#[from] trainer::Error),
    /// The rehearsal failed.
    #[error(transparent)]
    Model(#[from] t5::Error),
    /// The machine's memory cannot be read.
    #[error(transparent)]
    Probe(#[from] memory_policy::ProbeError),
    /// The job asks for a setting that exists only on a device, and tensors are on the host.
    #[error("{what} is for GPUs, and tensors are on the CPU")]
    OnADeviceAlone {
        /// The setting, by the names of its key and its flag.
        what: String,
    },
}

impl From<DoesNotFit> for Error {
    fn from(refusal: DoesNotFit) -> Self {
        Self::DoesNotFit(Box::new(refusal))
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
