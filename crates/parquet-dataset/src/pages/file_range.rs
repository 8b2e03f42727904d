//! Bytes of a page as a stream, checked against the page's digests while they are read.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use flate2::Crc;

use super::digests::{PASS_BYTES, segment_bytes};
use super::entry::PageEntry;
use super::map::ChunkMap;
use crate::error::Fault;
use crate::io::Handle;

/// Bytes of a file, for decompressors. A read failure travels inside the `io::Error` as a [`FileFault`], so that it is
/// not mistaken for a fault of the compressed data.
pub(crate) struct FileRange {
    handle: Handle,
    bytes: Range<u64>,
    check: Option<SegmentCheck>,
    /// The checksum of the bytes so far, and the expected one of all bytes.
    crc: Option<(Crc, u32)>,
}

/// The digest of the current segment, from the segment's first byte on.
struct SegmentCheck {
    map: Arc<ChunkMap>,
    page: PageEntry,
    first_word: usize,
    digest: Crc,
}

impl FileRange {
    /// Opens the page at `page`, from its header on. If given a map and the page's slot in it, all bytes read are
    /// checked.
    pub(crate) fn new(handle: &Handle, page: &PageEntry, check: Option<(&Arc<ChunkMap>, usize)>) -> Self {
        let check = check.map(|(map, slot)| SegmentCheck {
            first_word: map.digests.first_word(slot),
            map: Arc::clone(map),
            page: *page,
            digest: Crc::new(),
        });
        let bytes = page.offset..page.offset + u64::from(page.bytes);
        Self { handle: handle.clone(), bytes, check, crc: None }
    }

    /// Compares the checksum of all bytes from here on with `expected` when the reading ends.
    pub(crate) fn expect_crc(&mut self, expected: Option<u32>) {
        self.crc = expected.map(|expected| (Crc::new(), expected));
    }

    /// Reads bytes, no more than remain.
    pub(crate) fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), Fault> {
        self.handle.read_exact_at(buffer, self.bytes.start)?;
        if let Some(check) = &mut self.check {
            check.feed(self.bytes.start, buffer)?;
        }
        if let Some((crc, _)) = &mut self.crc {
            crc.update(buffer);
        }
        self.bytes.start += buffer.len() as u64;
        Ok(())
    }

    /// Skips `count` bytes, no more than remain. Whole segments are not read.
    pub(crate) fn skip(&mut self, count: u64) -> Result<(), Fault> {
        let target = self.bytes.start + count;
        if let Some(check) = &self.check {
            let (_, segment_end) = check.segment(self.bytes.start);
            let (target_start, _) = check.segment(target);
            if self.bytes.start > check.segment(self.bytes.start).0 {
                self.read_through_to(target.min(segment_end))?;
            }
            if target > segment_end {
                self.bytes.start = self.bytes.start.max(target_start);
            }
            return self.read_through_to(target);
        }
        if self.crc.is_some() {
            return self.read_through_to(target);
        }
        self.bytes.start = target;
        Ok(())
    }

    /// Reads to the end of the current segment, or of the page if it has a checksum, so that every byte that was used is
    /// checked.
    pub(crate) fn finish(&mut self) -> Result<(), Fault> {
        if self.crc.is_some() {
            self.read_through_to(self.bytes.end)?;
        }
        if let Some((crc, expected)) = self.crc.take() {
            compare_crc(crc.sum(), expected)?;
        }
        let Some(check) = &self.check else { return Ok(()) };
        let (start, end) = check.segment(self.bytes.start);
        match start == self.bytes.start {
            true => Ok(()),
            false => self.read_through_to(end),
        }
    }

    fn read_through_to(&mut self, target: u64) -> Result<(), Fault> {
        let mut piece = vec![0; (target - self.bytes.start).min(PASS_BYTES as u64) as usize];
        while self.bytes.start < target {
            let count = (target - self.bytes.start).min(PASS_BYTES as u64) as usize;
            self.read_exact(&mut piece[..count])?;
        }
        Ok(())
    }
}

impl SegmentCheck {
    /// The start and end of the segment with byte `at` of the file. The end of the page counts as the start of a new
    /// segment.
    fn segment(&self, at: u64) -> (u64, u64) {
        let end = self.page.offset + u64::from(self.page.bytes);
        let (bytes, inside) = (segment_bytes(&self.page), at - self.page.offset);
        match at == end {
            true => (end, end),
            false => (at - inside % bytes, (at - inside % bytes + bytes).min(end)),
        }
    }

    /// Adds bytes at offset `at` to the digests.
    fn feed(&mut self, mut at: u64, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let (start, end) = self.segment(at);
            let (now, later) = bytes.split_at((end - at).min(bytes.len() as u64) as usize);
            self.digest.update(now);
            (at, bytes) = (at + now.len() as u64, later);
            if at == end {
                let word = self.first_word + ((start - self.page.offset) / segment_bytes(&self.page)) as usize;
                self.map.digests.check(word, &self.digest, &self.page)?;
                self.digest.reset();
            }
        }
        Ok(())
    }
}

impl io::Read for FileRange {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = (self.bytes.end - self.bytes.start).min(buffer.len() as u64) as usize;
        if count > 0 {
            self.read_exact(&mut buffer[..count])
                .map_err(|fault| io::Error::other(FileFault(Mutex::new(Some(fault)))))?;
        }
        Ok(count)
    }
}

/// A [`Fault`] of the file, passed through a decompressor.
#[derive(Debug)]
struct FileFault(Mutex<Option<Fault>>);

impl std::fmt::Display for FileFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the file could not be read")
    }
}

impl std::error::Error for FileFault {}

/// Separates a failure of the file from a fault that a decompressor found in its data.
pub(crate) fn decompression_fault(codec: &str, error: io::Error) -> Fault {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<FileFault>());
    match inner.and_then(|fault| fault.0.lock().unwrap_or_else(PoisonError::into_inner).take()) {
        Some(fault) => fault,
        None => Fault::Corrupt(format!("the {codec} data cannot be decompressed: {error}").into()),
    }
}

/// Compares a checksum with the one that a header declares.
pub(crate) fn compare_crc(actual: u32, expected: u32) -> Result<(), Fault> {
    match actual == expected {
        true => Ok(()),
        false => Fault::corrupt(format!("a page's checksum is {actual:08x}, expected {expected:08x}")),
    }
}
