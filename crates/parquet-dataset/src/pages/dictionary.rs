//! A chunk's dictionary: its values, with long values left in the file.
//!
//! A dictionary of common size is its page, whole. From a larger dictionary, values of up to [`HELD_VALUE_BYTES`] are
//! held. A longer value is read from the page each time it is needed, and only as far as needed. So a dictionary with
//! one value of 60 MB takes only a few kilobytes more than a dictionary without it.

use std::sync::{Mutex, PoisonError};

use super::bytes::{OpenPage, PageBytes};
use super::dictionary_source::{DictionarySource, MAX_HELD_BYTES, too_large};
use super::entry::DictionaryPage;
use super::streamed_dictionary::StreamedDictionary;
use crate::error::Fault;
use crate::footer::Codec;
use crate::io::Handle;
use crate::limits::Limits;
use crate::rows::Column;

/// A longer value of a large dictionary is read again whenever it is needed.
const HELD_VALUE_BYTES: u64 = 1 << 20;

/// The values of a dictionary.
pub(crate) enum Dictionary {
    /// For rows in any order.
    Held(HeldDictionary),
    /// For rows in order, if the page is large.
    Streamed(Box<Mutex<StreamedDictionary>>),
}

/// The values of a dictionary, with long values left in the file.
pub(crate) struct HeldDictionary {
    source: DictionarySource,
    bytes: Vec<u8>,
    /// Value `i` lies at `starts[i]..starts[i + 1] - 4`: four bytes of length precede each value.
    starts: Vec<u32>,
    long: Vec<LongValue>,
}

/// A value that is not held in memory.
struct LongValue {
    index: u32,
    /// The offset of the value in the decompressed page.
    at: u64,
    bytes: u64,
}

impl DictionaryPage {
    /// Reads a large dictionary once, to find its memory. For a smaller dictionary the header suffices.
    pub(crate) fn examine(self, handle: &Handle, codec: Codec, whole_page_bytes: usize) -> Result<Self, Fault> {
        match self.is_streamed(whole_page_bytes) {
            true => {
                DictionarySource { handle: handle.clone(), page: self, map: None, codec, whole_page_bytes }.measure()
            }
            false => Ok(self),
        }
    }
}

impl Dictionary {
    /// Reads a dictionary for rows in any order.
    pub(crate) fn read(source: DictionarySource) -> Result<Self, Fault> {
        let page = source.open()?;
        HeldDictionary::read(source, page).map(Self::Held)
    }

    /// Opens a dictionary for rows in order.
    pub(crate) fn in_order(source: DictionarySource) -> Result<Self, Fault> {
        let page = source.open()?;
        match page.bytes.is_whole() {
            true => HeldDictionary::read(source, page).map(Self::Held),
            false => Ok(Self::Streamed(Box::new(Mutex::new(StreamedDictionary::new(source, page))))),
        }
    }

    /// Appends value `index` to `column`, or the wanted part of it.
    #[inline]
    pub(crate) fn read_value(
        &self,
        index: u32,
        row: u64,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), Fault> {
        match self {
            Self::Held(dictionary) => dictionary.read_value(index, row, column, limits),
            Self::Streamed(dictionary) => {
                dictionary.lock().unwrap_or_else(PoisonError::into_inner).read_value(index, row, column, limits)
            }
        }
    }
}

impl HeldDictionary {
    fn read(source: DictionarySource, page: OpenPage) -> Result<Self, Fault> {
        let room = source.page.held_bytes.min(MAX_HELD_BYTES) as usize;
        let mut dictionary = Self { source, bytes: Vec::new(), starts: Vec::new(), long: Vec::new() };
        if page.bytes.is_whole() {
            let values = page.header.values;
            dictionary.bytes = page.bytes.into_buffer();
            dictionary.find_starts(values)?;
            return Ok(dictionary);
        }
        let values = page.header.values as usize;
        dictionary.starts.reserve_exact((values + 1).min(room / 4 + 1));
        dictionary.bytes.reserve_exact(room.saturating_sub(4 * values));
        each_value(page, |index, at, length, bytes| {
            let start = dictionary.bytes.len() + 4;
            dictionary.starts.push(start as u32);
            dictionary.bytes.extend_from_slice(&[0; 4]);
            if length > HELD_VALUE_BYTES {
                dictionary.long.push(LongValue { index, at, bytes: length });
                return bytes.skip(length);
            }
            if (start + 4 * dictionary.starts.len()) as u64 + length > MAX_HELD_BYTES {
                return Err(too_large(start as u64 + length));
            }
            dictionary.bytes.extend_from_slice(bytes.peek(length as usize)?);
            bytes.consume(length as usize);
            Ok(())
        })?;
        dictionary.starts.push(dictionary.bytes.len() as u32 + 4);
        Ok(dictionary)
    }

