//! The device of these tests.

use std::cell::OnceCell;

use candle_core::Device;

/// The CPU, or, with `LOW_MEM_T5_TEST_DEVICE=cuda`, a card or the emulated one.
pub fn device() -> Device {
    // A thread has a stream of its own there: whoever records launches records all of its stream.
    thread_local! {
        static DEVICE: OnceCell<Device> = const { OnceCell::new() };
    }
    let open = || match std::env::var("LOW_MEM_T5_TEST_DEVICE").as_deref() {
        Ok("cuda") => t5_ops::open_card(0).expect("a card"),
        _ => Device::Cpu,
    };
    DEVICE.with(|device| device.get_or_init(open).clone())
}
