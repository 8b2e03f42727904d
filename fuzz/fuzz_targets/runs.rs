//! libFuzzer on the parser `runs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("runs", input));
