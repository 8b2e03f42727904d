//! [`ChunkCursor`]: the rows of one column chunk in order, page by page.
//!
//! The cursor keeps its page open between two rows, so reading a chunk reads each of its bytes once. It walks over page
//! headers itself and needs no page map: its memory does not grow with the number of pages.

use std::sync::Arc;

use super::bytes::{OpenPage, PageSource, WHOLE_PAGE_BYTES, whole_data_page_bytes};
use super::dictionary::Dictionary;
use super::dictionary_source::DictionarySource;
use super::entry::{DictionaryPage, PageEntry};
use super::header::{PageHeader, PageKind};
use super::rows::PageRows;
use crate::error::Fault;
use crate::footer::Chunk;
use crate::io::Handle;
use crate::limits::Limits;
use crate::rows::Column;

/// A cursor over the rows of one column chunk.
pub(crate) struct ChunkCursor {
    handle: Handle,
    chunk: Chunk,
    /// The start of the next page.
    offset: u64,
    /// Rows in the pages that are not open yet.
    rows_left: u32,
    dictionary: Option<Arc<Dictionary>>,
    /// The open page, and its remaining rows.
    page: Option<(PageRows, u32)>,
}

impl ChunkCursor {
    pub(crate) fn new(handle: Handle, chunk: Chunk) -> Self {
        Self { handle, offset: chunk.bytes.start, rows_left: chunk.rows, dictionary: None, page: None, chunk }
    }

    /// Appends the next row to `column`. `row` is its number in the file.
    pub(crate) fn row(&mut self, row: u64, column: &mut Column, limits: &mut Limits<'_>) -> Result<(), Fault> {
        while self.page.is_none() {
            self.next_page()?;
        }
        let Some((page, left)) = &mut self.page else { return Ok(()) };
        page.read(row, 1, column, limits)?;
        *left -= 1;
        if *left == 0 {
            page.finish()?;
            self.page = None;
        }
        Ok(())
    }

    /// Reads the next page's header, and opens the page if it has rows.
    fn next_page(&mut self) -> Result<(), Fault> {
        if self.rows_left == 0 || self.offset >= self.chunk.bytes.end {
            return Fault::corrupt("its pages end before its last row");
        }
        let header = PageHeader::read(&self.handle, self.offset, self.chunk.bytes.end)?;
        let entry = PageEntry::new(self.offset, &header, 0);
        if header.total_bytes() > self.chunk.bytes.end - self.offset {
            let (bytes, at) = (header.total_bytes(), self.offset);
            return Fault::corrupt(format!("a page at {at} declares {bytes} bytes, more than its column has"));
        }
        self.offset += header.total_bytes();
        match header.kind {
            PageKind::Dictionary if self.dictionary.is_some() => Fault::corrupt("a second dictionary page"),
            PageKind::Dictionary => {
                self.dictionary = Some(Arc::new(Dictionary::in_order(DictionarySource {
                    handle: self.handle.clone(),
                    page: DictionaryPage::new(entry.offset, &header),
                    map: None,
                    codec: self.chunk.codec,
                    whole_page_bytes: WHOLE_PAGE_BYTES,
                })?));
                Ok(())
            }
            PageKind::Data | PageKind::DataV2 if header.values > 0 => {
                let Some(left) = self.rows_left.checked_sub(header.values) else {
                    let (values, left) = (header.values, self.rows_left);
                    return Fault::corrupt(format!("a page declares {values} rows, expected at most {left}"));
                };
                self.rows_left = left;
                let source = PageSource { handle: &self.handle, entry: &entry, check: None };
                let codec = self.chunk.codec;
                let page = OpenPage::read(&source, codec, whole_data_page_bytes(codec, WHOLE_PAGE_BYTES))?;
                let levels = self.chunk.max_definition_level;
                let rows = PageRows::new(page, self.dictionary.as_ref(), levels, header.values)?;
                self.page = Some((rows, header.values));
                Ok(())
            }
            PageKind::Data | PageKind::DataV2 | PageKind::Other => Ok(()),
        }
    }
}
