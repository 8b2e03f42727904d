//! Rows of one column chunk: opens the pages that hold them, and no other page.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::Fault;
use crate::footer::Chunk;
use crate::io::Handle;
use crate::limits::Limits;
use crate::pages::bytes::{OpenPage, PageSource, whole_data_page_bytes};
use crate::pages::dictionary::Dictionary;
use crate::pages::dictionary_source::DictionarySource;
use crate::pages::map::ChunkMap;
use crate::pages::rows::PageRows;
use crate::rows::Column;

/// The bill counts the lengths of delta-encoded values if the footer lists a delta encoding for the chunk. Some writers
/// omit it. Pages with at most this many rows are still accepted then, because their lengths take little memory.
const MAX_UNDECLARED_DELTA_ROWS: u32 = 1 << 16;

/// A column chunk, ready to be read.
pub(crate) struct ChunkRows<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) chunk: &'a Chunk,
    pub(crate) map: &'a Arc<ChunkMap>,
    /// The dataset's number of the chunk's first row.
    pub(crate) first_row: u64,
    /// Pages up to this size are held whole while they are read.
    pub(crate) whole_page_bytes: usize,
}

impl ChunkRows<'_> {
    /// Appends the rows in `ranges` (within the row group; ascending, disjoint, not empty) to `column`. On failure also
    /// returns the rows of the page that was being read.
    pub(crate) fn read(
        &self,
        ranges: &[Range<u32>],
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), (Fault, Range<u32>)> {
        let mut page_rows = ranges.first().cloned().unwrap_or_default();
        // Decompressors are third-party code, and the bytes may be anything.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.read_pages(ranges, column, limits, &mut page_rows)));
        outcome.unwrap_or_else(|_| Fault::corrupt("its bytes made a decoder panic")).map_err(|fault| (fault, page_rows))
    }

    fn read_pages(
        &self,
        ranges: &[Range<u32>],
        column: &mut Column,
        limits: &mut Limits<'_>,
        page_rows: &mut Range<u32>,
    ) -> Result<(), Fault> {
        let mut dictionary = None;
        let mut ranges = ranges.iter().cloned();
        let mut pending = ranges.next();
        while let Some(first) = &pending {
            let index = self.map.page_of(first.start);
            let Some(entry) = self.map.pages.get(index) else {
                return Fault::corrupt("its pages hold no rows");
            };
            *page_rows = self.map.rows_of(index, self.chunk.rows);
            let source = PageSource { handle: self.handle, entry, check: Some((self.map, index + 1)) };
            let page = self.open(&source, page_rows.end - page_rows.start)?;
            if page.header.needs_dictionary() && dictionary.is_none() {
                dictionary = self.dictionary()?;
            }
            // A fault from here on belongs to this page: the dictionary has been read.
            let read = || {
                let rows_in_page = page_rows.end - page_rows.start;
                let mut rows = PageRows::new(page, dictionary.as_ref(), self.chunk.max_definition_level, rows_in_page)?;
                let mut at = page_rows.start;
                while let Some(range) = pending.clone().filter(|range| range.start < page_rows.end) {
                    let end = range.end.min(page_rows.end);
                    if range.start > at {
                        rows.skip(range.start - at, limits)?;
                    }
                    rows.read(self.first_row + u64::from(range.start), end - range.start, column, limits)?;
                    at = end;
                    pending = if end < range.end { Some(end..range.end) } else { ranges.next() };
                }
                rows.finish()
            };
            read().map_err(|fault| source.explained(fault))?;
        }
        Ok(())
    }

    fn open(&self, source: &PageSource<'_>, rows: u32) -> Result<OpenPage, Fault> {
        let codec = self.chunk.codec;
        let page = OpenPage::read(source, codec, whole_data_page_bytes(codec, self.whole_page_bytes));
        let page = page.map_err(|fault| source.explained(fault))?;
        if page.header.is_delta() && self.chunk.delta_lengths == 0 && rows > MAX_UNDECLARED_DELTA_ROWS {
            return Fault::corrupt("a delta-encoded page, which the footer does not declare");
        }
        Ok(page)
    }

    fn dictionary(&self) -> Result<Option<Arc<Dictionary>>, Fault> {
        let Some(page) = self.map.dictionary else { return Ok(None) };
        let (handle, codec, whole_page_bytes) = (self.handle.clone(), self.chunk.codec, self.whole_page_bytes);
        let source = DictionarySource { handle, page, map: Some(Arc::clone(self.map)), codec, whole_page_bytes };
        let read = Dictionary::read(source.clone()).map(|dictionary| Some(Arc::new(dictionary)));
        read.map_err(|fault| source.page_source().explained(fault))
    }
}
