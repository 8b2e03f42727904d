//! The decompressed bytes of one page, as a cursor that holds a bounded part of them.
//!
//! Pages of common size (up to [`WHOLE_PAGE_BYTES`]) are read with one `pread`, checked against their CRC if they have
//! one, and decompressed into one buffer. Larger pages (some writers make them as large as their row groups) are read
//! and decompressed as a stream through a buffer of [`STREAM_BUFFER_BYTES`]. In both cases the bytes are compared with
//! this run's first read of them; see [`crate::pages::digests`].
//!
//! Invariant: the buffer never grows beyond those two sizes, however long a value is. Exceptions are levels, dictionary
//! values and delta-encoded suffixes, which have limits of their own.

use std::io::{BufReader, Read};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use super::digests::PASS_BYTES;
use super::entry::PageEntry;
use super::file_range::{FileRange, compare_crc, decompression_fault};
use super::header::PageHeader;
use super::map::ChunkMap;
use super::snappy::{OUTPUT_BYTES, SnappyReader};
use crate::error::Fault;
use crate::footer::Codec;
use crate::io::Handle;
use crate::rows::Column;

/// Pages up to this size, compressed and decompressed, are held whole.
pub(crate) const WHOLE_PAGE_BYTES: usize = 4 << 20;
/// Data pages above this size are streamed if that takes less memory: a read needs only its rows of a page.
const WHOLE_DATA_PAGE_BYTES: usize = 192 << 10;
/// The buffer through which larger pages stream, and also the buffer of their compressed bytes.
pub(crate) const STREAM_BUFFER_BYTES: usize = 32 << 10;
/// zstd frames with a larger window (`--long`) are refused if they have to be streamed.
const MAX_ZSTD_WINDOW_LOG: u32 = 27;
/// Bytes of a zstd frame that suffice to find its window.
const ZSTD_HEADER_BYTES: u64 = 18;

/// The bytes that a page's decoders consume, in order.
pub(crate) struct PageBytes {
    buffer: Vec<u8>,
    /// The first byte not consumed.
    at: usize,
    /// Bytes that `rest` has not yet returned, as declared.
    unread: u64,
    rest: Rest,
}

enum Rest {
    Nothing,
    Raw(FileRange),
    Snappy(Box<SnappyReader<BufReader<FileRange>>>),
    Gzip(Box<MultiGzDecoder<BufReader<FileRange>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufReader<FileRange>>>),
}

impl PageBytes {
    /// Wraps bytes that are in memory already.
    pub(crate) fn whole(buffer: Vec<u8>) -> Self {
        Self { buffer, at: 0, unread: 0, rest: Rest::Nothing }
    }

    /// Opens bytes of a file that decompress to `decompressed` bytes, as a stream.
    fn stream(stored: FileRange, codec: Codec, decompressed: u32) -> Result<Self, Fault> {
        let rest = Rest::open(stored, codec)?;
        Ok(Self { buffer: Vec::new(), at: 0, unread: u64::from(decompressed), rest })
    }

    /// Ends the reading of the page and checks the bytes that were read.
    pub(crate) fn finish(&mut self) -> Result<(), Fault> {
        match &mut self.rest {
            Rest::Nothing => Ok(()),
            Rest::Raw(range) => range.finish(),
            Rest::Snappy(reader) => reader.get_mut().get_mut().finish(),
            Rest::Gzip(reader) => reader.get_mut().get_mut().finish(),
            Rest::Zstd(reader) => reader.get_mut().get_mut().finish(),
        }
    }

    /// Whether all unconsumed bytes are in memory.
    pub(crate) fn is_whole(&self) -> bool {
        self.unread == 0
    }

    /// Returns the unconsumed bytes in memory.
    pub(crate) fn into_buffer(mut self) -> Vec<u8> {
        self.buffer.drain(..self.at);
        self.buffer
    }

