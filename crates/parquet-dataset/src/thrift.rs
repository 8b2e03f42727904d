//! A reader of Thrift's compact protocol that allocates nothing and does work bounded by its input.
//!
//! Parquet's footers, page headers and offset indexes are compact-protocol structs. The parquet crate parses page
//! headers only together with the page after them, and footers only as a whole, into fifteen times their size. Here
//! both are walked, and every declared length is compared with the bytes that exist.
//!
//! Invariant: each call either consumes at least one byte or returns; no declared size is trusted beyond the remaining
//! bytes.

use crate::error::Fault;

/// The deepest nesting of structs and lists. Parquet's own metadata needs 7.
const MAX_DEPTH: u8 = 24;

/// A compact-protocol type, as it appears in field headers.
pub(crate) mod kind {
    pub(crate) const STOP: u8 = 0;
    pub(crate) const TRUE: u8 = 1;
    pub(crate) const FALSE: u8 = 2;
    pub(crate) const I8: u8 = 3;
    pub(crate) const I16: u8 = 4;
    pub(crate) const I32: u8 = 5;
    pub(crate) const I64: u8 = 6;
    pub(crate) const DOUBLE: u8 = 7;
    pub(crate) const BINARY: u8 = 8;
    pub(crate) const LIST: u8 = 9;
    pub(crate) const SET: u8 = 10;
    pub(crate) const MAP: u8 = 11;
    pub(crate) const STRUCT: u8 = 12;
    pub(crate) const UUID: u8 = 13;
}

/// A source of compact-protocol bytes. Reading beyond the end is [`Fault::UnexpectedEof`]: the caller may hold only a prefix.
pub(crate) trait Source {
    /// Returns the next byte.
    fn byte(&mut self) -> Result<u8, Fault>;
    /// The number of unconsumed bytes.
    fn remaining(&self) -> u64;
    /// Consumes `count` bytes, no more than remain, and appends them to `to` if given.
    fn take(&mut self, count: u64, to: Option<&mut Vec<u8>>) -> Result<(), Fault>;
}

/// Bytes in memory.
pub(crate) struct Slice<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Source for Slice<'_> {
    #[inline]
    fn byte(&mut self) -> Result<u8, Fault> {
        let Some(&byte) = self.bytes.get(self.at) else {
            return Fault::unexpected_eof("the metadata ends in the middle of a field");
        };
        self.at += 1;
        Ok(byte)
    }

    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, count: u64, to: Option<&mut Vec<u8>>) -> Result<(), Fault> {
        let end = self.at + count as usize;
        if let Some(to) = to {
            to.extend_from_slice(&self.bytes[self.at..end]);
        }
        self.at = end;
        Ok(())
    }
}

/// A cursor over compact-protocol bytes.
pub(crate) struct Compact<S> {
    source: S,
}

/// One field of a struct: its id and its type. For booleans the type is the value.
#[derive(Clone, Copy)]
pub(crate) struct Field {
    pub(crate) id: i16,
    pub(crate) kind: u8,
}

impl<'a> Compact<Slice<'a>> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { source: Slice { bytes, at: 0 } }
    }

    /// The number of consumed bytes.
    pub(crate) fn consumed(&self) -> usize {
        self.source.at
    }
}

impl<S: Source> Compact<S> {
    pub(crate) fn from_source(source: S) -> Self {
        Self { source }
    }

    pub(crate) fn into_source(self) -> S {
        self.source
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        self.source.byte()
    }

    fn remaining(&self) -> u64 {
        self.source.remaining()
    }

    fn skip_bytes(&mut self, count: u64) -> Result<(), Fault> {
        self.take(count, None)
    }

    fn take(&mut self, count: u64, to: Option<&mut Vec<u8>>) -> Result<(), Fault> {
        if count > self.remaining() {
            return Fault::unexpected_eof(format!(
                "the metadata declares a field of {count} bytes where {} remain",
                self.remaining()
            ));
        }
        self.source.take(count, to)
    }

    /// Reads a string or byte string of at most `most` bytes.
    pub(crate) fn binary(&mut self, most: usize) -> Result<Vec<u8>, Fault> {
        let length = self.varint()?;
        if length > most as u64 {
            return Fault::corrupt(format!("the metadata holds a name of {length} bytes, expected at most {most}"));
        }
        let mut bytes = Vec::with_capacity(length as usize);
        self.take(length, Some(&mut bytes))?;
        Ok(bytes)
    }

    /// Reads a string or byte string, or skips it if it has more than `most` bytes.
    pub(crate) fn short_binary(&mut self, most: usize) -> Result<Option<Vec<u8>>, Fault> {
        let length = self.varint()?;
        if length > most as u64 {
            return self.skip_bytes(length).map(|()| None);
        }
        let mut bytes = Vec::with_capacity(length as usize);
        self.take(length, Some(&mut bytes))?;
        Ok(Some(bytes))
    }

    /// Skips a string or byte string and returns its length.
    pub(crate) fn skip_binary(&mut self) -> Result<u64, Fault> {
        let length = self.varint()?;
        self.skip_bytes(length).map(|()| length)
    }

