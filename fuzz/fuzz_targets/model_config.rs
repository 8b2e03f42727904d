//! libFuzzer on the parser `model_config`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("model_config", input));
