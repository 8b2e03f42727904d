//! The bytes that the trainer holds while a gradient is handed over: none where it has kernels, copies of the gradient elsewhere.

use std::collections::HashMap;

use crate::parameters::{ParameterSpec, Part};
use crate::step::schedule::Stage;

/// Bytes while gradients are measured, and while they are applied.
type Bytes = [u64; 2];

/// The bytes for the gradients of each part, and for all together.
#[derive(Debug, Default)]
pub(super) struct HandedOver {
    of_part: HashMap<Part, Bytes>,
    of_all: Bytes,
}

impl HandedOver {
    /// Calculates the bytes for these parameters; `bytes` gives them for gradients that are handed over together.
    pub fn new(parameters: &[ParameterSpec], bytes: &dyn Fn(&[&ParameterSpec]) -> Bytes) -> HandedOver {
        let mut parts: HashMap<Part, Vec<&ParameterSpec>> = HashMap::new();
        for spec in parameters {
            parts.entry(spec.part).or_default().push(spec);
        }
        let of_part = parts.into_iter().map(|(part, specs)| (part, bytes(&specs))).collect();
        HandedOver { of_part, of_all: bytes(&parameters.iter().collect::<Vec<_>>()) }
    }

    /// The bytes while the gradients of a part, or all, are handed over.
    pub fn bytes(&self, part: Option<Part>, stage: Stage) -> u64 {
        let [measured, applied] = match part {
            Some(part) => self.of_part.get(&part).copied().unwrap_or_default(),
            None => self.of_all,
        };
        if stage == Stage::Measure { measured } else { applied }
    }
}
