//! libFuzzer on the parser `page_header`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("page_header", input));
