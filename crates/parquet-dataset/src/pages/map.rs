//! Page maps: the place and the rows of each page of a column chunk.
//!
//! With a page map, reading any block of rows needs one seek. A chunk's map is made when the chunk is first read
//! ([`super::find`]) and then kept: 24 bytes a page, and 4 for its digest.
//!
//! Invariant: the pages of a map lie within the chunk's bytes and start at row 0. Each page starts after the one before
//! it, in rows and in bytes. When a page is read, its header is compared with the map.

use std::ops::Range;

use super::digests::Digests;
use super::entry::{DictionaryPage, PageEntry};
use crate::footer::Chunk;

/// The pages of one column chunk.
#[derive(Debug, Default)]
pub(crate) struct ChunkMap {
    pub(crate) dictionary: Option<DictionaryPage>,
    /// Data pages, in the order of their rows. Pages without rows are left out.
    pub(crate) pages: Vec<PageEntry>,
    /// The largest window of pages that are decompressed as a zstd stream.
    pub(crate) window_bytes: u64,
    /// Digests of the pages' bytes at their first read.
    pub(crate) digests: Digests,
}

impl ChunkMap {
    /// The rows of page `index`, within the row group.
    pub(crate) fn rows_of(&self, index: usize, chunk_rows: u32) -> Range<u32> {
        let end = self.pages.get(index + 1).map_or(chunk_rows, |next| next.first_row);
        self.pages[index].first_row..end
    }

    /// The page that holds a row.
    pub(crate) fn page_of(&self, row: u32) -> usize {
        self.pages.partition_point(|page| page.first_row <= row).saturating_sub(1)
    }

    /// Bytes of memory of this map.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (size_of::<Self>() + self.pages.capacity() * size_of::<PageEntry>() + self.digests.memory_bytes()) as u64
    }

    /// The offset of the first page that has another place in `other`.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<u64> {
        let places = |map: &Self| {
            let dictionary = map.dictionary.map(|page| (page.entry.offset, page.entry.bytes, 0));
            let pages = map.pages.iter().map(|page| (page.offset, page.bytes, page.first_row));
            dictionary.into_iter().chain(pages).collect::<Vec<_>>()
        };
        let (ours, theirs) = (places(self), places(other));
        let same = ours.iter().zip(&theirs).take_while(|(ours, theirs)| ours == theirs).count();
        (same < ours.len().max(theirs.len())).then(|| ours.get(same).or(theirs.get(same)).map_or(0, |page| page.0))
    }

    /// Whether the map could belong to `chunk`.
    pub(crate) fn fits(&self, chunk: &Chunk) -> bool {
        let inside = |page: &PageEntry| {
            page.offset >= chunk.bytes.start && page.offset.saturating_add(u64::from(page.bytes)) <= chunk.bytes.end
        };
        let ascending = self.pages.windows(2).all(|pair| {
            pair[0].first_row < pair[1].first_row && pair[0].offset + u64::from(pair[0].bytes) <= pair[1].offset
        });
        self.dictionary.iter().map(|page| &page.entry).chain(&self.pages).all(inside)
            && ascending
            && self.pages.first().map_or(chunk.rows == 0, |first| first.first_row == 0)
            && self.pages.last().is_none_or(|last| last.first_row < chunk.rows)
    }
}
