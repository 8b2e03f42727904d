//! [`ArrowRows`]: rows of parquet whose columns are not each a string a row: numbers, lists, structs, codecs that the
//! project's own reader lacks. The parquet crate decodes them once, batch by batch.
//!
//! Invariants:
//! * Before anything is decoded, the page headers are read. A page that would take more than the limit is refused.
//! * Texts are views into their pages and dictionaries, so a batch holds no more than its pages, and a text that many
//!   rows share once. They are decoded as bytes, so a text that is not UTF-8 is a fault of its row alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Field, Fields, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::file::metadata::{FileMetaData, ParquetMetaData};
use parquet::schema::types::{SchemaDescriptor, Type};

use crate::arrow_cells::{cell, class_cell};
use crate::column::Column;
use crate::error::{Error, RowFault};
use crate::kind::Kind;
use crate::row::{Cell, Row};

/// The most rows of a batch.
const BATCH_ROWS: u64 = 1024;
/// Bytes of values of a batch, as its page headers declare them.
const BATCH_BYTES: u64 = 4 << 20;
/// The parquet crate turns a footer into about this many times its size.
const FOOTER_COPIES: u64 = 15;

/// Rows of a parquet file of any types, in file order.
pub(crate) struct ArrowRows {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    batch: Option<RecordBatch>,
    /// The next row of the batch.
    at: usize,
    columns: Vec<Wanted>,
    next: u64,
    rows: u64,
    most_row_bytes: usize,
}

/// A wanted column.
struct Wanted {
    column: Column,
    /// Its path in a batch; `None` if the file does not have it.
    place: Option<Vec<usize>>,
    /// The names of its classes, if it has numbers of classes.
    classes: Option<Arc<[String]>>,
}

impl ArrowRows {
    pub fn open(path: &Path, kind: &Kind, wanted: &[Column]) -> Result<Self, Error> {
        let names: Vec<String> = wanted.iter().map(|column| column.name.clone()).collect();
        let declared = parquet_dataset::declared(path, &names)?;
        let limit = kind.options.max_page_bytes;
        let too_large = |what: String, bytes| Error::PartTooLarge { path: path.to_owned(), what, bytes, limit };
        if declared.footer_bytes * FOOTER_COPIES > limit {
            return Err(too_large("its footer".to_owned(), declared.footer_bytes * FOOTER_COPIES));
        }
        if declared.page_bytes > limit {
            return Err(too_large(format!("a page of column `{}`", declared.column), declared.page_bytes));
        }
        let batch_rows = match declared.is_prefixed {
            true => 1,
            false => (BATCH_BYTES / declared.row_bytes.max(1)).clamp(1, BATCH_ROWS),
        };
        let failed = |error: parquet::errors::ParquetError| decode_error(path, &error.to_string());
        let file = regular_file::open(path).map_err(|source| Error::io(path, "open", source))?;
        let options = || ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = ArrowReaderMetadata::load(&file, options()).map_err(failed)?;
        let bytes = Arc::new(texts_as_bytes(metadata.metadata()).map_err(failed)?);
        let metadata = ArrowReaderMetadata::try_new(bytes, options()).map_err(failed)?;
        let views = Schema::new(metadata.schema().fields().iter().map(|field| with_views(field)).collect::<Fields>());
        let metadata =
            ArrowReaderMetadata::try_new(Arc::clone(metadata.metadata()), options().with_schema(Arc::new(views)));
        let metadata = metadata.map_err(failed)?;
        let rows = metadata.metadata().file_metadata().num_rows().max(0) as u64;
        let mask = ProjectionMask::columns(metadata.parquet_schema(), names.iter().map(String::as_str));
        let batches = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
            .with_projection(mask)
            .with_batch_size(batch_rows as usize)
            .build()
            .map_err(failed)?;
        use arrow_array::RecordBatchReader;
        let schema = batches.schema();
        let columns = wanted.iter().map(|column| Wanted {
            column: column.clone(),
            place: place(schema.fields(), &column.name),
            classes: kind.classes.names(&column.name).cloned(),
        });
        let columns = columns.collect();
        let most_row_bytes = kind.options.max_row_bytes;
        Ok(Self { path: path.to_owned(), batches, batch: None, at: 0, columns, next: 0, rows, most_row_bytes })
    }

    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The next row's number.
    pub fn next_row(&self) -> u64 {
        self.next
    }

    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        row.line = self.next;
        row.cells.clear();
        while self.batch.as_ref().is_none_or(|batch| batch.num_rows() == self.at) {
            (self.batch, self.at) = (None, 0);
            // Decompressors are third-party code, and the bytes may be anything.
            let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.batches.next()));
            match read.map_err(|_| decode_error(&self.path, "its bytes made a decoder panic"))? {
                None => return Ok(None),
                Some(batch) => self.batch = Some(batch.map_err(|error| decode_error(&self.path, &error.to_string()))?),
            }
        }
        let Some(batch) = &self.batch else { return Ok(None) };
        let index = self.at;
        (self.at, self.next) = (self.at + 1, self.next + 1);
        let mut bytes = 0;
        for Wanted { column, place, classes } in &self.columns {
            let found = match place {
                Some(place) => cell_at(batch, place, index, (column, classes.as_deref())),
                None => Ok(Cell::Null),
            };
            match found {
                Ok(found) => {
                    bytes += found.bytes();
                    row.cells.push(found);
                }
                Err(fault) => return Ok(Some(Err(fault))),
            }
            if bytes > self.most_row_bytes {
                return Ok(Some(Err(RowFault::TooLong(self.most_row_bytes))));
            }
        }
        Ok(Some(Ok(())))
    }
}