    fn varint(&mut self) -> Result<u64, Fault> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Fault::corrupt("the metadata holds an integer of more than ten bytes")
    }

    /// Reads a zigzag integer: Thrift's i16, i32 or i64.
    pub(crate) fn i64(&mut self) -> Result<i64, Fault> {
        let raw = self.varint()?;
        Ok((raw >> 1) as i64 ^ -((raw & 1) as i64))
    }

    pub(crate) fn i32(&mut self) -> Result<i32, Fault> {
        let value = self.i64()?;
        i32::try_from(value).or_else(|_| Fault::corrupt(format!("the metadata holds {value} in a 32-bit field")))
    }

    /// Reads a size or count: a non-negative i32.
    pub(crate) fn count(&mut self, name: &str) -> Result<u32, Fault> {
        let value = self.i32()?;
        u32::try_from(value).or_else(|_| Fault::corrupt(format!("the metadata declares {value} as {name}")))
    }

    /// Reads the next field of a struct; `None` at its end. `last` is the id of the previous field, at first 0.
    pub(crate) fn field(&mut self, last: &mut i16) -> Result<Option<Field>, Fault> {
        let header = self.byte()?;
        let kind = header & 0x0f;
        if kind == kind::STOP {
            return Ok(None);
        }
        let id = match header >> 4 {
            0 => self.i64()? as i16,
            delta => last.wrapping_add(i16::from(delta)),
        };
        *last = id;
        Ok(Some(Field { id, kind }))
    }

    /// Reads the element type and length of a list. Every element takes at least one byte, so the length can be
    /// checked.
    pub(crate) fn list(&mut self) -> Result<(u8, usize), Fault> {
        let header = self.byte()?;
        let length = match header >> 4 {
            15 => self.varint()?,
            short => u64::from(short),
        };
        if length > self.remaining() {
            return Fault::unexpected_eof(format!(
                "the metadata declares a list of {length} elements where {} bytes remain",
                self.remaining()
            ));
        }
        Ok((header & 0x0f, length as usize))
    }

    /// Skips one field's value.
    pub(crate) fn skip(&mut self, kind: u8) -> Result<(), Fault> {
        match kind {
            kind::TRUE | kind::FALSE => Ok(()),
            kind => self.skip_element(kind, MAX_DEPTH),
        }
    }

    /// Skips a struct, which checks every length inside it.
    pub(crate) fn skip_struct(&mut self) -> Result<(), Fault> {
        self.skip_element(kind::STRUCT, MAX_DEPTH)
    }

    /// In lists and maps a boolean takes one byte. In a field it takes none, and the caller handles it.
    fn skip_element(&mut self, kind: u8, depth: u8) -> Result<(), Fault> {
        let Some(depth) = depth.checked_sub(1) else {
            return Fault::corrupt("the metadata nests too deeply");
        };
        match kind {
            kind::TRUE | kind::FALSE | kind::I8 => self.byte().map(|_| ()),
            kind::I16 | kind::I32 | kind::I64 => self.varint().map(|_| ()),
            kind::DOUBLE => self.skip_bytes(8),
            kind::UUID => self.skip_bytes(16),
            kind::BINARY => {
                self.skip_binary()?;
                Ok(())
            }
            kind::LIST | kind::SET => {
                let (element, length) = self.list()?;
                (0..length).try_for_each(|_| self.skip_element(element, depth))
            }
            kind::MAP => {
                let length = self.varint()?;
                if length == 0 {
                    return Ok(());
                }
                let kinds = self.byte()?;
                if length > self.remaining() {
                    return Fault::unexpected_eof("the metadata declares a map of more entries than bytes");
                }
                (0..length).try_for_each(|_| {
                    self.skip_element(kinds >> 4, depth)?;
                    self.skip_element(kinds & 0x0f, depth)
                })
            }
            kind::STRUCT => {
                let mut last = 0;
                while let Some(field) = self.field(&mut last)? {
                    if !matches!(field.kind, kind::TRUE | kind::FALSE) {
                        self.skip_element(field.kind, depth)?;
                    }
                }
                Ok(())
            }
            other => Fault::corrupt(format!("the metadata holds a field of unknown type {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_length_is_never_believed_beyond_the_bytes_that_remain() {
        // A struct with one binary field that claims two gigabytes.
        let bytes = [0x18, 0xff, 0xff, 0xff, 0xff, 0x07, 0x00];
        assert!(matches!(Compact::new(&bytes).skip_struct(), Err(Fault::UnexpectedEof(_))));
        // A list of two billion booleans.
        let bytes = [0x19, 0xf1, 0xff, 0xff, 0xff, 0xff, 0x07, 0x00];
        assert!(matches!(Compact::new(&bytes).skip_struct(), Err(Fault::UnexpectedEof(_))));
    }

    #[test]
    fn nesting_is_bounded() {
        let bytes = [0x1c; 4096];
        assert!(matches!(Compact::new(&bytes).skip_struct(), Err(Fault::Corrupt(_))));
    }

    #[test]
    fn an_integer_of_more_than_ten_bytes_is_refused() {
        assert!(matches!(Compact::new(&[0xff; 16]).i64(), Err(Fault::Corrupt(_))));
    }
}
