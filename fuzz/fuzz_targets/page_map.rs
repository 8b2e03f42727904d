//! libFuzzer on the parser `page_map`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("page_map", input));
