//! This crate's internal parsers as functions of bytes, for tools that test them on damaged input.
//!
//! The product calls none of these, so the linker leaves them out of the command. With a feature flag, every build of
//! the tools would compile this crate a second time.

use std::io::Read;

use crate::error::Fault;
use crate::pages::bytes::PageBytes;
use crate::pages::delta;
use crate::pages::header::{PageHeader, parse_offset_index};
use crate::pages::runs::Runs;
use crate::pages::snappy::SnappyReader;

/// The most values that a decoder is asked for: a real caller knows a page's number of rows.
const MAX_VALUES: u32 = 100_000;

fn reason(fault: Fault) -> String {
    fault.reason()
}

/// Parses a page header.
pub fn page_header(bytes: &[u8]) -> Result<(), String> {
    PageHeader::parse(bytes).map(|_| ()).map_err(reason)
}

/// Parses an offset index.
pub fn offset_index(bytes: &[u8]) -> Result<(), String> {
    parse_offset_index(bytes).map(|_| ()).map_err(reason)
}

/// Decodes a DELTA_BINARY_PACKED sequence of lengths.
pub fn delta_lengths(bytes: &[u8]) -> Result<(), String> {
    delta::lengths(&mut PageBytes::whole(bytes.to_vec()), MAX_VALUES).map(|_| ()).map_err(reason)
}

/// Decodes run-length / bit-packed values. The first byte is the bit width, as in a page of dictionary indexes.
pub fn runs(bytes: &[u8]) -> Result<(), String> {
    let Some((&width, rest)) = bytes.split_first() else { return Err("no bit width".to_owned()) };
    if width > 32 {
        return Err(format!("{width} bits a value, expected at most 32"));
    }
    let (mut input, mut runs) = (PageBytes::whole(rest.to_vec()), Runs::new(width));
    let mut left = u64::from(MAX_VALUES);
    while left > 0 {
        left -= runs.next(&mut input, left).map_err(reason)?.1;
    }
    Ok(())
}

/// Decompresses a raw snappy block as a stream.
///
/// # Panics
/// When the `snap` crate decompresses the same block to other bytes.
pub fn snappy(bytes: &[u8]) -> Result<(), String> {
    let mut ours = Vec::new();
    SnappyReader::new(bytes).read_to_end(&mut ours).map_err(|error| error.to_string())?;
    // The stream stops at the declared length and ignores later bytes; `snap` refuses them.
    if let Ok(theirs) = snap::raw::Decoder::new().decompress_vec(bytes) {
        assert!(ours == theirs, "the stream gives {} bytes, snap gives {} others", ours.len(), theirs.len());
    }
    Ok(())
}