    /// Appends the next `count` bytes to `column`, a buffer of them at a time.
    pub(crate) fn copy_to(&mut self, mut count: u64, column: &mut Column) -> Result<(), Fault> {
        while count > 0 {
            let step = count.min(STREAM_BUFFER_BYTES as u64) as usize;
            column.extend(self.peek(step)?);
            self.consume(step);
            count -= step as u64;
        }
        Ok(())
    }

    /// Appends the next `count` bytes to `to`, a buffer of them at a time.
    pub(crate) fn take_into(&mut self, mut count: u64, to: &mut Vec<u8>) -> Result<(), Fault> {
        while count > 0 {
            let step = count.min(STREAM_BUFFER_BYTES as u64) as usize;
            to.extend_from_slice(self.peek(step)?);
            self.consume(step);
            count -= step as u64;
        }
        Ok(())
    }

    fn buffered(&self) -> usize {
        self.buffer.len() - self.at
    }

    /// Number of unconsumed bytes, as declared.
    pub(crate) fn remaining(&self) -> u64 {
        self.buffered() as u64 + self.unread
    }

    /// Returns the next `count` bytes, without consuming them.
    #[inline]
    pub(crate) fn peek(&mut self, count: usize) -> Result<&[u8], Fault> {
        if self.buffered() < count {
            self.fill(count)?;
        }
        Ok(&self.buffer[self.at..self.at + count])
    }

    /// Returns the next `count` bytes or, at the end of the page, all that remain.
    pub(crate) fn peek_up_to(&mut self, count: usize) -> Result<&[u8], Fault> {
        let available = self.remaining().min(count as u64);
        self.peek(available as usize)
    }

    /// Consumes bytes that were returned by a peek.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.buffered());
        self.at += count;
    }

    /// Consumes the next `count` bytes, whether buffered or not.
    #[inline]
    pub(crate) fn skip(&mut self, count: u64) -> Result<(), Fault> {
        if count <= self.buffered() as u64 {
            self.at += count as usize;
            return Ok(());
        }
        self.skip_unbuffered(count - self.buffered() as u64)
    }

    #[cold]
    fn skip_unbuffered(&mut self, mut count: u64) -> Result<(), Fault> {
        self.at = self.buffer.len();
        if count > self.unread {
            return ends_early(count, self.unread);
        }
        if let Rest::Raw(range) = &mut self.rest {
            range.skip(count)?;
            self.unread -= count;
            return Ok(());
        }
        while count > 0 {
            self.fill(count.min(STREAM_BUFFER_BYTES as u64) as usize)?;
            let step = count.min(self.buffered() as u64);
            self.at += step as usize;
            count -= step;
        }
        Ok(())
    }

    /// Makes at least `count` bytes available from `at` on.
    #[cold]
    fn fill(&mut self, count: usize) -> Result<(), Fault> {
        let missing = count - self.buffered();
        if missing as u64 > self.unread {
            return ends_early(count as u64, self.buffered() as u64 + self.unread);
        }
        self.buffer.drain(..self.at);
        self.at = 0;
        let target = count.max(STREAM_BUFFER_BYTES).min(self.buffer.len() + self.unread.min(1 << 40) as usize);
        while self.buffer.len() < count {
            // Grow with the data that arrives, not with a declared length.
            let held = self.buffer.len();
            let step = (target - held).min(held.max(STREAM_BUFFER_BYTES));
            self.buffer.resize(held + step, 0);
            let read = self.rest.read_full(&mut self.buffer[held..])?;
            self.buffer.truncate(held + read);
            self.unread -= read as u64;
            if read < step && self.buffer.len() < count {
                return ends_early(count as u64, self.buffer.len() as u64);
            }
        }
        Ok(())
    }
}

fn ends_early<T>(wanted: u64, available: u64) -> Result<T, Fault> {
    Fault::corrupt(format!("a page ends early: {wanted} bytes expected, {available} there"))
}

