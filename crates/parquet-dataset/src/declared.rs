//! [`Declared`]: what the pages of any columns declare about their sizes, for a decoder that holds pages whole.
//!
//! The headers of all pages are read and no data. The columns may have any type and codec.

use std::path::Path;

use crate::error::{Error, Location};
use crate::footer_walk::{RawChunk, Sink, walk};
use crate::io::{Files, Handle};
use crate::pages::header::{PageHeader, PageKind};
use crate::schema::Leaf;

/// The declared sizes of a file's pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Declared {
    /// The most bytes that a page takes: as stored, decompressed, and its levels.
    pub page_bytes: u64,
    /// The column with that page.
    pub column: String,
    /// The mean bytes of a row in the page where it is largest.
    pub row_bytes: u64,
    /// Whether a value may repeat the beginning of the one before: values then take more than their page.
    pub is_prefixed: bool,
    /// Bytes of the footer.
    pub footer_bytes: u64,
}

/// Reads the page headers of these columns, and of all columns within them.
///
/// # Errors
/// The file cannot be read, or a page lies outside of the file; [`Error::Encrypted`].
pub fn declared(path: &Path, columns: &[String]) -> Result<Declared, Error> {
    let mut files = Files::new(None);
    let (handle, identity) = files.add(path)?;
    let mut reader = Reader {
        path,
        handle: &handle,
        columns,
        wanted: Vec::new(),
        found: Declared::default(),
        data_end: identity.bytes,
    };
    walk(path, &handle, identity.bytes, &mut reader).map_err(|error| files.changed_or(0, error))?;
    let footer_bytes = identity.bytes.saturating_sub(reader.data_end + 8);
    Ok(Declared { footer_bytes, ..reader.found })
}

/// Levels of a value, while a page is decoded.
const LEVEL_BYTES: u64 = 8;
const DELTA_BYTE_ARRAY: u32 = 1 << 7;

struct Reader<'a> {
    path: &'a Path,
    handle: &'a Handle,
    columns: &'a [String],
    /// The wanted leaves, in order.
    wanted: Vec<WantedLeaf>,
    found: Declared,
    data_end: u64,
}

struct WantedLeaf {
    index: usize,
    path: String,
    /// Whether a dictionary's value is copied for each row.
    is_fixed: bool,
}

impl Sink for Reader<'_> {
    fn leaf(&mut self, index: usize, leaf: &Leaf<'_>) -> Result<(), Error> {
        let is_within = |column: &String| {
            leaf.path.strip_prefix(column.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if self.columns.iter().any(is_within) {
            self.wanted.push(WantedLeaf { index, path: leaf.path.to_owned(), is_fixed: leaf.has_fixed_length() });
        }
        Ok(())
    }

    fn end_of_schema(&mut self, _leaves: usize) -> Result<(), Error> {
        Ok(())
    }

    fn wants(&self, column: usize) -> bool {
        self.wanted.binary_search_by_key(&column, |leaf| leaf.index).is_ok()
    }

    fn row_group(&mut self, number: usize, rows: i64, raw: &[RawChunk], data_end: u64) -> Result<(), Error> {
        self.data_end = data_end;
        for (raw, leaf) in raw.iter().zip(&self.wanted) {
            let place = Location {
                path: self.path.to_owned(),
                row_group: Some(number),
                column: Some(leaf.path.clone()),
                rows: None,
            };
            if raw.is_encrypted {
                return Err(Error::Encrypted { path: place.path });
            }
            let corrupt = |reason: &str| Error::Corrupt { place: Box::new(place.clone()), reason: reason.to_owned() };
            let data = u64::try_from(raw.data_page_offset).map_err(|_| corrupt("its pages have no place"))?;
            let dictionary = raw.dictionary_page_offset.and_then(|offset| u64::try_from(offset).ok());
            let mut offset = dictionary.filter(|&offset| offset >= 4 && offset < data).unwrap_or(data);
            // A row of a list has several values.
            let values_of_a_row = (raw.values.max(0) / rows.max(1)).max(1) as u64;
            let (mut left, mut is_largest) = (raw.values.max(0) as u64, false);
            self.found.is_prefixed |= raw.encodings & DELTA_BYTE_ARRAY != 0;
            while left > 0 {
                let header =
                    PageHeader::read(self.handle, offset, data_end).map_err(|fault| fault.at(place.clone()))?;
                offset += header.total_bytes();
                if offset > data_end {
                    return Err(corrupt("its pages end after the data"));
                }
                let (size, values) = (u64::from(header.uncompressed_bytes), u64::from(header.values));
                let page_bytes = size + u64::from(header.compressed_bytes) + LEVEL_BYTES * values;
                let row_bytes = match header.kind {
                    PageKind::Data | PageKind::DataV2 => {
                        left = left.saturating_sub(values);
                        size / values.max(1) * values_of_a_row
                    }
                    PageKind::Dictionary if leaf.is_fixed => size,
                    PageKind::Dictionary | PageKind::Other => 0,
                };
                self.found.row_bytes = self.found.row_bytes.max(row_bytes);
                if page_bytes > self.found.page_bytes {
                    (self.found.page_bytes, is_largest) = (page_bytes, true);
                }
            }
            if is_largest {
                self.found.column.clone_from(&leaf.path);
            }
        }
        Ok(())
    }
}
