//! [`ParquetWriter`]: writes rows of text as a parquet file, in little memory.
//!
//! Values are plain, never null, and compressed with snappy. Each column chunk has an offset index, so a reader finds any
//! row without reading page headers. Pages are of version 2, which the parquet crate compresses without a further copy.
//!
//! Invariant: memory holds the texts of a row group (at most [`Sizes::row_group_bytes`] and the last row), one page with
//! its compressed bytes, and the metadata of the groups and pages so far.

use std::io::{self, Write};
use std::sync::Arc;

use parquet::basic::{Compression, Encoding, LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

/// Bytes that the parquet crate takes for a value beside its text.
const VALUE_BYTES: usize = 64;

/// Sizes of a file's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of values after which a page ends.
    pub page_bytes: usize,
    /// Bytes of values after which a row group ends.
    pub row_group_bytes: usize,
}

impl Sizes {
    /// Returns sizes for a file of about `bytes` of text. Up to 4 GiB, the file gets at most 16,384 pages a column and
    /// 1,024 row groups; a larger file gets more of both.
    pub fn for_bytes(bytes: u64) -> Self {
        let within = |share: u64, least: u64, most: u64| (bytes / share).clamp(least, most) as usize;
        Self { page_bytes: within(16 << 10, 64 << 10, 1 << 20), row_group_bytes: within(1 << 10, 2 << 20, 4 << 20) }
    }
}

/// Writes rows of text, column by column.
pub struct ParquetWriter<W: Write + Send> {
    file: SerializedFileWriter<Counted<W>>,
    sizes: Sizes,
    /// For each column, the values of the current row group.
    columns: Vec<Vec<ByteArray>>,
    group_bytes: usize,
    rows: u64,
}

/// Counts the bytes that are written.
struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The error of the file below, if it is one.
pub(crate) fn io_error(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(inner) => inner.downcast::<io::Error>().map_or_else(io::Error::other, |error| *error),
        error => io::Error::other(error),
    }
}

impl<W: Write + Send> ParquetWriter<W> {
    /// Begins a file with these columns.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn new(out: W, columns: &[&str], sizes: Sizes) -> io::Result<Self> {
        let column = |name: &&str| {
            let column = Type::primitive_type_builder(name, PhysicalType::BYTE_ARRAY)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(Some(LogicalType::String));
            column.build().map(Arc::new)
        };
        let fields = columns.iter().map(column).collect::<Result<Vec<_>, _>>().map_err(io_error)?;
        let schema = Type::group_type_builder("schema").with_fields(fields).build().map_err(io_error)?;
        let properties = WriterProperties::builder()
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_created_by(concat!("train_low_mem ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_compression(Compression::SNAPPY)
            .set_encoding(Encoding::PLAIN)
            .set_dictionary_enabled(false)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_data_page_size_limit(sizes.page_bytes);
        let out = Counted { out, bytes: 0 };
        let file = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties.build())).map_err(io_error)?;
        Ok(Self { file, sizes, columns: vec![Vec::new(); columns.len()], group_bytes: 0, rows: 0 })
    }

    /// Rows that were written.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes a row: a text for each column.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&mut self, texts: impl IntoIterator<Item = String>) -> io::Result<()> {
        let mut count = 0;
        for (column, text) in self.columns.iter_mut().zip(texts) {
            self.group_bytes += text.len() + VALUE_BYTES;
            column.push(ByteArray::from(text.into_bytes()));
            count += 1;
        }
        assert_eq!(count, self.columns.len(), "a text for each column");
        self.rows += 1;
        if self.group_bytes >= self.sizes.row_group_bytes { self.finish_group().map_err(io_error) } else { Ok(()) }
    }

    fn finish_group(&mut self) -> Result<(), ParquetError> {
        self.group_bytes = 0;
        let mut group = self.file.next_row_group()?;
        for values in &mut self.columns {
            let mut column = group.next_column()?.expect("the schema has a column for each of ours");
            let writer = column.typed::<ByteArrayType>();
            let mut start = 0;
            while start < values.len() {
                let (mut end, mut bytes) = (start, 0);
                while end < values.len() && bytes < self.sizes.page_bytes {
                    bytes += values[end].len() + 4;
                    end += 1;
                }
                writer.write_batch(&values[start..end], None, None)?;
                // The page has its own copy.
                values[start..end].iter_mut().for_each(|value| *value = ByteArray::new());
                start = end;
            }
            column.close()?;
            values.clear();
        }
        group.close().map(|_| ())
    }

    /// Writes the remaining rows and the footer. Returns `out` and the number of bytes written.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn finish(mut self) -> io::Result<(W, u64)> {
        if self.columns.first().is_some_and(|values| !values.is_empty()) {
            self.finish_group().map_err(io_error)?;
        }
        let mut written = self.file.into_inner().map_err(io_error)?;
        written.flush()?;
        Ok((written.out, written.bytes))
    }
}
