//! libFuzzer on the parser `delta_lengths`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("delta_lengths", input));
