//! Footers: reads and checks the fields that reading rows needs.
//!
//! Invariant: memory grows with the row groups and the requested columns only, not with the rest of the footer.

use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Location};
use crate::footer_walk::{RawChunk, Sink, walk};
use crate::io::Handle;
use crate::schema::Leaf;

/// The most column names that an error lists.
const LISTED_COLUMNS: usize = 32;

/// Values of the parquet format's `Encoding`.
pub(crate) mod encoding {
    pub(crate) const PLAIN: i32 = 0;
    pub(crate) const PLAIN_DICTIONARY: i32 = 2;
    pub(crate) const RLE: i32 = 3;
    pub(crate) const DELTA_LENGTH_BYTE_ARRAY: i32 = 6;
    pub(crate) const DELTA_BYTE_ARRAY: i32 = 7;
    pub(crate) const RLE_DICTIONARY: i32 = 8;
}

/// The compression of a column chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Uncompressed,
    Snappy,
    Gzip,
    Zstd,
}

/// One column of one row group: its place and its storage format.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    /// From the first page's offset to an upper bound of the last page's end.
    pub(crate) bytes: Range<u64>,
    pub(crate) codec: Codec,
    pub(crate) rows: u32,
    /// Definition level of rows that are not null; 0 for a required column.
    pub(crate) max_definition_level: u8,
    pub(crate) compressed_bytes: u64,
    pub(crate) uncompressed_bytes: u64,
    /// Bytes of all values without their lengths, if the writer counted them.
    pub(crate) value_bytes: Option<u64>,
    pub(crate) has_dictionary: bool,
    /// Lengths per value in the chunk's delta encoding: 1 for its own, 2 for prefix and suffix, 0 for other encodings.
    pub(crate) delta_lengths: u8,
    /// The range of the offset index, if there is one.
    pub(crate) offset_index: Option<Range<u64>>,
}

/// One row group: its rows and the chunks of the requested columns, in the requested order.
#[derive(Debug, Clone)]
pub(crate) struct RowGroup {
    pub(crate) rows: u64,
    pub(crate) chunks: Vec<Chunk>,
}

/// The parts of a footer that a file keeps after opening.
#[derive(Debug, Clone)]
pub(crate) struct Footer {
    pub(crate) row_groups: Vec<RowGroup>,
    /// SHA-256 of the footer's bytes.
    pub(crate) hash: [u8; 32],
}

impl Footer {
    /// Reads the footer of a file and finds the named columns in it.
    pub(crate) fn read(path: &Path, handle: &Handle, file_bytes: u64, columns: &[String]) -> Result<Self, Error> {
        let mut reader = FooterReader {
            path,
            columns,
            found: vec![None; columns.len()],
            strings: StringColumns::default(),
            nested: vec![false; columns.len()],
            wanted: Vec::new(),
            row_groups: Vec::new(),
        };
        let walked = walk(path, handle, file_bytes, &mut reader)?;
        let row_groups = reader.row_groups;
        let rows: u64 = row_groups.iter().map(|group| group.rows).sum();
        if u64::try_from(walked.rows) != Ok(rows) {
            let reason = format!("it declares {} rows, but its row groups have {rows}", walked.rows);
            return Err(Error::Footer { path: path.to_owned(), reason });
        }
        Ok(Self { row_groups, hash: walked.hash })
    }
}

/// A requested leaf.
#[derive(Clone)]
struct FoundColumn {
    index: usize,
    is_string: bool,
    type_name: String,
    max_definition_level: u8,
}

/// Collects the chunks of the requested columns.
struct FooterReader<'a> {
    path: &'a Path,
    columns: &'a [String],
    found: Vec<Option<FoundColumn>>,
    /// For each requested column, whether it has leaves below it.
    nested: Vec<bool>,
    strings: StringColumns,
    /// The requested leaves, in order.
    wanted: Vec<usize>,
    row_groups: Vec<RowGroup>,
}

