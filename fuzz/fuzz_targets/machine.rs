//! libFuzzer on the parser `machine`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("machine", input));
