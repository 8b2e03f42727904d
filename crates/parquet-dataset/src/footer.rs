//! Footers: reads one, checks it, and keeps only what reading rows needs.
//!
//! Invariants: a footer is read with two positional reads at most; no declared size is believed beyond the
//! file; panics in the parquet crate's parser become errors; the parser's own, much larger metadata is dropped.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::basic::{Compression, ConvertedType, Encoding, LogicalType, Type as PhysicalType};
use parquet::file::metadata::{
    ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy,
};
use parquet::schema::types::ColumnDescriptor;
use sha2::{Digest, Sha256};

use crate::error::{Error, Place};
use crate::io::Handle;
use crate::thrift::Compact;

const MAGIC: &[u8; 4] = b"PAR1";
const ENCRYPTED_MAGIC: &[u8; 4] = b"PARE";
/// The first read of a footer: most footers fit.
const TAIL_READ_BYTES: u64 = 64 * 1024;
/// No footer is believed to be longer. A footer of 1000 row groups of 1000 columns is about 100 MiB.
const MAX_FOOTER_BYTES: u64 = 256 << 20;

/// The compression of a column chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Uncompressed,
    Snappy,
    Gzip,
    Zstd,
}

/// One column of one row group: where it lies and how it is stored.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    /// The first page's offset and where pages end at the latest.
    pub(crate) bytes: Range<u64>,
    pub(crate) codec: Codec,
    pub(crate) rows: u32,
    /// Rows that are not null have this definition level; 0 for a required column.
    pub(crate) max_definition_level: u8,
    pub(crate) compressed_bytes: u64,
    pub(crate) uncompressed_bytes: u64,
    /// Bytes of all values without lengths, if the writer counted them.
    pub(crate) value_bytes: Option<u64>,
    pub(crate) has_dictionary: bool,
    /// How many lengths a value has in its delta encoding: 0 in others, 1 for its own, 2 for prefix and suffix.
    pub(crate) delta_lengths: u8,
    /// Where the offset index lies, if there is one.
    pub(crate) offset_index: Option<Range<u64>>,
}

/// One row group: its rows and the chunks of the columns asked for, in the order asked.
#[derive(Debug, Clone)]
pub(crate) struct RowGroup {
    pub(crate) rows: u64,
    pub(crate) chunks: Vec<Chunk>,
}

/// What opening a file leaves behind.
#[derive(Debug, Clone)]
pub(crate) struct Footer {
    pub(crate) row_groups: Vec<RowGroup>,
    /// SHA-256 of the footer's bytes.
    pub(crate) hash: [u8; 32],
}

/// The parsed footer, its hash and its first byte's offset.
pub(crate) struct RawFooter {
    pub(crate) metadata: ParquetMetaData,
    pub(crate) hash: [u8; 32],
    pub(crate) starts_at: u64,
}

/// Reads and parses the footer of a file of `file_bytes` bytes.
pub(crate) fn read_raw(path: &Path, handle: &Handle, file_bytes: u64, detailed: bool) -> Result<RawFooter, Error> {
    let not_parquet = |reason: String| Error::NotParquet { path: path.to_owned(), reason };
    let corrupt = |reason: String| Error::Footer { path: path.to_owned(), reason };
    let unread = |fault: crate::error::Fault| fault.at(Place { path: path.to_owned(), ..Place::default() });
    if file_bytes < 12 {
        return Err(not_parquet(format!("it is {file_bytes} bytes long, expected at least 12")));
    }
    let tail_bytes = file_bytes.min(TAIL_READ_BYTES);
    let mut tail = vec![0; tail_bytes as usize];
    handle.read_exact_at(&mut tail, file_bytes - tail_bytes).map_err(unread)?;
    let (body, ending) = tail.split_at(tail.len() - 8);
    if &ending[4..] == ENCRYPTED_MAGIC {
        let place = Box::new(Place { path: path.to_owned(), ..Place::default() });
        return Err(Error::Unsupported { place, what: "an encrypted footer".to_owned() });
    }
    if &ending[4..] != MAGIC {
        return Err(not_parquet(format!("it ends with {:?}, expected PAR1", String::from_utf8_lossy(&ending[4..]))));
    }
    let footer_bytes = u64::from(u32::from_le_bytes([ending[0], ending[1], ending[2], ending[3]]));
    if footer_bytes > file_bytes - 12 || footer_bytes > MAX_FOOTER_BYTES {
        let limit = (file_bytes - 12).min(MAX_FOOTER_BYTES);
        return Err(corrupt(format!("it declares {footer_bytes} bytes, expected at most {limit}")));
    }
    let starts_at = file_bytes - 8 - footer_bytes;
    let longer;
    let footer = match body.len().checked_sub(footer_bytes as usize) {
        Some(start) => &body[start..],
        None => {
            let mut buffer = vec![0; footer_bytes as usize];
            handle.read_exact_at(&mut buffer, starts_at).map_err(unread)?;
            longer = buffer;
            &longer
        }
    };
    let metadata = parse(footer, detailed).map_err(corrupt)?;
    Ok(RawFooter { metadata, hash: Sha256::digest(footer).into(), starts_at })
}