impl Rest {
    fn open(stored: FileRange, codec: Codec) -> Result<Self, Fault> {
        if codec == Codec::Uncompressed {
            return Ok(Self::Raw(stored));
        }
        let input = BufReader::with_capacity(STREAM_BUFFER_BYTES, stored);
        Ok(match codec {
            Codec::Uncompressed | Codec::Snappy => Self::Snappy(Box::new(SnappyReader::new(input))),
            Codec::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(input))),
            Codec::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(input).map_err(Fault::File)?;
                decoder.window_log_max(MAX_ZSTD_WINDOW_LOG).map_err(Fault::File)?;
                Self::Zstd(Box::new(decoder))
            }
        })
    }

    /// Fills `buffer`, or at the end only a part of it.
    fn read_full(&mut self, buffer: &mut [u8]) -> Result<usize, Fault> {
        let mut filled = 0;
        while filled < buffer.len() {
            let (codec, read) = match self {
                Self::Nothing => return Ok(filled),
                Self::Raw(reader) => ("raw", reader.read(&mut buffer[filled..])),
                Self::Snappy(reader) => ("snappy", reader.read(&mut buffer[filled..])),
                Self::Gzip(reader) => ("gzip", reader.read(&mut buffer[filled..])),
                Self::Zstd(reader) => ("zstd", reader.read(&mut buffer[filled..])),
            };
            match read.map_err(|error| decompression_fault(codec, error))? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }
}

/// A page as its decoders need it: the header, the levels of version 2, and the bytes after them.
pub(crate) struct OpenPage {
    pub(crate) header: PageHeader,
    /// Definition levels, stored apart from the values. Version 2 only.
    pub(crate) definitions: Vec<u8>,
    pub(crate) bytes: PageBytes,
}

impl OpenPage {
    /// Reads a page, whole if it is at most `whole_limit` bytes, compressed and decompressed.
    pub(crate) fn read(source: &PageSource<'_>, codec: Codec, whole_limit: usize) -> Result<Self, Fault> {
        let PageSource { handle, entry, check } = *source;
        let mut whole = None;
        let header = match entry.bytes.max(entry.uncompressed_bytes) as usize <= whole_limit {
            true => {
                let mut stored = vec![0; entry.bytes as usize];
                handle.read_exact_at(&mut stored, entry.offset)?;
                if let Some((map, slot)) = check {
                    map.digests.check_whole(slot, entry, &stored)?;
                }
                let header = PageHeader::parse(&stored)?;
                whole = Some(stored);
                header
            }
            false => PageHeader::read(handle, entry.offset, entry.offset + u64::from(entry.bytes))?,
        };
        if header.total_bytes() != u64::from(entry.bytes) {
            return Fault::corrupt(format!(
                "a page of {} bytes at {}, expected {}",
                header.total_bytes(),
                entry.offset,
                entry.bytes
            ));
        }
        let levels = header.repetition_level_bytes as usize + header.definition_level_bytes as usize;
        let codec = if header.is_compressed { codec } else { Codec::Uncompressed };
        let body = header.header_bytes as usize;
        if codec == Codec::Uncompressed && header.compressed_bytes != header.uncompressed_bytes {
            return Fault::corrupt(format!(
                "an uncompressed page of {} bytes declares {} uncompressed bytes",
                header.compressed_bytes, header.uncompressed_bytes
            ));
        }
        let size = header.uncompressed_bytes as usize - levels;
        if let Some(stored) = whole.filter(|_| header.uncompressed_bytes as usize <= whole_limit) {
            check_crc(&stored[body..], header.crc)?;
            let definitions = stored[body + header.repetition_level_bytes as usize..body + levels].to_vec();
            let bytes = match codec {
                Codec::Uncompressed => PageBytes { buffer: stored, at: body + levels, unread: 0, rest: Rest::Nothing },
                _ if size == 0 => PageBytes::whole(Vec::new()),
                codec => PageBytes::whole(decompress_whole(codec, &stored[body + levels..], size)?),
            };
            return Ok(Self { header, definitions, bytes });
        }
        if levels as u64 > 2 * max_level_bytes(header.values) {
            return Fault::corrupt(format!("{levels} bytes of levels for {} rows", header.values));
        }
        source.check_streamed_crc(&header)?;
        let mut stored = FileRange::new(handle, entry, check);
        stored.skip(body as u64)?;
        if check.is_none() {
            stored.expect_crc(header.crc);
        }
        stored.skip(u64::from(header.repetition_level_bytes))?;
        let mut definitions = vec![0; header.definition_level_bytes as usize];
        stored.read_exact(&mut definitions)?;
        let bytes = PageBytes::stream(stored, codec, size as u32)?;
        Ok(Self { header, definitions, bytes })
    }
}

