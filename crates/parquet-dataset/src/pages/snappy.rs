//! Decodes snappy's raw format as a stream: for pages too large to hold whole, and to stop early.
//!
//! The `snap` crate decompresses a raw block only as a whole. Writers' copies never reach back further than 64 KiB
//! (every known compressor works on independent fragments of that size), so decompression needs only a window of that
//! size. A copy that reaches further is a specific error, never a wrong byte; format: google/snappy
//! `format_description.txt`.

use std::io::{self, BufRead, Read};

/// The furthest that a copy may reach back.
const WINDOW_BYTES: usize = 64 * 1024;
/// Bytes of output gathered before they are handed out.
const CHUNK_BYTES: usize = 64 * 1024;
/// The longest copy.
const MAX_COPY_BYTES: usize = 64;
/// Short literals and copies are written in steps of this size, which may write up to one step beyond their end.
const STEP_BYTES: usize = 16;
/// The buffer of both.
pub(crate) const OUTPUT_BYTES: usize = WINDOW_BYTES + CHUNK_BYTES + MAX_COPY_BYTES + STEP_BYTES;

/// Decompresses one raw snappy block read from `input`.
pub(crate) struct SnappyReader<R> {
    input: R,
    output: Output,
    /// Bytes not yet decompressed, as the block's preamble declares; `None` before the preamble is read.
    remaining: Option<u64>,
    /// Bytes of the current literal that have not been read.
    literal: u64,
}

/// Decompressed bytes: up to a window of bytes already handed out, then the others.
struct Output {
    buffer: Vec<u8>,
    /// Start of the bytes that have not been handed out.
    at: usize,
    end: usize,
}

impl Output {
    fn is_full(&self) -> bool {
        self.end - self.at >= CHUNK_BYTES
    }

    /// Drops the bytes before the window, once all output was handed out.
    fn forget_behind_window(&mut self) {
        let behind = self.end.saturating_sub(WINDOW_BYTES);
        self.buffer.copy_within(behind..self.end, 0);
        self.end -= behind;
        self.at = self.end;
    }

    /// Appends as much of a literal as fits; `bytes` may continue after the literal.
    #[inline]
    fn literal(&mut self, bytes: &[u8], length: usize) -> usize {
        if length <= STEP_BYTES
            && let Some(step) = bytes.first_chunk::<STEP_BYTES>()
        {
            self.buffer[self.end..self.end + STEP_BYTES].copy_from_slice(step);
            self.end += length;
            return length;
        }
        let count = length.min(bytes.len()).min(OUTPUT_BYTES - STEP_BYTES - self.end);
        self.buffer[self.end..self.end + count].copy_from_slice(&bytes[..count]);
        self.end += count;
        count
    }

    /// Repeats `length` bytes, at most [`MAX_COPY_BYTES`], from `offset` bytes back.
    #[inline]
    fn copy(&mut self, length: usize, offset: usize) -> io::Result<()> {
        if offset == 0 || offset > self.end {
            return Err(invalid(&format!("a copy reaches {offset} bytes back, expected 1 to {}", self.end)));
        }
        let start = self.end - offset;
        if offset >= STEP_BYTES {
            for step in (0..length).step_by(STEP_BYTES) {
                self.buffer.copy_within(start + step..start + step + STEP_BYTES, self.end + step);
            }
        } else {
            // The copy overlaps its own output: it repeats the last `offset` bytes.
            for index in 0..length {
                self.buffer[self.end + index] = self.buffer[start + index];
            }
        }
        self.end += length;
        Ok(())
    }
}

impl<R: BufRead> SnappyReader<R> {
    pub(crate) fn new(input: R) -> Self {
        let output = Output { buffer: vec![0; OUTPUT_BYTES], at: 0, end: 0 };
        Self { input, output, remaining: None, literal: 0 }
    }

