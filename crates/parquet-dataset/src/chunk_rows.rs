//! Rows of one column chunk: opens the pages that hold them, and no other page.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Fault;
use crate::footer::Chunk;
use crate::io::Handle;
use crate::page_bytes::OpenPage;
use crate::page_map::ChunkMap;
use crate::page_rows::{Dictionary, Limits, PageRows};
use crate::rows::Column;

/// One chunk, ready to be read.
pub(crate) struct ChunkRows<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) chunk: &'a Chunk,
    pub(crate) map: &'a ChunkMap,
    /// Pages up to this size are held whole while they are read.
    pub(crate) whole_page_bytes: usize,
}

impl ChunkRows<'_> {
    /// Appends the rows in `ranges` (within the row group; ascending, disjoint, not empty) to `column`. On
    /// failure also says which rows the page has that was being read.
    pub(crate) fn read(
        &self,
        ranges: &[Range<u32>],
        column: &mut Column,
        limits: &mut Limits,
    ) -> Result<(), (Fault, Range<u32>)> {
        let mut page_rows = ranges.first().cloned().unwrap_or_default();
        // Decompressors are other people's code, fed with bytes that may be anything.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.read_pages(ranges, column, limits, &mut page_rows)));
        outcome.unwrap_or_else(|_| Fault::corrupt("its bytes made a decoder panic")).map_err(|fault| (fault, page_rows))
    }

    fn read_pages(
        &self,
        ranges: &[Range<u32>],
        column: &mut Column,
        limits: &mut Limits,
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
            let page = OpenPage::read(self.handle, entry, self.chunk.codec, self.whole_page_bytes)?;
            if page.header.needs_dictionary() && dictionary.is_none() {
                dictionary = self.dictionary()?;
            }
            let rows_in_page = page_rows.end - page_rows.start;
            let mut rows = PageRows::new(page, dictionary.as_ref(), self.chunk.max_definition_level, rows_in_page)?;
            let mut at = page_rows.start;
            while let Some(range) = pending.clone().filter(|range| range.start < page_rows.end) {
                let end = range.end.min(page_rows.end);
                if range.start > at {
                    rows.skip(range.start - at, limits)?;
                }
                rows.read(end - range.start, column, limits)?;
                at = end;
                pending = if end < range.end { Some(end..range.end) } else { ranges.next() };
            }
        }
        Ok(())
    }

    fn dictionary(&self) -> Result<Option<Dictionary>, Fault> {
        let Some(entry) = &self.map.dictionary else { return Ok(None) };
        let page = OpenPage::read(self.handle, entry, self.chunk.codec, self.whole_page_bytes)?;
        Dictionary::read(page).map(Some)
    }
}
