//! libFuzzer on the parser `snappy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("snappy", input));
