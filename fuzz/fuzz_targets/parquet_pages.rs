//! libFuzzer on the parser `parquet_pages`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("parquet_pages", input));
