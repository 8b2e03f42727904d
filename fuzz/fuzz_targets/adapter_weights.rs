//! libFuzzer on the parser `adapter_weights`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("adapter_weights", input));
