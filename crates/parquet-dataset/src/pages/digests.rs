//! Digests of pages: detect that a page's bytes changed since this run first read them.
//!
//! A page of common size has one word: the CRC-32 of its header and body as stored. The first read of the page sets it,
//! and every later read compares it. The check is one pass of an instruction that is faster than memory. A page of more
//! than [`ONE_WORD_BYTES`] has a word for each segment of [`SEGMENT_BYTES`]; only segments that are read are checked.
//!
//! An accidental change of a segment goes unnoticed in one of 2^32 cases. Changes of a segment that was never read are not noticed.

use std::sync::atomic::{AtomicU32, Ordering};

use flate2::Crc;

use super::entry::PageEntry;
use crate::error::Fault;
use crate::io::Handle;

/// A page up to this size has one digest.
const ONE_WORD_BYTES: u32 = 4 << 20;
/// The part of a larger page that has a digest of its own.
const SEGMENT_BYTES: u64 = 128 << 10;
/// Bytes per read, if bytes are read only for their digest.
pub(crate) const PASS_BYTES: usize = 64 << 10;

/// The digests of a chunk's pages. Slot 0 is the dictionary, slot `i + 1` page `i`.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    /// The value 0 stands for a segment that was never read.
    words: Vec<AtomicU32>,
    /// The slots with several words. For each, the number of words beyond one per slot, in all slots up to and
    /// including it.
    large: Vec<(u32, u32)>,
}

/// The size of a page's segments, each of which has a digest; the last segment may be smaller.
pub(crate) fn segment_bytes(page: &PageEntry) -> u64 {
    match page.bytes <= ONE_WORD_BYTES {
        true => u64::from(page.bytes.max(1)),
        false => SEGMENT_BYTES,
    }
}

/// The number of words of a page.
fn segments(page: &PageEntry) -> u64 {
    u64::from(page.bytes).div_ceil(segment_bytes(page)).max(1)
}

impl Digests {
    /// Makes digests for `dictionary` and `pages`, with no segment read yet.
    pub(crate) fn new(dictionary: Option<&PageEntry>, pages: &[PageEntry]) -> Self {
        let mut digests = Self::default();
        let mut more = 0;
        let sizes = std::iter::once(dictionary.map_or(1, segments)).chain(pages.iter().map(segments));
        for (slot, words) in sizes.enumerate() {
            if words > 1 {
                more += words as u32 - 1;
                digests.large.push((slot as u32, more));
            }
        }
        digests.words.resize_with(pages.len() + 1 + more as usize, AtomicU32::default);
        digests.large.shrink_to_fit();
        digests
    }

    /// The first word of a slot.
    pub(crate) fn first_word(&self, slot: usize) -> usize {
        match self.large.partition_point(|&(large, _)| (large as usize) < slot) {
            0 => slot,
            before => slot + self.large[before - 1].1 as usize,
        }
    }

    /// Sets the digest of a segment, or compares it with the earlier one.
    pub(crate) fn check(&self, word: usize, digest: &Crc, page: &PageEntry) -> Result<(), Fault> {
        // 0 means that no digest is known.
        let digest = digest.sum().max(1);
        match self.words[word].compare_exchange(0, digest, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(learnt) if learnt == digest => Ok(()),
            Err(_) => Err(Fault::Rewritten { at: page.offset }),
        }
    }

    /// Checks a whole page; `stored` is its header and body.
    pub(crate) fn check_whole(&self, slot: usize, page: &PageEntry, stored: &[u8]) -> Result<(), Fault> {
        for (word, segment) in (self.first_word(slot)..).zip(stored.chunks(segment_bytes(page) as usize)) {
            let mut digest = Crc::new();
            digest.update(segment);
            self.check(word, &digest, page)?;
        }
        Ok(())
    }

    /// Whether every segment of a page has a digest.
    pub(crate) fn knows(&self, slot: usize, page: &PageEntry) -> bool {
        let first = self.first_word(slot);
        self.words[first..first + segments(page) as usize].iter().all(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Reads a page only for its digests, which are set or compared. Returns the CRC-32 of the bytes after the first
    /// `header_bytes`.
    pub(crate) fn read_page(
        &self,
        handle: &Handle,
        slot: usize,
        page: &PageEntry,
        header_bytes: u64,
    ) -> Result<u32, Fault> {
        let (mut digest, mut body) = (Crc::new(), Crc::new());
        let mut piece = vec![0; PASS_BYTES];
        let (mut word, mut at, end) = (self.first_word(slot), 0, u64::from(page.bytes));
        let segment = segment_bytes(page);
        while at < end {
            // A piece ends at the header's end and at a segment's end.
            let stop = [header_bytes, at - at % segment + segment, at + PASS_BYTES as u64, end];
            let stop = stop.into_iter().filter(|&stop| stop > at).min().unwrap_or(end);
            let piece = &mut piece[..(stop - at) as usize];
            handle.read_exact_at(piece, page.offset + at)?;
            digest.update(piece);
            if at >= header_bytes {
                body.update(piece);
            }
            at = stop;
            if at % segment == 0 || at == end {
                self.check(word, &digest, page)?;
                digest.reset();
                word += 1;
            }
        }
        Ok(body.sum())
    }

    /// All words, to keep them beside a run.
    pub(crate) fn words(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().map(|word| word.load(Ordering::Relaxed))
    }

    /// The number of words.
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Restores a word from [`Digests::words`].
    pub(crate) fn set(&mut self, index: usize, word: u32) {
        if let Some(slot) = self.words.get_mut(index) {
            *slot = AtomicU32::new(word);
        }
    }

    /// Bytes of memory of the digests.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.words.capacity() * size_of::<AtomicU32>() + self.large.capacity() * size_of::<(u32, u32)>()
    }
}
