//! Rounding in the kernels' form.

use super::Rounding;

/// The noise of some rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Noise {
    key: u64,
    is_stochastic: u32,
    first_row: u32,
}

impl Noise {
    pub(crate) fn new(rounding: Rounding, first_row: usize) -> Self {
        // A parameter has fewer rows than 2^31; otherwise no kernel could count them.
        let first_row = first_row as u32;
        match rounding {
            Rounding::Nearest => Self { key: 0, is_stochastic: 0, first_row },
            Rounding::Stochastic { key } => Self { key, is_stochastic: 1, first_row },
        }
    }
}
