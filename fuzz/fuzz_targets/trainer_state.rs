//! libFuzzer on the parser `trainer_state`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("trainer_state", input));
