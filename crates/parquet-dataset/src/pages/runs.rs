//! Parquet's run-length / bit-packed hybrid, which stores definition levels and dictionary indexes.
//!
//! Format: parquet-format `Encodings.md`, "Run Length Encoding / Bit-Packing Hybrid". A run is either one value
//! repeated, or groups of eight values packed into `bit_width` bytes each.

use super::bytes::PageBytes;
use crate::error::Fault;

/// Reads runs from a page's bytes. Holds one run header or one group of eight values at a time.
pub(crate) struct Runs {
    bit_width: u8,
    run: Run,
}

enum Run {
    Repeated {
        value: u32,
        left: u64,
    },
    /// `group[at..]` are the remaining values of the current group.
    Packed {
        groups_left: u64,
        group: [u32; 8],
        at: usize,
    },
}

impl Runs {
    /// `bit_width` is at most 32; the caller has checked the page's declared width.
    pub(crate) fn new(bit_width: u8) -> Self {
        Self { bit_width, run: Run::Repeated { value: 0, left: 0 } }
    }

    /// The next value and its number of repetitions, at least one and at most `limit`.
    #[inline]
    pub(crate) fn next(&mut self, bytes: &mut PageBytes, limit: u64) -> Result<(u32, u64), Fault> {
        loop {
            match &mut self.run {
                Run::Repeated { value, left } if *left > 0 => {
                    let count = limit.min(*left);
                    *left -= count;
                    return Ok((*value, count));
                }
                Run::Packed { group, at, .. } if *at < 8 => {
                    let value = group[*at];
                    let same = group[*at..].iter().take_while(|&&next| next == value).count();
                    let count = (same as u64).min(limit);
                    *at += count as usize;
                    return Ok((value, count));
                }
                _ => self.advance(bytes)?,
            }
        }
    }

    /// Skips `count` values without decoding them.
    pub(crate) fn skip(&mut self, bytes: &mut PageBytes, mut count: u64) -> Result<(), Fault> {
        while count > 0 {
            match &mut self.run {
                Run::Repeated { left, .. } if *left > 0 => {
                    let step = count.min(*left);
                    *left -= step;
                    count -= step;
                }
                Run::Packed { at, .. } if *at < 8 => {
                    let step = count.min(8 - *at as u64);
                    *at += step as usize;
                    count -= step;
                }
                Run::Packed { groups_left, .. } if *groups_left > 1 && count >= 8 => {
                    // The last group is left to `advance`, which accepts a group that is cut short.
                    let groups = (count / 8).min(*groups_left - 1);
                    bytes.skip(groups * u64::from(self.bit_width))?;
                    *groups_left -= groups;
                    count -= groups * 8;
                }
                _ => self.advance(bytes)?,
            }
        }
        Ok(())
    }

    /// Reads the next group or the next run's header.
    fn advance(&mut self, bytes: &mut PageBytes) -> Result<(), Fault> {
        if let Run::Packed { groups_left, group, at } = &mut self.run
            && *groups_left > 0
        {
            let width = usize::from(self.bit_width);
            // Some writers cut the last group off after the last value.
            let packed = bytes.peek_up_to(width)?;
            if packed.is_empty() && width > 0 {
                return Fault::corrupt("a page ends before its last level or dictionary index");
            }
            *group = unpack_group(packed, self.bit_width);
            let consumed = packed.len();
            bytes.consume(consumed);
            *groups_left -= 1;
            *at = 0;
            return Ok(());
        }
        let header = varint(bytes)?;
        self.run = match header & 1 {
            1 => Run::Packed { groups_left: header >> 1, group: [0; 8], at: 8 },
            _ => {
                let width = usize::from(self.bit_width).div_ceil(8);
                let mut value = [0; 4];
                value[..width].copy_from_slice(bytes.peek(width)?);
                bytes.consume(width);
                Run::Repeated { value: u32::from_le_bytes(value), left: header >> 1 }
            }
        };
        Ok(())
    }
}

/// Eight values of `bit_width` bits each, least significant bit first; missing bytes count as zero.
fn unpack_group(packed: &[u8], bit_width: u8) -> [u32; 8] {
    let mut bytes = [0u8; 40];
    bytes[..packed.len()].copy_from_slice(packed);
    let mask = (1u64 << bit_width) - 1;
    std::array::from_fn(|index| {
        let bit = index * usize::from(bit_width);
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[bit / 8..bit / 8 + 8]);
        (u64::from_le_bytes(word) >> (bit % 8) & mask) as u32
    })
}

/// An unsigned LEB128 integer.
pub(crate) fn varint(bytes: &mut PageBytes) -> Result<u64, Fault> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = bytes.peek(1)?[0];
        bytes.consume(1);
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Fault::corrupt("a page holds an integer of more than ten bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(bytes: &[u8], bit_width: u8, count: u64) -> Result<Vec<u32>, Fault> {
        let mut bytes = PageBytes::whole(bytes.to_vec());
        let mut runs = Runs::new(bit_width);
        let mut output = Vec::new();
        while (output.len() as u64) < count {
            let (value, repeats) = runs.next(&mut bytes, count - output.len() as u64)?;
            output.extend(std::iter::repeat_n(value, repeats as usize));
        }
        Ok(output)
    }

    #[test]
    fn the_example_of_the_format_description_decodes() {
        // Numbers 0 to 7 in three bits, bit-packed; then 300 times the value 5.
        let bytes = [0x03, 0b1000_1000, 0b1100_0110, 0b1111_1010, 0xd8, 0x04, 0x05];
        let mut expected: Vec<u32> = (0..8).collect();
        expected.extend([5; 300]);
        assert_eq!(values(&bytes, 3, 308).unwrap(), expected);
    }

    #[test]
    fn skipping_is_reading_and_forgetting() {
        let bytes = [0x07, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0x0a, 9];
        let all = values(&bytes, 8, 29).unwrap();
        for skipped in 0..29 {
            let mut input = PageBytes::whole(bytes.to_vec());
            let mut runs = Runs::new(8);
            runs.skip(&mut input, skipped).unwrap();
            assert_eq!(runs.next(&mut input, 1).unwrap().0, all[skipped as usize], "{skipped}");
        }
    }

    #[test]
    fn a_run_of_a_width_0_dictionary_takes_no_bytes() {
        assert_eq!(values(&[0x08], 0, 4).unwrap(), [0; 4]);
    }

    #[test]
    fn bytes_that_end_early_are_an_error() {
        assert!(values(&[0x03], 3, 8).is_err());
        assert!(values(&[], 3, 1).is_err());
    }
}
