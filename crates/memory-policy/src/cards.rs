//! NVIDIA's cards on this machine, from the driver's own library.

#[cfg(not(any(target_family = "wasm", target_env = "musl")))]
use nvml_wrapper::{Nvml, error::NvmlError};

use crate::Bytes;

/// The driver and the cards that this process may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cards {
    /// Version of the driver.
    pub driver: String,
    /// The newest version of CUDA that the driver supports.
    pub cuda: String,
    /// The cards, in the driver's order.
    pub cards: Vec<Card>,
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// The driver's name for it.
    pub name: String,
    /// Its UUID in hexadecimal digits.
    pub id: String,
    /// Its memory.
    pub total: Bytes,
    /// Free bytes of it.
    pub free: Bytes,
    /// Its compute capability, such as `9.0`.
    pub capability: Option<String>,
}

/// The cards that this process may see. Most machines have no driver, which is an error.
///
/// # Errors
/// The message of the driver's library.
#[cfg(not(any(target_family = "wasm", target_env = "musl")))]
pub fn cards() -> Result<Cards, String> {
    let read = || -> Result<Cards, NvmlError> {
        let nvml = Nvml::init()?;
        let version = nvml.sys_cuda_driver_version()?;
        let cards = (0..nvml.device_count()?).map(|index| card(&nvml, index)).collect::<Result<_, NvmlError>>()?;
        let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
        Ok(Cards { driver: nvml.sys_driver_version()?, cuda, cards })
    };
    read().map_err(|error| format!("NVML: {error}"))
}

/// Always fails: WebAssembly and static programs load no libraries.
///
/// # Errors
/// Always.
#[cfg(any(target_family = "wasm", target_env = "musl"))]
pub fn cards() -> Result<Cards, String> {
    Err("NVML: no library can be loaded".to_owned())
}

#[cfg(not(any(target_family = "wasm", target_env = "musl")))]
fn card(nvml: &Nvml, index: u32) -> Result<Card, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    let capability = device.cuda_compute_capability().ok();
    Ok(Card {
        name: device.name()?,
        id: digits(&device.uuid()?),
        total: Bytes(memory.total),
        free: Bytes(memory.free),
        capability: capability.map(|capability| format!("{}.{}", capability.major, capability.minor)),
    })
}

/// The digits of a UUID such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
#[cfg(not(any(target_family = "wasm", target_env = "musl")))]
fn digits(uuid: &str) -> String {
    uuid.trim_start_matches("GPU").replace('-', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(any(target_family = "wasm", target_env = "musl")))]
    #[test]
    fn a_card_is_known_by_the_digits_of_its_uuid() {
        assert_eq!(digits("GPU-01234567-89ab-cdef-0123-456789abcdef"), "0123456789abcdef0123456789abcdef");
    }

    #[test]
    fn a_machine_without_a_driver_says_so_and_one_with_cards_names_them() {
        match cards() {
            Err(said) => assert!(said.starts_with("NVML: "), "{said}"),
            Ok(found) => assert!(found.cards.iter().all(|card| card.free <= card.total && !card.name.is_empty())),
        }
    }
}