/// A page's place, and the digests of its bytes.
#[derive(Clone, Copy)]
pub(crate) struct PageSource<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) entry: &'a PageEntry,
    /// The page's map and its slot in the map's digests.
    pub(crate) check: Option<(&'a Arc<ChunkMap>, usize)>,
}

impl PageSource<'_> {
    /// Compares a streamed page with its checksum once, unless all of it has been read before. A read stops at the last
    /// row that it needs, so later reads rely on the digests.
    fn check_streamed_crc(&self, header: &PageHeader) -> Result<(), Fault> {
        let (Some(expected), Some((map, slot))) = (header.crc, self.check) else { return Ok(()) };
        if map.digests.knows(slot, self.entry) {
            return Ok(());
        }
        let actual = map.digests.read_page(self.handle, slot, self.entry, u64::from(header.header_bytes))?;
        compare_crc(actual, expected)
    }

    /// Returns a fault of the page's bytes, or that the bytes have changed, if that explains it better.
    pub(crate) fn explained(&self, fault: Fault) -> Fault {
        let Some((map, slot)) = self.check else { return fault };
        if !matches!(fault, Fault::Corrupt(_) | Fault::UnexpectedEof(_) | Fault::Unsupported(_)) {
            return fault;
        }
        match map.digests.read_page(self.handle, slot, self.entry, 0) {
            Err(rewritten @ Fault::Rewritten { .. }) => rewritten,
            _ => fault,
        }
    }
}

/// Compares stored bytes with the checksum that their header declares.
fn check_crc(stored: &[u8], crc: Option<u32>) -> Result<(), Fault> {
    let Some(expected) = crc else { return Ok(()) };
    let mut actual = flate2::Crc::new();
    actual.update(stored);
    compare_crc(actual.sum(), expected)
}

/// Decompresses to exactly `size` bytes. Data with more or fewer bytes is an error, and never allocates more.
fn decompress_whole(codec: Codec, stored: &[u8], size: usize) -> Result<Vec<u8>, Fault> {
    let wrong = |codec: &str, found: String| {
        Fault::corrupt(format!("the {codec} data holds {found} bytes, its page declares {size}"))
    };
    match codec {
        Codec::Uncompressed => Ok(stored.to_vec()),
        Codec::Snappy => {
            let declared = snap::raw::decompress_len(stored).map_err(|error| snappy_fault(&error))?;
            if declared != size {
                return wrong("snappy", declared.to_string());
            }
            let mut output = vec![0; size];
            snap::raw::Decoder::new().decompress(stored, &mut output).map_err(|error| snappy_fault(&error))?;
            Ok(output)
        }
        Codec::Gzip => {
            let mut output = Vec::with_capacity(size + 1);
            let mut decoder = MultiGzDecoder::new(stored).take(size as u64 + 1);
            decoder.read_to_end(&mut output).map_err(|error| decompression_fault("gzip", error))?;
            match output.len() {
                length if length == size => Ok(output),
                length if length > size => wrong("gzip", format!("more than {size}")),
                length => wrong("gzip", length.to_string()),
            }
        }
        Codec::Zstd => {
            let mut output = Vec::with_capacity(size);
            zstd::bulk::Decompressor::new()
                .and_then(|mut decoder| decoder.decompress_to_buffer(stored, &mut output))
                .map_err(|error| decompression_fault("zstd", error))?;
            match output.len() == size {
                true => Ok(output),
                false => wrong("zstd", output.len().to_string()),
            }
        }
    }
}

