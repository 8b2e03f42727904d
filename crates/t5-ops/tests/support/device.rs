//! The device of tests, of every crate that computes.
//!
//! A test that takes [`device`] runs on both: on the CPU, and where CI sets the variable once more on the emulated card. One that names the
//! CPU says why, in a comment that begins with "The host alone:" (`cargo xtask tidy`).

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

/// How far the cases of a test are apart that are tried: all of them on the CPU, and each `n`-th on a card, because an emulated one is slow. Take
/// an `n` that divides none of the lists that the cases are made of: so that each item of these is among them.
#[allow(dead_code, reason = "most tests try all of their cases")]
pub fn every(n: usize) -> usize {
    if device().is_cpu() { 1 } else { n }
}