    /// The source of the compressed bytes.
    pub(crate) fn get_mut(&mut self) -> &mut R {
        &mut self.input
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.input.read_exact(&mut byte)?;
        Ok(byte[0])
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

    /// Decompresses until there are enough bytes to hand out, or until the end.
    fn decompress(&mut self) -> io::Result<()> {
        let mut remaining = match self.remaining {
            Some(remaining) => remaining,
            None => self.preamble()?,
        };
        while remaining > 0 && !self.output.is_full() {
            if self.literal > 0 {
                let input = self.input.fill_buf()?;
                let length = usize::try_from(self.literal).unwrap_or(usize::MAX).min(input.len());
                if length == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                let count = self.output.literal(&input[..length], length);
                self.input.consume(count);
                self.literal -= count as u64;
                remaining -= count as u64;
                continue;
            }
            let input = self.input.fill_buf()?;
            if input.len() >= 5 {
                let (consumed, literal) = elements(input, &mut self.output, &mut remaining)?;
                self.input.consume(consumed);
                self.literal = literal;
            } else {
                self.element_across_reads(&mut remaining)?;
            }
        }
        self.remaining = Some(remaining);
        Ok(())
    }

    /// Decodes one element whose tag may continue in the next piece of input. The caller copies a literal's bytes.
    fn element_across_reads(&mut self, remaining: &mut u64) -> io::Result<()> {
        let mut tag = [0; 5];
        tag[0] = self.byte()?;
        let extra = tag_bytes(tag[0]);
        self.input.read_exact(&mut tag[1..1 + extra])?;
        let (length, offset) = element(&tag, extra);
        if length > *remaining {
            return Err(invalid("it holds more bytes than it declares"));
        }
        match offset {
            None => self.literal = length,
            Some(offset) => {
                self.output.copy(length as usize, offset)?;
                *remaining -= length;
            }
        }
        Ok(())
    }
}

/// Decompresses the elements whose whole tags lie in `input`. Returns the bytes consumed, and the missing bytes of the
/// last literal.
fn elements(input: &[u8], output: &mut Output, remaining: &mut u64) -> io::Result<(usize, u64)> {
    let mut at = 0;
    while *remaining > 0 && !output.is_full() {
        let Some(tag) = input[at..].first_chunk::<5>() else { break };
        let extra = tag_bytes(tag[0]);
        let (length, offset) = element(tag, extra);
        if length > *remaining {
            return Err(invalid("it holds more bytes than it declares"));
        }
        at += 1 + extra;
        match offset {
            Some(offset) => {
                output.copy(length as usize, offset)?;
                *remaining -= length;
            }
            None => {
                let count = output.literal(&input[at..], length as usize);
                at += count;
                *remaining -= count as u64;
                if (count as u64) < length {
                    return Ok((at, length - count as u64));
                }
            }
        }
    }
    Ok((at, 0))
}

/// The number of bytes of a tag after its first byte.
#[inline]
fn tag_bytes(first: u8) -> usize {
    match (first & 3, first >> 2) {
        (0, 0..60) => 0,
        (0, long) => usize::from(long) - 59,
        (1, _) => 1,
        (2, _) => 2,
        _ => 4,
    }
}

/// The length of an element and, for a copy, its offset.
#[inline]
fn element(tag: &[u8; 5], extra: usize) -> (u64, Option<usize>) {
    let following = u32::from_le_bytes([tag[1], tag[2], tag[3], tag[4]]);
    let following = match extra {
        4 => following,
        extra => following & ((1 << (8 * extra)) - 1),
    };
    match tag[0] & 3 {
        0 if extra == 0 => (u64::from(tag[0] >> 2) + 1, None),
        0 => (u64::from(following) + 1, None),
        1 => (4 + u64::from(tag[0] >> 2 & 7), Some(usize::from(tag[0] >> 5) << 8 | following as usize)),
        _ => (1 + u64::from(tag[0] >> 2), Some(following as usize)),
    }
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

impl<R: BufRead> Read for SnappyReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.output.at == self.output.end {
            self.output.forget_behind_window();
            self.decompress()?;
        }
        let count = buffer.len().min(self.output.end - self.output.at);
        buffer[..count].copy_from_slice(&self.output.buffer[self.output.at..self.output.at + count]);
        self.output.at += count;
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
    fn input_in_small_pieces_gives_the_same() {
        let plain: Vec<u8> = (0..300_000u32).flat_map(|index| (index / 3 % 70_000).to_le_bytes()).collect();
        let compressed = snap::raw::Encoder::new().compress_vec(&plain).unwrap();
        for piece in [1, 3, 7, 1000] {
            let mut output = Vec::new();
            let input = io::BufReader::with_capacity(piece, &compressed[..]);
            SnappyReader::new(input).read_to_end(&mut output).unwrap();
            assert!(output == plain, "pieces of {piece} bytes");
        }
    }

    #[test]
    fn a_copy_beyond_the_window_is_named() {
        // Declares 8 bytes; a literal of 1 byte; a copy of 4 bytes from 2 back.
        let error = decompress(&[8, 0x00, b'a', 0x01, 2]).unwrap_err();
        assert!(error.to_string().contains("reaches 2 bytes back"), "{error}");
    }
}