/// Parses a footer. It is walked once beforehand, so the parquet crate meets no size beyond the footer's end.
fn parse(footer: &[u8], detailed: bool) -> Result<ParquetMetaData, String> {
    Compact::new(footer).skip_struct().map_err(|fault| fault.reason())?;
    let policy = match detailed {
        true => ParquetStatisticsPolicy::KeepAll,
        false => ParquetStatisticsPolicy::SkipAll,
    };
    let options = ParquetMetaDataOptions::new()
        .with_encoding_stats_policy(policy.clone())
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll);
    catch_unwind(AssertUnwindSafe(|| ParquetMetaDataReader::decode_metadata_with_options(footer, Some(&options))))
        .unwrap_or_else(|_| Err(parquet::errors::ParquetError::General("its parser panicked".to_owned())))
        .map_err(|error| error.to_string())
}

impl Footer {
    /// Reads the footer of a file and finds the named columns in it.
    pub(crate) fn read(path: &Path, handle: &Handle, file_bytes: u64, columns: &[String]) -> Result<Self, Error> {
        let raw = read_raw(path, handle, file_bytes, false)?;
        let schema = raw.metadata.file_metadata().schema_descr();
        let mut indexes = Vec::with_capacity(columns.len());
        for column in columns {
            let Some(index) = schema.columns().iter().position(|found| found.path().string() == *column) else {
                return Err(missing_column(path, schema.columns(), column));
            };
            if !is_string_column(&schema.columns()[index]) {
                return Err(Error::WrongType {
                    path: path.to_owned(),
                    column: column.clone(),
                    found: type_name(&schema.columns()[index]),
                    string_columns: string_columns(schema.columns()),
                });
            }
            indexes.push(index);
        }
        let mut row_groups = Vec::with_capacity(raw.metadata.num_row_groups());
        let mut rows = 0u64;
        for (number, row_group) in raw.metadata.row_groups().iter().enumerate() {
            let declared = row_group.num_rows();
            let corrupt = |reason| Error::Footer { path: path.to_owned(), reason };
            let Ok(row_group_rows) = u32::try_from(declared) else {
                return Err(corrupt(format!(
                    "row group {number} declares {declared} rows, expected 0 to {}",
                    u32::MAX
                )));
            };
            let mut chunks = Vec::with_capacity(indexes.len());
            for &index in &indexes {
                let Some(column) = row_group.columns().get(index) else {
                    return Err(corrupt(format!("row group {number} lacks column {index}")));
                };
                let descriptor = &schema.columns()[index];
                let place = || Place {
                    path: path.to_owned(),
                    row_group: Some(number),
                    column: Some(descriptor.path().string()),
                    rows: None,
                };
                chunks.push(chunk(column, descriptor, row_group_rows, raw.starts_at, &place)?);
            }
            rows = rows.saturating_add(u64::from(row_group_rows));
            row_groups.push(RowGroup { rows: u64::from(row_group_rows), chunks });
        }
        let declared = raw.metadata.file_metadata().num_rows();
        if u64::try_from(declared) != Ok(rows) {
            let reason = format!("it declares {declared} rows, but its row groups have {rows}");
            return Err(Error::Footer { path: path.to_owned(), reason });
        }
        Ok(Self { row_groups, hash: raw.hash })
    }
}

