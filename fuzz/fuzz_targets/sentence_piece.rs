//! libFuzzer on the parser `sentence_piece`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| foreign_bytes::fuzz("sentence_piece", input));