impl Sink for FooterReader<'_> {
    fn leaf(&mut self, index: usize, leaf: &Leaf<'_>) -> Result<(), Error> {
        if leaf.is_string() {
            self.strings.add(leaf.path);
        }
        for (position, column) in self.columns.iter().enumerate() {
            let Some(rest) = leaf.path.strip_prefix(column.as_str()) else { continue };
            self.nested[position] |= rest.starts_with('.');
            if rest.is_empty() && self.found[position].is_none() {
                self.found[position] = Some(FoundColumn {
                    index,
                    is_string: leaf.is_string(),
                    type_name: leaf.type_name(),
                    max_definition_level: leaf.max_definition_level.min(64) as u8,
                });
            }
        }
        Ok(())
    }

    fn end_of_schema(&mut self, _leaves: usize) -> Result<(), Error> {
        for (position, column) in self.columns.iter().enumerate() {
            let (path, column) = (self.path.to_owned(), column.clone());
            let string_columns = || self.strings.names();
            let found = match &self.found[position] {
                Some(found) if found.is_string => {
                    self.wanted.push(found.index);
                    continue;
                }
                Some(found) => found.type_name.clone(),
                // A list or a struct of that name has leaves below it.
                None if self.nested[position] => "a list, map or struct".to_owned(),
                None => return Err(Error::MissingColumn { path, column, string_columns: string_columns() }),
            };
            return Err(Error::WrongType { path, column, found, string_columns: string_columns() });
        }
        self.wanted.sort_unstable();
        Ok(())
    }

    fn wants(&self, column: usize) -> bool {
        self.wanted.binary_search(&column).is_ok()
    }

    fn row_group(&mut self, number: usize, rows: i64, raw: &[RawChunk], data_end: u64) -> Result<(), Error> {
        let corrupt = |reason| Error::Footer { path: self.path.to_owned(), reason };
        let Ok(group_rows) = u32::try_from(rows) else {
            return Err(corrupt(format!("row group {number} declares {rows} rows, expected 0 to {}", u32::MAX)));
        };
        let mut chunks = Vec::with_capacity(self.columns.len());
        for (name, found) in self.columns.iter().zip(&self.found) {
            let Some(found) = found else { continue };
            let Some(raw) = raw.iter().find(|raw| raw.column == found.index) else {
                return Err(corrupt(format!("row group {number} lacks column {}", found.index)));
            };
            let place = || Location {
                path: self.path.to_owned(),
                row_group: Some(number),
                column: Some(name.clone()),
                rows: None,
            };
            one_value_a_row(raw, group_rows, &place)?;
            chunks.push(chunk(raw, found.max_definition_level, group_rows, data_end, &place)?);
        }
        self.row_groups.push(RowGroup { rows: u64::from(group_rows), chunks });
        Ok(())
    }
}

/// The names of string columns, up to the number that an error lists.
#[derive(Default)]
struct StringColumns {
    names: Vec<String>,
    more: usize,
}

impl StringColumns {
    fn add(&mut self, name: &str) {
        match self.names.len() < LISTED_COLUMNS {
            true => self.names.push(name.to_owned()),
            false => self.more += 1,
        }
    }

    fn names(&self) -> Vec<String> {
        let more = (self.more > 0).then(|| format!("and {} more", self.more));
        self.names.iter().cloned().chain(more).collect()
    }
}

/// Checks that a flat column has a value or a null for each row.
pub(crate) fn one_value_a_row(raw: &RawChunk, rows: u32, place: &dyn Fn() -> Location) -> Result<(), Error> {
    if raw.has_metadata && raw.values != i64::from(rows) {
        let reason = format!("it declares {} values in {rows} rows", raw.values);
        return Err(Error::Corrupt { place: Box::new(place()), reason });
    }
    Ok(())
}

