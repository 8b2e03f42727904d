//! libFuzzer on the parser `safetensors`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("safetensors", input));
