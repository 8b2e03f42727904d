//! [`ReadOptions`]: how the bytes of files become rows, where the bytes alone do not say it.

use crate::MAX_ROW_BYTES;
use crate::encoding::Encoding;
use crate::parquet_writer::Sizes;

/// Whether quotes enclose fields of a CSV or TSV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quoting {
    /// In a CSV they do. In a TSV, whose fields need none, they are ordinary characters.
    #[default]
    Auto,
    /// They do.
    Quoted,
    /// They are ordinary characters.
    Plain,
}

impl Quoting {
    /// Whether quotes enclose fields between these delimiters.
    pub(crate) fn is_on(self, delimiter: u8) -> bool {
        match self {
            Self::Auto => delimiter != b'\t',
            Self::Quoted => true,
            Self::Plain => false,
        }
    }
}

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// The encoding of texts; `None`: UTF-8.
    pub encoding: Option<Encoding>,
    /// Quotes in CSV and TSV.
    pub quoting: Quoting,
    /// The longest row that is held, at most [`MAX_ROW_BYTES`]. A longer row is an error of that row.
    pub max_row_bytes: usize,
    /// The largest page of parquet, stored and decompressed, that is decoded whole. Larger ones are refused before.
    pub max_page_bytes: u64,
}

/// A page that is decoded whole is at most this large, if no budget says otherwise.
const MAX_PAGE_BYTES: u64 = 512 << 20;

impl Default for ReadOptions {
    fn default() -> Self {
        let (max_row_bytes, max_page_bytes) = (MAX_ROW_BYTES, MAX_PAGE_BYTES);
        Self { encoding: None, quoting: Quoting::Auto, max_row_bytes, max_page_bytes }
    }
}

/// Copies of the longest row that a conversion holds at a time, in tenths: the row, its encoded page, and the page
/// compressed. While the row is read, its line and its texts are held instead.
const ROW_COPIES_TENTHS: u64 = 35;
/// Buffers of the file that is read, and what is known of the files that are written.
const BUFFER_BYTES: u64 = 1 << 20;
/// A row up to this size is never refused for a budget.
const SHORT_ROW_BYTES: u64 = 64 << 10;
/// Pages that are decoded whole at a time: a page of each of two columns and their dictionaries.
const PAGES: u64 = 4;

/// The most bytes that a conversion takes, beside pages of parquet that are decoded whole. It reads files of `bytes` in all
/// and writes into `outputs` files, and its longest row has `longest` bytes.
pub fn conversion_bytes(bytes: u64, outputs: u64, longest: u64) -> u64 {
    let Sizes { page_bytes, row_group_bytes } = Sizes::for_bytes(bytes);
    let output = (row_group_bytes + 3 * page_bytes) as u64;
    BUFFER_BYTES + outputs * output + longest * ROW_COPIES_TENTHS / 10
}

impl ReadOptions {
    /// The options with limits such that a conversion stays within `budget`; arguments as of [`conversion_bytes`].
    #[must_use]
    pub fn within(self, budget: u64, bytes: u64, outputs: u64) -> Self {
        let left = budget.saturating_sub(conversion_bytes(bytes, outputs, 0));
        let longest = (left * 10 / ROW_COPIES_TENTHS).clamp(SHORT_ROW_BYTES, self.max_row_bytes as u64);
        let max_page_bytes = (left / PAGES).clamp(2 << 20, self.max_page_bytes);
        Self { max_row_bytes: longest as usize, max_page_bytes, ..self }
    }
}
