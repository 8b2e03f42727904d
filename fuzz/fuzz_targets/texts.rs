//! libFuzzer on the parser `texts`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("texts", input));
