//! libFuzzer on the parser `pytorch_weights`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("pytorch_weights", input));
