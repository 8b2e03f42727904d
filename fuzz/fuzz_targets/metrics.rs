//! libFuzzer on the parser `metrics`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("metrics", input));
