//! libFuzzer on the parser `byte_pairs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("byte_pairs", input));
