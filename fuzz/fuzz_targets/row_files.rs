//! libFuzzer on the parser `row_files`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("row_files", input));
