//! The device of these tests.

use std::sync::OnceLock;

use candle_core::Device;

/// The CPU, or, with `LOW_MEM_T5_TEST_DEVICE=cuda`, a card or the emulated one.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let open = || match std::env::var("LOW_MEM_T5_TEST_DEVICE").as_deref() {
        Ok("cuda") => t5_ops::open_card(0).expect("a card"),
        _ => Device::Cpu,
    };
    DEVICE.get_or_init(open).clone()
}
