//! libFuzzer on the parser `weight_index`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("weight_index", input));