fn decode_error(path: &Path, reason: &str) -> Error {
    Error::Decode { path: path.to_owned(), reason: format!("the parquet data cannot be decoded: {reason}") }
}

/// The metadata with byte strings in place of texts. The parquet crate refuses a batch with a text that is not UTF-8.
fn texts_as_bytes(metadata: &ParquetMetaData) -> parquet::errors::Result<ParquetMetaData> {
    fn bytes(of: &Type) -> parquet::errors::Result<Arc<Type>> {
        let basic = of.get_basic_info();
        if of.is_group() {
            let fields = of.get_fields().iter().map(|field| bytes(field)).collect::<Result<_, _>>()?;
            let group = Type::group_type_builder(of.name()).with_fields(fields);
            let group = group.with_logical_type(basic.logical_type_ref().cloned());
            let group = group.with_converted_type(basic.converted_type());
            let group = if basic.has_repetition() { group.with_repetition(basic.repetition()) } else { group };
            return group.build().map(Arc::new);
        }
        let is_text = matches!(basic.converted_type(), ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON);
        if of.get_physical_type() != PhysicalType::BYTE_ARRAY || !is_text {
            return Ok(Arc::new(of.clone()));
        }
        let text = Type::primitive_type_builder(of.name(), PhysicalType::BYTE_ARRAY);
        text.with_repetition(basic.repetition()).build().map(Arc::new)
    }
    let file = metadata.file_metadata();
    let schema = Arc::new(SchemaDescriptor::new(bytes(file.schema())?));
    let file = FileMetaData::new(file.version(), file.num_rows(), None, None, schema, None);
    Ok(ParquetMetaData::new(file, metadata.row_groups().to_vec()))
}

/// The field with texts as views.
fn with_views(field: &Field) -> Arc<Field> {
    let nested = |field: &Arc<Field>| with_views(field);
    let of = match field.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 => DataType::Utf8View,
        DataType::Binary | DataType::LargeBinary => DataType::BinaryView,
        DataType::List(element) => DataType::List(nested(element)),
        DataType::LargeList(element) => DataType::LargeList(nested(element)),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(nested).collect()),
        other => other.clone(),
    };
    Arc::new(field.clone().with_data_type(of))
}

/// The path to the column with this dotted name.
fn place(fields: &Fields, name: &str) -> Option<Vec<usize>> {
    fields.iter().enumerate().find_map(|(index, field)| {
        let rest = name.strip_prefix(field.name().as_str())?;
        if rest.is_empty() {
            return Some(vec![index]);
        }
        let DataType::Struct(fields) = field.data_type() else { return None };
        let below = place(fields, rest.strip_prefix('.')?)?;
        Some(std::iter::once(index).chain(below).collect())
    })
}

/// The value of a row in a column with these names of classes.
fn cell_at(
    batch: &RecordBatch,
    place: &[usize],
    row: usize,
    (column, classes): (&Column, Option<&[String]>),
) -> Result<Cell, RowFault> {
    let mut array: &dyn Array = batch.column(place[0]);
    for &index in &place[1..] {
        if array.is_null(row) {
            return Ok(Cell::Null);
        }
        array = array.as_struct().column(index);
    }
    match classes.and_then(|classes| class_cell(array, row, classes)) {
        Some(cell) => Ok(cell),
        None => cell(array, row, column),
    }
}
