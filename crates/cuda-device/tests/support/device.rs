//! The device of tests, for every crate with operations on tensors.
//!
//! A test that takes [`device`] runs on the CPU, and once more on the emulated card, where CI sets the variable. A test that names the CPU
//! says why, in a comment that begins with "The host alone:" (`cargo xtask tidy`).

use std::cell::OnceCell;

use candle_core::Device;

/// The CPU, or, with `LOW_MEM_T5_TEST_DEVICE=cuda`, a card or the emulated one.
pub fn device() -> Device {
    // On a card each thread has its own stream: a test that records launches records everything on its stream.
    thread_local! {
        static DEVICE: OnceCell<Device> = const { OnceCell::new() };
    }
    let open = || match std::env::var("LOW_MEM_T5_TEST_DEVICE").as_deref() {
        Ok("cuda") => cuda_device::open_card(0).expect("a card"),
        _ => Device::Cpu,
    };
    DEVICE.with(|device| device.get_or_init(open).clone())
}

/// The stride with which a test goes through its cases: 1 on the CPU, and `n` on a card, because an emulated one is slow. Choose an `n`
/// that divides the length of no list that the cases are made of, so that each item is tried.
#[allow(dead_code, reason = "most tests try all of their cases")]
pub fn every(n: usize) -> usize {
    if device().is_cpu() { 1 } else { n }
}
