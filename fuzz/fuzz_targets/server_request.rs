//! libFuzzer on the parser `server_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("server_request", input));
