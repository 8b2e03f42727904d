//! Parsers that break their promise on purpose: the driver has to find each one.

use std::hint::black_box;

use crate::{Parser, Scratch, Shape};

const fn planted(name: &'static str, parse: fn(&[u8], &Scratch) -> Result<(), String>) -> Parser {
    Parser { name, shape: Shape::Bytes, also: &[], parse, command: None }
}

/// One parser for each kind of failure, and one that keeps its promise. Inputs of odd length make them fail.
pub(crate) const PLANTED: &[Parser] = &[
    planted("planted_sound", |bytes, _| if is_bad(bytes) { Err("odd".to_owned()) } else { Ok(()) }),
    planted("planted_panic", |bytes, _| {
        assert!(!is_bad(bytes), "an odd number of bytes");
        Ok(())
    }),
    planted("planted_abort", |bytes, _| {
        if is_bad(bytes) {
            std::process::abort();
        }
        Ok(())
    }),
    planted("planted_hang", |bytes, _| {
        while black_box(is_bad(bytes)) {}
        Ok(())
    }),
    planted("planted_allocation", |bytes, _| {
        let wanted = if is_bad(bytes) { 96 << 20 } else { 0 };
        black_box(vec![1_u8; wanted]);
        Ok(())
    }),
    planted("planted_overflow", |bytes, _| {
        fn nest(depth: u64) -> u64 {
            if depth == 0 { 0 } else { black_box(nest(black_box(depth) - 1)) + 1 }
        }
        black_box(nest(if is_bad(bytes) { u64::MAX } else { 1 }));
        Ok(())
    }),
];

fn is_bad(bytes: &[u8]) -> bool {
    bytes.len() % 2 == 1
}
