//! [`RowText`]: the text of a row, with perhaps only its beginning in memory.
//!
//! A batch's rows are read with as many bytes of each value as its tokens usually take. Where the tokens take more (a
//! megabyte of spaces, say), later segments of the value are read one at a time. So a long value is never in memory
//! whole.

use std::ops::Range;

use parquet_dataset::{Dataset, Rows};

use crate::error::Error;
use crate::tokenizer::{Source, TextFault};

/// Bytes of a long value that are read at a time.
pub(crate) const SEGMENT_BYTES: usize = 64 << 10;
/// Bytes that are searched at a time for a character other than white space.
const PROBE_BYTES: usize = 16 << 10;

/// The place of a row's text.
#[derive(Clone, Copy)]
pub(crate) struct TextLocation<'a> {
    pub dataset: &'a Dataset,
    pub row: u64,
    /// The column's index in the dataset.
    pub column: usize,
}

/// A text, and the means to read more of it.
pub(crate) struct RowText<'a> {
    place: TextLocation<'a>,
    /// Bytes of the whole text.
    bytes: usize,
    /// The beginning of the text.
    held: &'a [u8],
    /// A later segment: rows with this row alone, and the segment's start in the text.
    later: Option<(Rows, usize)>,
    /// Asked before each further read.
    stop: &'a dyn Fn() -> bool,
}

impl<'a> RowText<'a> {
    pub fn new(place: TextLocation<'a>, bytes: usize, held: &'a [u8], stop: &'a dyn Fn() -> bool) -> Self {
        Self { place, bytes, held, later: None, stop }
    }

    /// Whether the text is only white space.
    pub fn is_blank(&mut self) -> Result<bool, TextFault> {
        let mut at = 0;
        while at < self.bytes {
            // Look at the bytes in memory first, up to a limit: a usual text needs one look.
            let end = self.bytes.min(if at == 0 { self.held.len().clamp(4, PROBE_BYTES) } else { at + PROBE_BYTES });
            let text = self.segment(at..end)?;
            if !text.trim_start().is_empty() {
                return Ok(false);
            }
            at += text.len();
        }
        Ok(true)
    }

    /// The beginning of the text, as far as it is in memory.
    pub fn beginning(&self) -> Result<&'a str, TextFault> {
        as_text(self.held, self.held.len() == self.bytes)
    }

    fn read(&mut self, range: Range<usize>) -> Result<(), TextFault> {
        if (self.stop)() {
            return Err(TextFault::Stopped);
        }
        // It makes room for the next.
        self.later = None;
        let TextLocation { dataset, row, column } = self.place;
        let wanted = range.start as u64..range.end as u64;
        let part = |_, of_column, _| if of_column == column { wanted.clone() } else { 0..0 };
        let rows = dataset.read_parts(&[row], 0, &part).map_err(Error::from)?;
        self.later = Some((rows, range.start));
        Ok(())
    }

    fn later(&self, range: &Range<usize>) -> Option<&[u8]> {
        let (rows, start) = self.later.as_ref()?;
        rows.bytes(self.place.column, 0)?.get(range.start.checked_sub(*start)?..range.end - start)
    }
}

impl Source for RowText<'_> {
    fn len(&self) -> usize {
        self.bytes
    }

    fn segment(&mut self, range: Range<usize>) -> Result<&str, TextFault> {
        let is_last = range.end == self.bytes;
        if let Some(bytes) = self.held.get(range.clone()) {
            return as_text(bytes, is_last);
        }
        if self.later(&range).is_none() {
            let end = range.end.max(self.bytes.min(range.start + SEGMENT_BYTES));
            self.read(range.start..end)?;
        }
        // If the file changed, the dataset returned an error; the case left here is a value that is missing.
        as_text(self.later(&range).ok_or(TextFault::NotUtf8)?, is_last)
    }
}

/// Bytes as text. If the text continues after them, a character that is cut off at the end is left out.
pub(crate) fn as_text(bytes: &[u8], is_last: bool) -> Result<&str, TextFault> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) if error.error_len().is_none() && !is_last => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).map_err(|_| TextFault::NotUtf8)
        }
        Err(_) => Err(TextFault::NotUtf8),
    }
}
