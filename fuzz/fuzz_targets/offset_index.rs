//! libFuzzer on the parser `offset_index`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("offset_index", input));
