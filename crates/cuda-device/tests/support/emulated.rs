//! Tests that set variables of the emulated card.

use candle_core::Device;

/// Whether a card is the emulated one (`cuda-kernels/emulation`). A real card ignores `LOW_MEM_T5_EMULATED_*`, so a test that sets these
/// variables checks nothing there.
#[allow(dead_code, reason = "some tests set no such variable")]
pub fn is_emulated(card: &Device) -> bool {
    cuda_device::device_bytes(card).is_some_and(|bytes| bytes.name.contains("emulated"))
}

/// Runs one test alone, in a process of its own with these variables, which a driver reads once.
#[allow(dead_code, reason = "some tests set no such variable")]
pub fn test_alone(name: &str, variables: &[(&str, &str)]) -> std::process::Output {
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", name]).envs(variables.iter().copied()).output().unwrap()
}