fn snappy_fault(error: &snap::Error) -> Fault {
    Fault::Corrupt(format!("the snappy data cannot be decompressed: {error}").into())
}

/// The window for decompressing the zstd page at `entry` as a stream.
pub(crate) fn zstd_window(handle: &Handle, entry: &PageEntry) -> Result<u64, Fault> {
    let end = entry.offset + u64::from(entry.bytes);
    let header = PageHeader::read(handle, entry.offset, end)?;
    let levels = u64::from(header.repetition_level_bytes) + u64::from(header.definition_level_bytes);
    let at = (entry.offset + u64::from(header.header_bytes) + levels).min(end);
    let mut frame = vec![0; (end - at).min(ZSTD_HEADER_BYTES) as usize];
    handle.read_exact_at(&mut frame, at)?;
    let window = frame_window(&frame).unwrap_or(0);
    match header.is_compressed && window > 1 << MAX_ZSTD_WINDOW_LOG {
        true => Err(Fault::Unsupported(format!(
            "a zstd window of {window} bytes (expected at most {})",
            1u64 << MAX_ZSTD_WINDOW_LOG
        ))),
        false => Ok(window),
    }
}

/// The window of the frame that begins with `bytes`; format: RFC 8878, section 3.1.1.1.
fn frame_window(bytes: &[u8]) -> Option<u64> {
    let rest = bytes.strip_prefix(&0xfd2f_b528u32.to_le_bytes())?;
    let (&descriptor, rest) = rest.split_first()?;
    if descriptor & 0x20 == 0 {
        let window = rest.first()?;
        let base = 1u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // A single segment: the window equals the content size, which follows the dictionary id.
    let rest = rest.get([0, 1, 2, 4][usize::from(descriptor & 3)]..)?;
    let length = [1, 2, 4, 8][usize::from(descriptor >> 6)];
    let mut size = [0; 8];
    size[..length].copy_from_slice(rest.get(..length)?);
    Some(u64::from_le_bytes(size) + if length == 2 { 256 } else { 0 })
}

/// The most bytes of definition levels that are accepted for `rows` rows: two for each row, which is the most that runs
/// of a single value take. They are in memory while a page is read.
pub(crate) fn max_level_bytes(rows: u32) -> u64 {
    64 + 2 * u64::from(rows)
}

/// The size up to which data pages of this codec are held whole, if pages of `whole_page_bytes` may be. A zstd stream has a window and
/// a context, which take more memory than a page.
pub(crate) fn whole_data_page_bytes(codec: Codec, whole_page_bytes: usize) -> usize {
    match codec {
        Codec::Zstd => whole_page_bytes,
        Codec::Uncompressed | Codec::Snappy | Codec::Gzip => whole_page_bytes.min(WHOLE_DATA_PAGE_BYTES),
    }
}

/// Memory for reading a page: the stored and the decompressed bytes, or the stream's buffers. `window` is the window of
/// zstd streams.
pub(crate) fn page_memory_bytes(stored: u64, decompressed: u64, codec: Codec, window: u64, whole_limit: usize) -> u64 {
    let compressed = if codec == Codec::Uncompressed { 0 } else { stored };
    match stored.max(decompressed) <= whole_limit as u64 {
        true => compressed + decompressed,
        false => {
            let window = match codec {
                Codec::Uncompressed => 0,
                Codec::Snappy => OUTPUT_BYTES as u64,
                Codec::Gzip => 64 * 1024,
                // The context, the input block and the output of one step.
                Codec::Zstd => window.max(1 << 10) + 512 * 1024,
            };
            // At the end the rest of a stretch is read for its digest.
            (2 * STREAM_BUFFER_BYTES + PASS_BYTES) as u64 + window
        }
    }
}
