//! A card on a target that cannot load libraries: nothing is known of it.

use super::DeviceProbe;
use crate::DeviceMemory;

#[derive(Debug)]
pub(super) struct Card;

impl Card {
    pub fn new(_: u32) -> Self {
        Self
    }
}

impl DeviceProbe for Card {
    fn memory(&self) -> Result<DeviceMemory, String> {
        Err("NVML cannot be used: no library can be loaded".to_owned())
    }
}
