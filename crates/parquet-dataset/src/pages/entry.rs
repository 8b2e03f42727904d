//! The place and the size of a page in its file.

use super::header::PageHeader;

/// One page: header and body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageEntry {
    pub(crate) offset: u64,
    /// Header and body, as stored.
    pub(crate) bytes: u32,
    /// The decompressed body; 0 if only an offset index was read, which does not give it.
    pub(crate) uncompressed_bytes: u32,
    /// The first row within the row group; 0 for a dictionary page.
    pub(crate) first_row: u32,
}

impl PageEntry {
    /// The page with this header at `offset`.
    pub(crate) fn new(offset: u64, header: &PageHeader, first_row: u32) -> Self {
        Self {
            offset,
            bytes: u32::try_from(header.total_bytes()).unwrap_or(u32::MAX),
            uncompressed_bytes: header.uncompressed_bytes,
            first_row,
        }
    }
}

/// A dictionary's entry in the page map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DictionaryPage {
    pub(crate) entry: PageEntry,
    /// Bytes of memory of the dictionary once it is read.
    pub(crate) held_bytes: u64,
    /// Upper bound of the dictionary's values.
    pub(crate) largest_value_bytes: u64,
}

impl DictionaryPage {
    /// A dictionary with only its header read: its page, and the start of each value.
    pub(crate) fn new(offset: u64, header: &PageHeader) -> Self {
        let entry = PageEntry::new(offset, header, 0);
        let size = u64::from(entry.uncompressed_bytes);
        // Each value has a length of four bytes in the page.
        let starts = 4 * (u64::from(header.values) + 1).min(size / 4 + 1);
        Self { entry, held_bytes: size + starts, largest_value_bytes: size }
    }

    /// Whether the page is too large to be held whole while it is read.
    pub(crate) fn is_streamed(&self, whole_page_bytes: usize) -> bool {
        self.entry.bytes.max(self.entry.uncompressed_bytes) as usize > whole_page_bytes
    }
}
