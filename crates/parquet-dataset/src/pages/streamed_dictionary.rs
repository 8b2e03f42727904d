//! [`StreamedDictionary`]: the values of a large dictionary, read as far as the rows so far needed it.
//!
//! Writers number the values of a dictionary by their first row. So rows in order take a dictionary's values in order, and
//! a value passes from the page to its row without being held. Short values are held for later rows, as are longer ones
//! up to [`HELD_BYTES`]. A later row that repeats another value reads it again.

use super::bytes::OpenPage;
use super::dictionary_source::{DictionarySource, MAX_HELD_BYTES, too_large};
use crate::error::Fault;
use crate::limits::Limits;
use crate::rows::Column;

/// Values up to this size are always held.
const SHORT_VALUE_BYTES: u64 = 4 << 10;
/// Bytes of values up to which longer values are held, too.
const HELD_BYTES: u64 = 4 << 20;
/// The value of the row before is held up to this size: rows often repeat it.
const LAST_VALUE_BYTES: u64 = 1 << 20;

/// A dictionary whose page is read once, forwards.
pub(crate) struct StreamedDictionary {
    source: DictionarySource,
    /// The page, at the first value that no row has needed.
    page: OpenPage,
    size: u64,
    values: u32,
    /// The values before.
    passed: Vec<Passed>,
    held: Vec<u8>,
    last: Option<(u32, Vec<u8>)>,
}

/// A value that was passed.
struct Passed {
    /// Its offset in the decompressed page.
    at: u64,
    bytes: u32,
    /// Its offset in the held bytes.
    held: Option<u32>,
}

impl StreamedDictionary {
    pub(crate) fn new(source: DictionarySource, page: OpenPage) -> Self {
        let (size, values) = (page.bytes.remaining(), page.header.values);
        Self { source, page, size, values, passed: Vec::new(), held: Vec::new(), last: None }
    }

    /// Appends value `index` to `column`, or the wanted part of it. The last value ends the reading of the page.
    pub(crate) fn read_value(
        &mut self,
        index: u32,
        row: u64,
        column: &mut Column,
        limits: &mut Limits<'_>,
    ) -> Result<(), Fault> {
        self.append(index, row, column, limits)?;
        if self.passed.len() == self.values as usize { self.page.bytes.finish() } else { Ok(()) }
    }

    fn append(&mut self, index: u32, row: u64, column: &mut Column, limits: &mut Limits<'_>) -> Result<(), Fault> {
        if index >= self.values {
            return Fault::corrupt(format!("dictionary index {index}, expected less than {}", self.values));
        }
        while self.passed.len() < index as usize {
            let length = self.next_value()?;
            if self.passed.last().is_some_and(|value| value.held.is_none()) {
                self.page.bytes.skip(length)?;
            }
        }
        let is_next = self.passed.len() == index as usize;
        if is_next {
            self.next_value()?;
        }
        let value = &self.passed[index as usize];
        let length = u64::from(value.bytes);
        let part = limits.admit(row, length)?;
        let wanted = part.start as usize..part.end as usize;
        let bytes = match (value.held, &self.last) {
            (Some(held), _) => &self.held[held as usize..held as usize + value.bytes as usize],
            (None, Some((last, bytes))) if *last == index => bytes,
            (None, _) if length <= LAST_VALUE_BYTES => {
                let mut bytes = self.last.take().map_or_else(Vec::new, |(_, bytes)| bytes);
                bytes.clear();
                match is_next {
                    true => self.page.bytes.take_into(length, &mut bytes)?,
                    false => {
                        let mut page = self.source.open()?;
                        page.bytes.skip(value.at)?;
                        page.bytes.take_into(length, &mut bytes)?;
                    }
                }
                &self.last.insert((index, bytes)).1
            }
            (None, _) => {
                let mut again = if is_next { None } else { Some(self.source.open()?) };
                let page = again.as_mut().map_or(&mut self.page.bytes, |page| &mut page.bytes);
                page.skip(part.start + if is_next { 0 } else { value.at })?;
                page.copy_to(part.end - part.start, column)?;
                if is_next {
                    page.skip(length - part.end)?;
                }
                column.finish(length, part.end - part.start < length);
                return Ok(());
            }
        };
        column.extend(&bytes[wanted]);
        column.finish(length, part.end - part.start < length);
        Ok(())
    }

    /// Passes to the next value and holds it, if it is to be held. The page is then behind the value, otherwise before it.
    fn next_value(&mut self) -> Result<u64, Fault> {
        let bytes = &mut self.page.bytes;
        let length = bytes.peek(4)?;
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        bytes.consume(4);
        if u64::from(length) > bytes.remaining() {
            return Fault::corrupt("a dictionary page ends before its last value");
        }
        let at = self.size - bytes.remaining();
        let after = self.held.len() as u64 + u64::from(length);
        let is_held = u64::from(length) <= SHORT_VALUE_BYTES || after <= HELD_BYTES;
        let state = (self.passed.len() * size_of::<Passed>()) as u64 + if is_held { after } else { 0 };
        if state > MAX_HELD_BYTES {
            return Err(too_large(state));
        }
        let held = is_held.then_some(self.held.len() as u32);
        if is_held {
            bytes.take_into(u64::from(length), &mut self.held)?;
        }
        self.passed.push(Passed { at, bytes: length, held });
        Ok(u64::from(length))
    }
}
