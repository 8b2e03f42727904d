//! [`ListCursor`]: one column of lists in one row group, read row by row and page by page.
//!
//! A page holds a repetition level, a definition level and perhaps a value for each element (parquet-format, "Nested
//! Encoding"; the levels are Dremel's). Repetition level 0 begins a row. Levels are run-length encoded. The cursor takes
//! whole runs at once, so a list of a billion nulls costs no more than a list of ten.

use std::sync::Arc;

use super::bytes::{OpenPage, PageBytes, PageSource, WHOLE_PAGE_BYTES};
use super::dictionary::{Dictionary, DictionarySource};
use super::entry::{DictionaryPage, PageEntry};
use super::header::{PageHeader, PageKind};
use super::rows::{Values, version_1_levels};
use super::runs::Runs;
use crate::error::Fault;
use crate::footer::Chunk;
use crate::io::Handle;
use crate::limits::Limits;
use crate::rows::Column;

/// The most levels of a page, which are held whole. Writers stop pages at 1 MiB of values by default.
const MAX_LEVELS: u32 = 1 << 24;

/// Definition levels of a column of lists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListLevels {
    /// The level of a value.
    pub(crate) value: u8,
    /// The level of an element, with or without a value.
    pub(crate) element: u8,
}

/// A cursor over the rows of one column chunk.
pub(crate) struct ListCursor {
    handle: Handle,
    chunk: Chunk,
    value: u32,
    element: u32,
    /// The start of the next page.
    offset: u64,
    /// Levels in the pages that are not open yet.
    levels_left: u64,
    dictionary: Option<Arc<Dictionary>>,
    page: Option<ListPage>,
}

/// The open page.
struct ListPage {
    repetitions: Levels,
    definitions: Levels,
    bytes: PageBytes,
    values: Values,
    /// Levels of the page, and the number that remains.
    levels: u32,
    left: u64,
}

/// Levels of a page, a run at a time.
struct Levels {
    bytes: PageBytes,
    runs: Runs,
    level: u32,
    /// Repetitions of `level` that remain.
    left: u64,
}

/// A row that was read.
pub(crate) struct FoundRow {
    pub(crate) elements: u64,
    pub(crate) is_null: bool,
}

impl ListCursor {
    pub(crate) fn new(handle: Handle, chunk: Chunk, levels: u64, of: ListLevels) -> Self {
        Self {
            handle,
            value: u32::from(of.value),
            element: u32::from(of.element),
            offset: chunk.bytes.start,
            levels_left: levels,
            dictionary: None,
            page: None,
            chunk,
        }
    }

