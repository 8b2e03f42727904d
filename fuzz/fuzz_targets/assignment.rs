//! libFuzzer on the parser `assignment`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("assignment", input));
