//! libFuzzer on the parser `parquet_footer`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("parquet_footer", input));
