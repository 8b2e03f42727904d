//! Page headers and offset indexes: the two sources of pages' places.

use crate::error::Fault;
use crate::footer::encoding;
use crate::io::Handle;
use crate::thrift::{Compact, Slice, kind};

/// The first read of a header. Headers have 20 to 60 bytes, more if they carry minimum and maximum strings.
const FIRST_HEADER_READ_BYTES: usize = 512;
/// Longer headers are refused.
const MAX_HEADER_BYTES: usize = 1 << 20;

/// The kind of a page's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageKind {
    Data,
    DataV2,
    Dictionary,
    /// An index page or a future type; readers skip it.
    Other,
}

/// A page header, as declared. It has not been compared with the page's bytes yet.
#[derive(Debug, Clone)]
pub(crate) struct PageHeader {
    pub(crate) kind: PageKind,
    /// Bytes of this header.
    pub(crate) header_bytes: u32,
    /// Bytes of the page after the header, as stored.
    pub(crate) compressed_bytes: u32,
    /// Bytes of the page after the header, once decompressed.
    pub(crate) uncompressed_bytes: u32,
    /// The CRC-32 of the page as stored, if the writer made one.
    pub(crate) crc: Option<u32>,
    /// Number of values, including nulls. In a flat column this is the number of rows.
    pub(crate) values: u32,
    pub(crate) encoding: i32,
    /// The encoding of definition levels in a version 1 page.
    pub(crate) definition_encoding: i32,
    /// Bytes of repetition and definition levels before the values, never compressed. Version 2 only.
    pub(crate) repetition_level_bytes: u32,
    pub(crate) definition_level_bytes: u32,
    /// Version 2 pages may stay uncompressed in a compressed chunk.
    pub(crate) is_compressed: bool,
}

impl PageHeader {
    /// Parses the header at the start of `bytes`.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let mut input = Compact::new(bytes);
        let mut page_type = None;
        let mut sizes = [None; 2];
        let mut header = Self {
            kind: PageKind::Other,
            header_bytes: 0,
            compressed_bytes: 0,
            uncompressed_bytes: 0,
            crc: None,
            values: 0,
            encoding: -1,
            definition_encoding: encoding::RLE,
            repetition_level_bytes: 0,
            definition_level_bytes: 0,
            is_compressed: true,
        };
        let mut described = PageKind::Other;
        let mut last = 0;
        while let Some(field) = input.field(&mut last)? {
            match (field.id, field.kind) {
                (1, kind::I32) => page_type = Some(input.i32()?),
                (2, kind::I32) => sizes[1] = Some(input.count("a page's uncompressed size")?),
                (3, kind::I32) => sizes[0] = Some(input.count("a page's compressed size")?),
                (4, kind::I32) => header.crc = Some(input.i32()? as u32),
                (5, kind::STRUCT) => {
                    header.data_v1(&mut input)?;
                    described = PageKind::Data;
                }
                (7, kind::STRUCT) => {
                    header.dictionary(&mut input)?;
                    described = PageKind::Dictionary;
                }
                (8, kind::STRUCT) => {
                    header.data_v2(&mut input)?;
                    described = PageKind::DataV2;
                }
                (_, other) => input.skip(other)?,
            }
        }
        let (Some(page_type), [Some(compressed), Some(uncompressed)]) = (page_type, sizes) else {
            return Fault::corrupt("a page header lacks its type or its sizes");
        };
        header.kind = match page_type {
            0 => PageKind::Data,
            2 => PageKind::Dictionary,
            3 => PageKind::DataV2,
            _ => PageKind::Other,
        };
        if header.kind != PageKind::Other && header.kind != described {
            return Fault::corrupt(format!("a page header of type {page_type} does not describe such a page"));
        }
        header.compressed_bytes = compressed;
        header.uncompressed_bytes = uncompressed;
        header.header_bytes = input.consumed() as u32;
        let level_bytes = u64::from(header.repetition_level_bytes) + u64::from(header.definition_level_bytes);
        if level_bytes > u64::from(compressed.min(uncompressed)) {
            return Fault::corrupt(format!("a page of {compressed} bytes declares {level_bytes} bytes of levels"));
        }
        Ok(header)
    }

    /// Reads the header at `offset`; all its bytes must lie before `end`.
    pub(crate) fn read(handle: &Handle, offset: u64, end: u64) -> Result<Self, Fault> {
        let mut want = FIRST_HEADER_READ_BYTES;
        loop {
            let available = end.saturating_sub(offset).min(want as u64) as usize;
            let mut buffer = vec![0; available];
            handle.read_exact_at(&mut buffer, offset)?;
            match Self::parse(&buffer) {
                Err(Fault::UnexpectedEof(_)) if available == want && want < MAX_HEADER_BYTES => want *= 8,
                parsed => return parsed,
            }
        }
    }

    /// Whether the page's values are indexes into its chunk's dictionary.
    pub(crate) fn needs_dictionary(&self) -> bool {
        matches!(self.encoding, encoding::RLE_DICTIONARY | encoding::PLAIN_DICTIONARY)
    }

    /// Whether the values have delta-encoded lengths.
    pub(crate) fn is_delta(&self) -> bool {
        matches!(self.encoding, encoding::DELTA_LENGTH_BYTE_ARRAY | encoding::DELTA_BYTE_ARRAY)
    }

    /// Header and body together.
    pub(crate) fn total_bytes(&self) -> u64 {
        u64::from(self.header_bytes) + u64::from(self.compressed_bytes)
    }

    fn data_v1(&mut self, input: &mut Compact<Slice<'_>>) -> Result<(), Fault> {
        let mut last = 0;
        while let Some(field) = input.field(&mut last)? {
            match (field.id, field.kind) {
                (1, kind::I32) => self.values = input.count("a page's number of values")?,
                (2, kind::I32) => self.encoding = input.i32()?,
                (3, kind::I32) => self.definition_encoding = input.i32()?,
                (_, other) => input.skip(other)?,
            }
        }
        Ok(())
    }

    fn dictionary(&mut self, input: &mut Compact<Slice<'_>>) -> Result<(), Fault> {
        let mut last = 0;
        while let Some(field) = input.field(&mut last)? {
            match (field.id, field.kind) {
                (1, kind::I32) => self.values = input.count("a dictionary's number of values")?,
                (2, kind::I32) => self.encoding = input.i32()?,
                (_, other) => input.skip(other)?,
            }
        }
        Ok(())
    }

    fn data_v2(&mut self, input: &mut Compact<Slice<'_>>) -> Result<(), Fault> {
        let mut last = 0;
        while let Some(field) = input.field(&mut last)? {
            match (field.id, field.kind) {
                (1, kind::I32) => self.values = input.count("a page's number of values")?,
                (4, kind::I32) => self.encoding = input.i32()?,
                (5, kind::I32) => self.definition_level_bytes = input.count("the size of definition levels")?,
                (6, kind::I32) => self.repetition_level_bytes = input.count("the size of repetition levels")?,
                (7, kind::TRUE) => self.is_compressed = true,
                (7, kind::FALSE) => self.is_compressed = false,
                (_, other) => input.skip(other)?,
            }
        }
        Ok(())
    }
}

