//! Snappy's raw format as a stream, for pages too large to hold whole.
//!
//! The `snap` crate decompresses a raw block only as a whole. A writer's copies never reach back further than
//! 64 KiB (every known compressor works on independent fragments of that size), so a window of that size is
//! all the memory decompression needs. A copy that does reach further is an error with a name, not a wrong
//! byte; format: google/snappy `format_description.txt`.

use std::io::{self, BufRead, Read};

/// How far back a copy may reach.
const WINDOW_BYTES: usize = 64 * 1024;
/// Output gathered before it is handed out; the buffer holds at most window + this + one element.
const CHUNK_BYTES: usize = 64 * 1024;

/// Decompresses one raw snappy block read from `input`.
pub(crate) struct SnappyReader<R> {
    input: R,
    /// Output: up to a window of what was handed out already, then what was not.
    output: Vec<u8>,
    /// Where in `output` the bytes start that have not been handed out.
    at: usize,
    /// Bytes not yet decompressed, as the block's preamble declares; `None` before it was read.
    remaining: Option<u64>,
    /// Bytes of the current literal that have not been read.
    literal: u64,
}

impl<R: BufRead> SnappyReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, output: Vec::new(), at: 0, remaining: None, literal: 0 }
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.input.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    /// A little-endian integer of `count` bytes.
    fn integer(&mut self, count: usize) -> io::Result<usize> {
        let mut bytes = [0; 8];
        self.input.read_exact(&mut bytes[..count])?;
        Ok(u64::from_le_bytes(bytes) as usize)
    }

    fn preamble(&mut self) -> io::Result<u64> {
        let mut length = 0u64;
        for shift in (0..35).step_by(7) {
            let byte = self.byte()?;
            length |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(length);
            }
        }
        Err(invalid("its length takes more than five bytes"))
    }

    /// Decompresses one element: a copy, or at most `CHUNK_BYTES` of a literal.
    fn element(&mut self, remaining: u64) -> io::Result<u64> {
        if self.literal > 0 {
            return self.literal();
        }
        let tag = self.byte()?;
        let (length, offset) = match tag & 3 {
            0 => {
                let length = match usize::from(tag >> 2) {
                    short @ 0..60 => short + 1,
                    long => self.integer(long - 59)? + 1,
                };
                if length as u64 > remaining {
                    return Err(invalid("it holds more bytes than it declares"));
                }
                self.literal = length as u64;
                return self.literal();
            }
            1 => (4 + usize::from(tag >> 2 & 7), usize::from(tag >> 5) << 8 | usize::from(self.byte()?)),
            2 => (1 + usize::from(tag >> 2), self.integer(2)?),
            _ => (1 + usize::from(tag >> 2), self.integer(4)?),
        };
        if length as u64 > remaining {
            return Err(invalid("it holds more bytes than it declares"));
        }
        if offset == 0 || offset > self.output.len() {
            return Err(invalid(&format!("a copy reaches {offset} bytes back, expected 1 to {}", self.output.len())));
        }
        let start = self.output.len() - offset;
        if offset >= length {
            self.output.extend_from_within(start..start + length);
        } else {
            // The copy overlaps what it writes: it repeats the last `offset` bytes.
            for index in start..start + length {
                self.output.push(self.output[index]);
            }
        }
        Ok(length as u64)
    }

    fn literal(&mut self) -> io::Result<u64> {
        let length = self.literal.min(CHUNK_BYTES as u64);
        let read = (&mut self.input).take(length).read_to_end(&mut self.output)?;
        if read as u64 != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.literal -= length;
        Ok(length)
    }
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

impl<R: BufRead> Read for SnappyReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.output.len() {
            // Everything was handed out: keep the window, drop what is behind it.
            let behind = self.output.len().saturating_sub(WINDOW_BYTES);
            self.output.drain(..behind);
            self.at = self.output.len();
            let mut remaining = match self.remaining {
                Some(remaining) => remaining,
                None => self.preamble()?,
            };
            while remaining > 0 && self.output.len() - self.at < CHUNK_BYTES {
                remaining -= self.element(remaining)?;
            }
            self.remaining = Some(remaining);
        }
        let count = buffer.len().min(self.output.len() - self.at);
        buffer[..count].copy_from_slice(&self.output[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decompress(compressed: &[u8]) -> io::Result<Vec<u8>> {
        let mut output = Vec::new();
        SnappyReader::new(compressed).read_to_end(&mut output)?;
        Ok(output)
    }

    proptest! {
        #[test]
        fn a_stream_gives_what_the_whole_block_gives(
            words in proptest::collection::vec(0u8..40, 0..400),
            repeats in 1usize..2000,
        ) {
            let mut plain = Vec::new();
            for index in 0..repeats {
                plain.extend(&words[..words.len() * (index % 7) / 7]);
                plain.extend((index as u32).to_le_bytes());
            }
            let compressed = snap::raw::Encoder::new().compress_vec(&plain).unwrap();
            prop_assert_eq!(decompress(&compressed).unwrap(), plain);
        }

        #[test]
        fn arbitrary_bytes_are_an_error_or_an_output_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = decompress(&bytes);
        }
    }

    #[test]
    fn a_copy_beyond_the_window_is_named() {
        // Declares 8 bytes; literal of 1 byte; copy of 4 bytes from 2 back.
        let error = decompress(&[8, 0x00, b'a', 0x01, 2]).unwrap_err();
        assert!(error.to_string().contains("reaches 2 bytes back"), "{error}");
    }
}
