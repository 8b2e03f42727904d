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
const ROW_COPIES_TENTHS: u64 = 37;
/// Buffers of the file that is read, and what is known of the files that are written.
const BUFFER_BYTES: u64 = 1 << 20;
/// A row up to this size is never refused for a budget.
const SHORT_ROW_BYTES: u64 = 64 << 10;
/// A page up to this size is never refused for a budget.
const MIN_PAGE_BYTES: u64 = 2 << 20;
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
    /// The least and the most bytes that a conversion takes, as of [`conversion_bytes`]; `longest` is the longest possible row. With the
    /// least, long rows are refused.
    pub fn bytes_to_convert(bytes: u64, outputs: u64, longest: u64) -> [u64; 2] {
        [longest.min(SHORT_ROW_BYTES), longest].map(|row| conversion_bytes(bytes, outputs, row))
    }

    /// The least and the most bytes that it takes to read a file of this kind, whose longest possible row has `longest` bytes. With the
    /// least, long rows are refused.
    pub fn bytes_to_read(is_parquet: bool, longest: u64) -> [u64; 2] {
        let pages = |bytes: u64| if is_parquet { PAGES * bytes } else { 0 };
        let of = |row, page| conversion_bytes(0, 0, row).max(BUFFER_BYTES + pages(page));
        [of(longest.min(SHORT_ROW_BYTES), MIN_PAGE_BYTES), of(longest, longest.max(MIN_PAGE_BYTES))]
    }

    /// The options with limits such that a conversion stays within `budget`; arguments as of [`conversion_bytes`].
    #[must_use]
    pub fn within(self, budget: u64, bytes: u64, outputs: u64) -> Self {
        let left = budget.saturating_sub(conversion_bytes(bytes, outputs, 0));
        let longest = (left * 10 / ROW_COPIES_TENTHS).clamp(SHORT_ROW_BYTES, self.max_row_bytes as u64);
        let max_page_bytes = (left / PAGES).clamp(MIN_PAGE_BYTES, self.max_page_bytes);
        Self { max_row_bytes: longest as usize, max_page_bytes, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_within_the_bytes_to_read_a_file_are_those_of_the_file() {
        for (is_parquet, longest) in [(false, 100), (false, 1 << 20), (false, 16 << 20), (true, 1 << 20)] {
            let [least, most] = ReadOptions::bytes_to_read(is_parquet, longest);
            assert!(least <= most);
            let within = |budget| ReadOptions::default().within(budget, 0, 0).max_row_bytes as u64;
            // Rounding takes a few bytes.
            assert!(within(most) + 16 >= longest, "{longest}: {}", within(most));
            assert!(within(least) >= longest.min(SHORT_ROW_BYTES));
        }
        assert!(ReadOptions::bytes_to_read(true, 100)[0] > ReadOptions::bytes_to_read(false, 100)[0]);
    }
}