/// One entry of an offset index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLocation {
    pub(crate) offset: i64,
    /// Header and body.
    pub(crate) bytes: i32,
    pub(crate) first_row: i64,
}

/// Parses an offset index. Its entries have not been checked yet.
pub(crate) fn parse_offset_index(bytes: &[u8]) -> Result<Vec<PageLocation>, Fault> {
    let mut input = Compact::new(bytes);
    let mut locations = Vec::new();
    let mut last = 0;
    while let Some(field) = input.field(&mut last)? {
        match (field.id, field.kind) {
            (1, kind::LIST) => {
                let (element, length) = input.list()?;
                if element != kind::STRUCT {
                    return Fault::corrupt("the offset index is not a list of page locations");
                }
                locations.reserve_exact(length);
                for _ in 0..length {
                    locations.push(parse_page_location(&mut input)?);
                }
            }
            (_, other) => input.skip(other)?,
        }
    }
    Ok(locations)
}

fn parse_page_location(input: &mut Compact<Slice<'_>>) -> Result<PageLocation, Fault> {
    let mut location = PageLocation { offset: -1, bytes: -1, first_row: -1 };
    let mut last = 0;
    while let Some(field) = input.field(&mut last)? {
        match (field.id, field.kind) {
            (1, kind::I64) => location.offset = input.i64()?,
            (2, kind::I32) => location.bytes = input.i32()?,
            (3, kind::I64) => location.first_row = input.i64()?,
            (_, other) => input.skip(other)?,
        }
    }
    Ok(location)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// type = DATA_PAGE, uncompressed 10, compressed 8, crc 1, data header {5 values, PLAIN, RLE, RLE}.
    const V1: &[u8] = &[
        0x15, 0x00, 0x15, 0x14, 0x15, 0x10, 0x15, 0x02, 0x1c, 0x15, 0x0a, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06, 0x00,
        0x00,
    ];

    #[test]
    fn a_version_1_header_is_read_field_by_field() {
        let header = PageHeader::parse(V1).unwrap();
        assert_eq!(header.kind, PageKind::Data);
        assert_eq!((header.uncompressed_bytes, header.compressed_bytes, header.values), (10, 8, 5));
        assert_eq!((header.crc, header.encoding, header.header_bytes), (Some(1), encoding::PLAIN, V1.len() as u32));
    }

    #[test]
    fn every_prefix_of_a_header_asks_for_more() {
        for length in 0..V1.len() {
            assert!(matches!(PageHeader::parse(&V1[..length]), Err(Fault::UnexpectedEof(_))), "{length}");
        }
    }

    #[test]
    fn a_negative_size_is_refused() {
        let mut bytes = V1.to_vec();
        bytes[5] = 0x11;
        assert!(matches!(PageHeader::parse(&bytes), Err(Fault::Corrupt(_))));
    }

    #[test]
    fn a_header_that_describes_another_kind_of_page_is_refused() {
        let mut bytes = V1.to_vec();
        bytes[1] = 0x04; // DICTIONARY_PAGE
        assert!(matches!(PageHeader::parse(&bytes), Err(Fault::Corrupt(_))));
    }
}