fn chunk(
    column: &ColumnChunkMetaData,
    descriptor: &ColumnDescriptor,
    rows: u32,
    data_end: u64,
    place: &dyn Fn() -> Place,
) -> Result<Chunk, Error> {
    let corrupt = |reason: String| Error::Corrupt { place: Box::new(place()), reason };
    let unsupported = |what: String| Error::Unsupported { place: Box::new(place()), what };
    if column.file_path().is_some_and(|path| !path.is_empty()) {
        return Err(unsupported("a column stored in another file".to_owned()));
    }
    let codec = match column.compression() {
        Compression::UNCOMPRESSED => Codec::Uncompressed,
        Compression::SNAPPY => Codec::Snappy,
        Compression::GZIP(_) => Codec::Gzip,
        Compression::ZSTD(_) => Codec::Zstd,
        other => return Err(unsupported(format!("compression {}", codec_name(other)))),
    };
    if column.num_values() != i64::from(rows) {
        return Err(corrupt(format!("it declares {} values in {rows} rows", column.num_values())));
    }
    let unsigned = |value: i64, name: &str| {
        u64::try_from(value).map_err(|_| corrupt(format!("its {name} is {value}, expected 0 or more")))
    };
    let data = unsigned(column.data_page_offset(), "data page offset")?;
    let compressed_bytes = unsigned(column.compressed_size(), "compressed size")?;
    // Some writers declare a dictionary at 0 or behind the data when there is none.
    let dictionary = column.dictionary_page_offset().and_then(|offset| u64::try_from(offset).ok());
    let dictionary = dictionary.filter(|&offset| offset >= 4 && offset < data);
    let start = dictionary.unwrap_or(data);
    let fits = start.checked_add(compressed_bytes).is_some_and(|end| end <= data_end);
    if (rows > 0 && start < 4) || !fits {
        return Err(corrupt(format!(
            "its pages are declared at {start}, {compressed_bytes} bytes, expected within 4 and {data_end}"
        )));
    }
    let offset_index = match (column.offset_index_offset(), column.offset_index_length()) {
        (Some(offset), Some(length)) => u64::try_from(offset)
            .ok()
            .zip(u64::try_from(length).ok())
            .and_then(|(offset, length)| Some(offset..offset.checked_add(length)?))
            .filter(|range| range.end <= data_end && !range.is_empty()),
        _ => None,
    };
    Ok(Chunk {
        // Old writers leave the dictionary's header out of the compressed size, so pages are bounded by the
        // footer and the number of rows instead.
        bytes: start..data_end,
        codec,
        rows,
        max_definition_level: descriptor.max_def_level().clamp(0, 64) as u8,
        compressed_bytes,
        uncompressed_bytes: unsigned(column.uncompressed_size(), "uncompressed size")?,
        value_bytes: column.unencoded_byte_array_data_bytes().and_then(|bytes| u64::try_from(bytes).ok()),
        has_dictionary: dictionary.is_some(),
        delta_lengths: column
            .encodings()
            .map(|encoding| match encoding {
                Encoding::DELTA_BYTE_ARRAY => 2,
                Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
                _ => 0,
            })
            .max()
            .unwrap_or(0),
        offset_index,
    })
}

/// Whether a column holds one string or byte string per row.
pub(crate) fn is_string_column(column: &ColumnDescriptor) -> bool {
    column.physical_type() == PhysicalType::BYTE_ARRAY
        && column.max_rep_level() == 0
        && column.converted_type() != ConvertedType::DECIMAL
        && !matches!(column.logical_type_ref(), Some(LogicalType::Decimal { .. }))
}

/// The dotted paths of all string columns.
pub(crate) fn string_columns(columns: &[std::sync::Arc<ColumnDescriptor>]) -> Vec<String> {
    columns.iter().filter(|column| is_string_column(column)).map(|column| column.path().string()).collect()
}

fn missing_column(path: &Path, columns: &[std::sync::Arc<ColumnDescriptor>], column: &str) -> Error {
    let string_columns = string_columns(columns);
    // A list or a struct of that name has leaves below it.
    let prefix = format!("{column}.");
    if columns.iter().any(|found| found.path().string().starts_with(&prefix)) {
        let found = "a list, map or struct".to_owned();
        return Error::WrongType { path: path.to_owned(), column: column.to_owned(), found, string_columns };
    }
    Error::MissingColumn { path: path.to_owned(), column: column.to_owned(), string_columns }
}

/// A column's type in parquet's words: `INT64`, `BYTE_ARRAY (String)`, `BYTE_ARRAY, repeated`.
pub(crate) fn type_name(column: &ColumnDescriptor) -> String {
    let mut name = column.physical_type().to_string();
    match (column.logical_type_ref(), column.converted_type()) {
        (Some(logical), _) => name += &format!(" ({logical:?})"),
        (None, ConvertedType::NONE) => {}
        (None, converted) => name += &format!(" ({converted})"),
    }
    if column.max_rep_level() > 0 {
        name += ", repeated";
    }
    name
}

/// A codec's name without its level, which files do not record.
pub(crate) fn codec_name(codec: Compression) -> &'static str {
    match codec {
        Compression::UNCOMPRESSED => "UNCOMPRESSED",
        Compression::SNAPPY => "SNAPPY",
        Compression::GZIP(_) => "GZIP",
        Compression::LZO => "LZO",
        Compression::BROTLI(_) => "BROTLI",
        Compression::LZ4 => "LZ4",
        Compression::ZSTD(_) => "ZSTD",
        Compression::LZ4_RAW => "LZ4_RAW",
    }
}