/// Checks a footer's fields for a column chunk of `rows` rows. Pages end before `data_end`.
pub(crate) fn chunk(
    raw: &RawChunk,
    max_definition_level: u8,
    rows: u32,
    data_end: u64,
    place: &dyn Fn() -> Location,
) -> Result<Chunk, Error> {
    let corrupt = |reason: String| Error::Corrupt { place: Box::new(place()), reason };
    let unsupported = |what: String| Error::Unsupported { place: Box::new(place()), what };
    if raw.is_in_another_file {
        return Err(unsupported("a column stored in another file".to_owned()));
    }
    if raw.is_encrypted {
        return Err(Error::Encrypted { path: place().path });
    }
    if !raw.has_metadata {
        return Err(unsupported("a column without metadata".to_owned()));
    }
    let codec = match raw.codec {
        0 => Codec::Uncompressed,
        1 => Codec::Snappy,
        2 => Codec::Gzip,
        6 => Codec::Zstd,
        other => return Err(unsupported(format!("compression {}", codec_name(other)))),
    };
    let unsigned = |value: i64, name: &str| {
        u64::try_from(value).map_err(|_| corrupt(format!("its {name} is {value}, expected 0 or more")))
    };
    let data = unsigned(raw.data_page_offset, "data page offset")?;
    let compressed_bytes = unsigned(raw.compressed_bytes, "compressed size")?;
    // Without a dictionary, some writers declare one at offset 0 or behind the data.
    let dictionary = raw.dictionary_page_offset.and_then(|offset| u64::try_from(offset).ok());
    let dictionary = dictionary.filter(|&offset| offset >= 4 && offset < data);
    let start = dictionary.unwrap_or(data);
    let fits = start.checked_add(compressed_bytes).is_some_and(|end| end <= data_end);
    if (rows > 0 && start < 4) || !fits {
        return Err(corrupt(format!(
            "its pages are declared at {start}, {compressed_bytes} bytes, expected within 4 and {data_end}"
        )));
    }
    let offset_index = match (raw.offset_index_offset, raw.offset_index_bytes) {
        (Some(offset), Some(length)) => u64::try_from(offset)
            .ok()
            .zip(u64::try_from(length).ok())
            .and_then(|(offset, length)| Some(offset..offset.checked_add(length)?))
            .filter(|range| range.end <= data_end && !range.is_empty()),
        _ => None,
    };
    let uses = |number: i32| raw.encodings >> number & 1 == 1;
    Ok(Chunk {
        // Old writers do not count the dictionary's header in the compressed size. So the footer's start and the number
        // of rows bound the pages instead.
        bytes: start..data_end,
        codec,
        rows,
        max_definition_level,
        compressed_bytes,
        uncompressed_bytes: unsigned(raw.uncompressed_bytes, "uncompressed size")?,
        value_bytes: raw.value_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        has_dictionary: dictionary.is_some(),
        delta_lengths: match (uses(encoding::DELTA_BYTE_ARRAY), uses(encoding::DELTA_LENGTH_BYTE_ARRAY)) {
            (true, _) => 2,
            (_, true) => 1,
            _ => 0,
        },
        offset_index,
    })
}

/// The name of a value of the format's `CompressionCodec`.
pub(crate) fn codec_name(codec: i32) -> &'static str {
    let names = ["UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW"];
    usize::try_from(codec).ok().and_then(|codec| names.get(codec).copied()).unwrap_or("of an unknown kind")
}

/// The name of a value of the format's `Encoding`.
pub(crate) fn encoding_name(number: u32) -> String {
    let names = [
        "PLAIN",
        "",
        "PLAIN_DICTIONARY",
        "RLE",
        "BIT_PACKED",
        "DELTA_BINARY_PACKED",
        "DELTA_LENGTH_BYTE_ARRAY",
        "DELTA_BYTE_ARRAY",
        "RLE_DICTIONARY",
        "BYTE_STREAM_SPLIT",
        "ALP",
    ];
    match names.get(number as usize) {
        Some(name) if !name.is_empty() => (*name).to_owned(),
        _ => format!("encoding {number}"),
    }
}
