//! libFuzzer on the parser `finished`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("finished", input));
