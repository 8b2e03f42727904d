//! DELTA_BINARY_PACKED integers, which the DELTA byte array encodings use for lengths.
//!
//! Format: parquet-format `Encodings.md`, "Delta Encoding". A block has deltas over a minimum. It is cut into
//! miniblocks, each with its own bit width.

use super::bytes::PageBytes;
use super::runs::varint;
use crate::error::Fault;

/// Writers use blocks of 128 (parquet-mr, Arrow) to 256 values.
const MAX_BLOCK_VALUES: u64 = 1 << 16;

/// Decodes a whole sequence of lengths, at most `limit` values.
pub(crate) fn lengths(bytes: &mut PageBytes, limit: u32) -> Result<Vec<u32>, Fault> {
    let block_values = varint(bytes)?;
    let miniblocks = varint(bytes)?;
    let total = varint(bytes)?;
    let first = zigzag(varint(bytes)?);
    if total > u64::from(limit) {
        return Fault::corrupt(format!("{total} delta-encoded lengths in a page of {limit} rows"));
    }
    let shape = block_values <= MAX_BLOCK_VALUES && miniblocks > 0 && block_values % miniblocks.max(1) == 0;
    let miniblock_values = if shape { block_values / miniblocks } else { 0 };
    if miniblock_values == 0 || miniblock_values % 32 != 0 {
        return Fault::corrupt(format!("delta blocks of {block_values} values in {miniblocks} miniblocks"));
    }
    let total = total as usize;
    // The bill includes this: the page's rows have been compared with its map and with a limit.
    let mut output = Vec::with_capacity(total);
    let mut last = first as i32;
    let mut push = |value: i32| match u32::try_from(value) {
        Ok(length) => {
            output.push(length);
            Ok(output.len())
        }
        Err(_) => Fault::corrupt(format!("a delta-encoded length of {value}")),
    };
    if total == 0 {
        return Ok(Vec::new());
    }
    let mut count = push(last)?;
    let mut widths = Vec::with_capacity(miniblocks as usize);
    while count < total {
        let minimum = zigzag(varint(bytes)?) as i32;
        widths.clear();
        widths.extend_from_slice(bytes.peek(miniblocks as usize)?);
        bytes.consume(miniblocks as usize);
        for &width in &widths {
            if count == total {
                // The widths of absent miniblocks may be anything.
                break;
            }
            if width > 32 {
                return Fault::corrupt(format!("delta-encoded lengths of {width} bits"));
            }
            let packed_bytes = miniblock_values as usize / 8 * usize::from(width);
            let packed = bytes.peek(packed_bytes)?;
            for index in 0..miniblock_values as usize {
                if count == total {
                    break;
                }
                let delta = unpack(packed, index, width) as i32;
                last = last.wrapping_add(minimum).wrapping_add(delta);
                count = push(last)?;
            }
            bytes.consume(packed_bytes);
        }
    }
    Ok(output)
}

fn zigzag(raw: u64) -> i64 {
    (raw >> 1) as i64 ^ -((raw & 1) as i64)
}

/// Value `index` of `width` bits, least significant bit first.
fn unpack(packed: &[u8], index: usize, width: u8) -> u32 {
    let bit = index * usize::from(width);
    let mut word = [0; 8];
    let available = packed.len().saturating_sub(bit / 8).min(8);
    word[..available].copy_from_slice(&packed[bit / 8..bit / 8 + available]);
    (u64::from_le_bytes(word) >> (bit % 8) & ((1u64 << width) - 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_example_of_the_format_description_decodes() {
        // 1, 2, 3, 4, 5: block of 128, 4 miniblocks, 5 values, first 1, minimum delta 1, widths 0.
        let bytes = [0x80, 0x01, 0x04, 0x05, 0x02, 0x02, 0, 0, 0, 0];
        assert_eq!(lengths(&mut PageBytes::whole(bytes.to_vec()), 5).unwrap(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_count_beyond_the_page_is_refused_before_it_is_believed() {
        let bytes = [0x80, 0x01, 0x04, 0xff, 0xff, 0xff, 0xff, 0x0f, 0x02];
        assert!(matches!(lengths(&mut PageBytes::whole(bytes.to_vec()), 5), Err(Fault::Corrupt(_))));
    }
}
