//! libFuzzer on the parser `tokenizer_config`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("tokenizer_config", input));
