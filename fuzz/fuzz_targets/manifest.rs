//! libFuzzer on the parser `manifest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("manifest", input));
