//! The memory of an NVIDIA card, from the driver's own library. The library is loaded on first use. A machine without driver or card has no
//! device memory, which is no error.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::{Bytes, DeviceMemory, DeviceProbe};

/// The library and the card.
pub(super) struct Card {
    nvml: Result<Nvml, NvmlError>,
    index: u32,
}

impl Card {
    pub fn new(index: u32) -> Self {
        Self { nvml: Nvml::init(), index }
    }
}

impl DeviceProbe for Card {
    fn memory(&self) -> Result<DeviceMemory, String> {
        let nvml = self.nvml.as_ref().map_err(|error| format!("NVML cannot be used: {error}"))?;
        let read = || -> Result<DeviceMemory, NvmlError> {
            let card = nvml.device_by_index(self.index)?;
            let memory = card.memory_info()?;
            Ok(DeviceMemory {
                name: card.name()?,
                total: Bytes(memory.total),
                free: Bytes(memory.free),
                // A process that reads a card through this library has not opened it, and holds none of its memory.
                ..DeviceMemory::default()
            })
        };
        read().map_err(|error| format!("NVML: GPU {}: {error}", self.index))
    }
}

impl std::fmt::Debug for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Card").field("index", &self.index).field("is_loaded", &self.nvml.is_ok()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_is_not_there_is_a_statement_and_no_error_of_the_probe() {
        // On a machine with cards the index is out of range; on a machine without a driver the library is missing.
        let said = Card::new(1_000).memory().unwrap_err();
        assert!(said.starts_with("NVML"), "{said}");
    }
}
