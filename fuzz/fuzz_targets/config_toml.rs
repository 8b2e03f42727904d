//! libFuzzer on the parser `config_toml`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("config_toml", input));
