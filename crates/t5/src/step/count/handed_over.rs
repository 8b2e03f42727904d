//! What whoever trains holds while a gradient is handed over: nothing where it has kernels, copies of the gradient elsewhere.

use std::collections::HashMap;

use crate::parameters::Part;
use crate::step::schedule::Stage;

/// Bytes for gradients that are measured, and for those that are applied.
type Bytes = [u64; 2];

/// The most for a gradient of each part, and of all.
#[derive(Debug, Default)]
pub(super) struct HandedOver {
    of_part: HashMap<Part, Bytes>,
    of_any: Bytes,
}

impl HandedOver {
    /// Of parameters with their parts.
    pub fn new(parameters: impl Iterator<Item = (Part, Bytes)>) -> HandedOver {
        let mut most = HandedOver::default();
        for (part, bytes) in parameters {
            for place in [most.of_part.entry(part).or_default(), &mut most.of_any] {
                *place = [place[0].max(bytes[0]), place[1].max(bytes[1])];
            }
        }
        most
    }

    /// The most while the gradients of a part, or all, are handed over one after the other.
    pub fn bytes(&self, part: Option<Part>, stage: Stage) -> u64 {
        let [measured, applied] = match part {
            Some(part) => self.of_part.get(&part).copied().unwrap_or_default(),
            None => self.of_any,
        };
        if stage == Stage::Measure { measured } else { applied }
    }
}