    fn find_starts(&mut self, values: u32) -> Result<(), Fault> {
        let bytes = &self.bytes;
        let mut at = 0usize;
        self.starts.reserve_exact(values as usize + 1);
        for _ in 0..values {
            let length = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
            let end = length.map(|length| at + 4 + u32::from_le_bytes(*length) as usize);
            match end.filter(|&end| end <= bytes.len()) {
                Some(end) => {
                    self.starts.push(at as u32 + 4);
                    at = end;
                }
                None => return Fault::corrupt("a dictionary page ends before its last value"),
            }
        }
        self.starts.push(at as u32 + 4);
        Ok(())
    }

    #[inline]
    fn read_value(&self, index: u32, row: u64, column: &mut Column, limits: &mut Limits<'_>) -> Result<(), Fault> {
        let at = index as usize;
        if at + 1 >= self.starts.len() {
            let values = self.starts.len() - 1;
            return Fault::corrupt(format!("dictionary index {index}, expected less than {values}"));
        }
        let value = &self.bytes[self.starts[at] as usize..self.starts[at + 1] as usize - 4];
        if value.is_empty()
            && let Ok(long) = self.long.binary_search_by_key(&index, |long| long.index)
        {
            return self.read_long(&self.long[long], row, column, limits);
        }
        let part = limits.admit(row, value.len() as u64)?;
        column.extend(&value[part.start as usize..part.end as usize]);
        column.finish(value.len() as u64, part.end - part.start < value.len() as u64);
        Ok(())
    }

    #[cold]
    fn read_long(
        &self,
        value: &LongValue,
        row: u64,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), Fault> {
        let part = limits.admit(row, value.bytes)?;
        if !part.is_empty() {
            let mut page = self.source.open()?;
            page.bytes.skip(value.at + part.start)?;
            page.bytes.copy_to(part.end - part.start, column)?;
            page.bytes.finish()?;
        }
        column.finish(value.bytes, part.end - part.start < value.bytes);
        Ok(())
    }
}

impl DictionarySource {
    fn measure(&self) -> Result<DictionaryPage, Fault> {
        let page = self.open()?;
        let held_bytes = 4 + 8 * u64::from(page.header.values);
        let mut found = DictionaryPage { entry: self.page.entry, held_bytes, largest_value_bytes: 0 };
        each_value(page, |_, _, length, bytes| {
            found.largest_value_bytes = found.largest_value_bytes.max(length);
            found.held_bytes += if length > HELD_VALUE_BYTES { 2 * size_of::<LongValue>() as u64 } else { length };
            bytes.skip(length)
        })?;
        match found.held_bytes > MAX_HELD_BYTES {
            true => Err(too_large(found.held_bytes)),
            false => Ok(found),
        }
    }
}

/// Calls `take` for each value with its index, its offset, its length, and the page at the value's first byte.
fn each_value(
    mut page: OpenPage,
    mut take: impl FnMut(u32, u64, u64, &mut PageBytes) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let size = page.bytes.remaining();
    for index in 0..page.header.values {
        let length = page.bytes.peek(4)?;
        let length = u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
        page.bytes.consume(4);
        let left = page.bytes.remaining();
        if length > left {
            return Fault::corrupt("a dictionary page ends before its last value");
        }
        take(index, size - left, length, &mut page.bytes)?;
    }
    page.bytes.finish()
}