    /// Appends the elements of the next row to `column`, at most `most` of them. `row` is the row's number in the file.
    pub(crate) fn row(
        &mut self,
        row: u64,
        most: usize,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<FoundRow, Fault> {
        let mut found = FoundRow { elements: 0, is_null: false };
        let mut is_first = true;
        loop {
            if self.page.as_ref().is_none_or(|page| page.left == 0) && !self.next_page()? {
                return match is_first {
                    true => Fault::corrupt("its pages end before its last row"),
                    false => Ok(found),
                };
            }
            let Some(page) = &mut self.page else { return Ok(found) };
            let repeats = page.repetitions.look(page.left)?;
            let begins_row = page.repetitions.level == 0;
            if begins_row != is_first {
                return match is_first {
                    true => Fault::corrupt("a row group begins within a list"),
                    false => Ok(found),
                };
            }
            if page.repetitions.level > 1 {
                return Fault::corrupt("a repetition level of more than 1");
            }
            let count = page.definitions.look(page.left)?.min(if is_first { 1 } else { repeats });
            let level = page.definitions.level;
            if level > self.value {
                return Fault::corrupt(format!("a definition level of {level}, expected at most {}", self.value));
            }
            page.repetitions.left -= count;
            page.definitions.left -= count;
            page.left -= count;
            if level < self.element {
                // There is no list, or the list is empty.
                found.is_null = level + 1 < self.element;
            } else {
                let kept = (most as u64).saturating_sub(found.elements).min(count);
                found.elements += count;
                match level == self.value {
                    true => {
                        page.values.read(&mut page.bytes, row..row + kept, page.levels, column, limits)?;
                        page.values.skip(&mut page.bytes, count - kept, page.levels, limits)?;
                    }
                    false => (0..kept).for_each(|_| column.push_null()),
                }
            }
            is_first = false;
        }
    }

    /// Checks that nothing remains after the last row.
    pub(crate) fn finish(&mut self) -> Result<(), Fault> {
        match self.page.as_ref().map_or(0, |page| page.left) + self.levels_left {
            0 => Ok(()),
            left => Fault::corrupt(format!("its pages hold {left} more values than its rows")),
        }
    }

    /// Opens the next data page; false after the last.
    fn next_page(&mut self) -> Result<bool, Fault> {
        self.page = None;
        while self.levels_left > 0 {
            let header = PageHeader::read(&self.handle, self.offset, self.chunk.bytes.end)?;
            let entry = PageEntry::of(self.offset, &header, 0);
            let end = self.offset + header.total_bytes();
            if end > self.chunk.bytes.end {
                return Fault::corrupt(format!("a page at {} that ends behind its column", self.offset));
            }
            self.offset = end;
            match header.kind {
                PageKind::Other => {}
                PageKind::Dictionary if self.dictionary.is_some() => {
                    return Fault::corrupt("a second dictionary page");
                }
                PageKind::Dictionary => {
                    self.dictionary = Some(Arc::new(self.read_dictionary(DictionaryPage::of(entry.offset, &header))?))
                }
                PageKind::Data | PageKind::DataV2 if header.values == 0 => {}
                PageKind::Data | PageKind::DataV2 => {
                    if u64::from(header.values) > self.levels_left {
                        return Fault::corrupt(format!(
                            "a page declares {} values, expected at most {}",
                            header.values, self.levels_left
                        ));
                    }
                    self.levels_left -= u64::from(header.values);
                    self.page = Some(self.open(&entry)?);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn open(&self, entry: &PageEntry) -> Result<ListPage, Fault> {
        let source = PageSource { handle: &self.handle, entry, check: None };
        let OpenPage { header, repetitions, definitions, mut bytes } =
            OpenPage::read(&source, self.chunk.codec, WHOLE_PAGE_BYTES)?;
        let levels = header.values;
        if levels > MAX_LEVELS {
            return Err(Fault::Unsupported(format!(
                "a page of {levels} values in lists (expected at most {MAX_LEVELS})"
            )));
        }
        let (repetitions, definitions) = match header.kind {
            PageKind::DataV2 => (repetitions, definitions),
            _ => {
                let repetitions = version_1_levels(&mut bytes, header.repetition_encoding, levels)?;
                (repetitions, version_1_levels(&mut bytes, header.definition_encoding, levels)?)
            }
        };
        Ok(ListPage {
            repetitions: Levels::new(repetitions, 1),
            definitions: Levels::new(definitions, self.value),
            values: Values::new(&header, self.dictionary.as_ref(), levels)?,
            bytes,
            levels,
            left: u64::from(levels),
        })
    }

    fn read_dictionary(&self, page: DictionaryPage) -> Result<Dictionary, Fault> {
        let page = page.examine(&self.handle, self.chunk.codec, WHOLE_PAGE_BYTES)?;
        Dictionary::read(DictionarySource {
            handle: self.handle.clone(),
            page,
            map: None,
            codec: self.chunk.codec,
            whole_page_bytes: WHOLE_PAGE_BYTES,
        })
    }
}

impl Levels {
    /// Decodes levels from 0 to `most`.
    fn new(bytes: Vec<u8>, most: u32) -> Self {
        let bit_width = (32 - most.leading_zeros()) as u8;
        Self { bytes: PageBytes::whole(bytes), runs: Runs::new(bit_width), level: 0, left: 0 }
    }

    /// Returns the remaining repetitions of [`Levels::level`], at least one. The page has `left` more levels.
    fn look(&mut self, left: u64) -> Result<u64, Fault> {
        if self.left == 0 {
            (self.level, self.left) = self.runs.next(&mut self.bytes, left)?;
        }
        Ok(self.left)
    }
}
