//! Files for tests: a description of a file, the file, and its rows as read by the parquet crate.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BinaryViewArray, Int64Array, LargeBinaryArray, LargeStringArray, RecordBatch,
    StringArray, StringViewArray,
};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet_dataset::{Dataset, DatasetOptions, Rows};
use proptest::prelude::*;

/// One column's values; `None` is null.
pub type Values = Vec<Option<Vec<u8>>>;

/// The properties of a test file.
#[derive(Debug, Clone)]
pub struct FileKind {
    pub rows: usize,
    pub row_group_rows: usize,
    pub page_rows: usize,
    pub dictionary: bool,
    pub dictionary_bytes: usize,
    pub encoding: Encoding,
    pub compression: Compression,
    pub version: WriterVersion,
    pub text: Text,
    pub nullable: bool,
    pub offset_index: bool,
    pub seed: u64,
}

/// The Arrow type of the text columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Text {
    Utf8,
    LargeUtf8,
    Utf8View,
    Binary,
    LargeBinary,
    BinaryView,
}

impl Default for FileKind {
    fn default() -> Self {
        Self {
            rows: 1000,
            row_group_rows: 1_000_000,
            page_rows: 100,
            dictionary: false,
            dictionary_bytes: 1 << 20,
            encoding: Encoding::PLAIN,
            compression: Compression::SNAPPY,
            version: WriterVersion::PARQUET_1_0,
            text: Text::Utf8,
            nullable: true,
            offset_index: false,
            seed: 1,
        }
    }
}

/// Every supported codec.
pub fn compressions() -> [Compression; 4] {
    [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ]
}

/// Any kind of file of at most `max_rows` rows.
pub fn any_kind(max_rows: usize) -> impl Strategy<Value = FileKind> {
    let sizes = (1..=max_rows, 1..=max_rows, 1usize..80, any::<bool>(), prop_oneof![Just(200usize), Just(1 << 20)]);
    let encodings = prop_oneof![
        3 => Just(Encoding::PLAIN),
        1 => Just(Encoding::DELTA_LENGTH_BYTE_ARRAY),
        1 => Just(Encoding::DELTA_BYTE_ARRAY)
    ];
    let texts = prop_oneof![
        Just(Text::Utf8),
        Just(Text::LargeUtf8),
        Just(Text::Utf8View),
        Just(Text::Binary),
        Just(Text::LargeBinary),
        Just(Text::BinaryView)
    ];
    let stored = (
        encodings,
        proptest::sample::select(compressions().to_vec()),
        prop_oneof![Just(WriterVersion::PARQUET_1_0), Just(WriterVersion::PARQUET_2_0)],
        texts,
    );
    (sizes, stored, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(
            (rows, row_group_rows, page_rows, dictionary, dictionary_bytes),
            (encoding, compression, version, text),
            nullable,
            offset_index,
            seed,
        )| FileKind {
            rows,
            row_group_rows,
            page_rows,
            dictionary,
            dictionary_bytes,
            encoding,
            compression,
            version,
            text,
            nullable,
            offset_index,
            seed,
        },
    )
}

/// A small generator of numbers (splitmix64): tests must not depend on a random crate's version.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn values(kind: &FileKind, column: u64) -> Values {
    let mut numbers = Numbers(kind.seed ^ column << 32);
    let words = ["", "a", "one", "七", "longer words repeat themselves, ", "straße", "\u{1f980}"];
    let binary = matches!(kind.text, Text::Binary | Text::LargeBinary | Text::BinaryView);
    (0..kind.rows)
        .map(|row| {
            if kind.nullable && numbers.below(5) == 0 {
                return None;
            }
            let mut value = Vec::new();
            for _ in 0..numbers.below(6) {
                value.extend(words[numbers.below(words.len() as u64) as usize].as_bytes());
            }
            if numbers.below(3) == 0 {
                value.extend(format!("row {row}").bytes());
            }
            if binary && numbers.below(10) == 0 {
                value.push(0xff);
            }
            Some(value)
        })
        .collect()
}

fn array(text: Text, values: &Values) -> ArrayRef {
    let bytes = || values.iter().map(|value| value.as_deref());
    let texts = || bytes().map(|value| value.map(|value| std::str::from_utf8(value).unwrap()));
    match text {
        Text::Utf8 => Arc::new(texts().collect::<StringArray>()),
        Text::LargeUtf8 => Arc::new(texts().collect::<LargeStringArray>()),
        Text::Utf8View => Arc::new(texts().collect::<StringViewArray>()),
        Text::Binary => Arc::new(bytes().collect::<BinaryArray>()),
        Text::LargeBinary => Arc::new(bytes().collect::<LargeBinaryArray>()),
        Text::BinaryView => Arc::new(bytes().collect::<BinaryViewArray>()),
    }
}

fn properties(kind: &FileKind) -> WriterProperties {
    WriterProperties::builder()
        .set_writer_version(kind.version)
        .set_max_row_group_row_count(Some(kind.row_group_rows))
        .set_data_page_row_count_limit(kind.page_rows)
        .set_write_batch_size(kind.page_rows)
        .set_dictionary_enabled(kind.dictionary)
        .set_dictionary_page_size_limit(kind.dictionary_bytes)
        .set_column_encoding("prompt".into(), kind.encoding)
        .set_column_encoding("response".into(), kind.encoding)
        .set_compression(kind.compression)
        .set_offset_index_disabled(!kind.offset_index)
        .set_statistics_enabled(match kind.offset_index {
            true => parquet::file::properties::EnabledStatistics::Page,
            false => parquet::file::properties::EnabledStatistics::Chunk,
        })
        .build()
}

/// Writes a file with the columns `id`, `prompt`, `tags` (a list) and `response`; returns the two text columns.
pub fn write(path: &Path, kind: &FileKind) -> [Values; 2] {
    let columns = [values(kind, 0), values(kind, 1)];
    let [prompt, response] = columns.each_ref().map(|values| array(kind.text, values));
    let ids: ArrayRef = Arc::new((0..kind.rows as i64).collect::<Int64Array>());
    let mut tags = ListBuilder::new(StringBuilder::new());
    for row in 0..kind.rows {
        tags.append_value((0..row % 3).map(|tag| Some(format!("tag {tag}"))));
    }
    let tags: ArrayRef = Arc::new(tags.finish());
    let schema = Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("prompt", prompt.data_type().clone(), kind.nullable),
        Field::new("tags", tags.data_type().clone(), true),
        Field::new("response", response.data_type().clone(), kind.nullable),
    ]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![ids, prompt, tags, response]).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties(kind))).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    columns
}

/// Writes a file into a directory of its own and opens it with columns `prompt` and `response`.
pub fn open(kind: &FileKind, options: &DatasetOptions) -> (tempfile::TempDir, Dataset, [Values; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let columns = write(&path, kind);
    let dataset = Dataset::open(&[path], options).unwrap();
    (directory, dataset, columns)
}

/// Options that read `prompt` and `response`.
pub fn both() -> DatasetOptions {
    DatasetOptions::new(["prompt", "response"])
}

/// The text columns as read by the parquet crate's own Arrow reader.
pub fn read_with_arrow(path: &PathBuf) -> [Values; 2] {
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
    let mut columns = [Vec::new(), Vec::new()];
    for batch in reader {
        let batch = batch.unwrap();
        for (column, name) in columns.iter_mut().zip(["prompt", "response"]) {
            column.extend(array_values(batch.column_by_name(name).unwrap().as_ref()));
        }
    }
    columns
}

fn array_values(array: &dyn Array) -> Values {
    fn owned<'a, T: AsRef<[u8]> + ?Sized + 'a>(values: impl Iterator<Item = Option<&'a T>>) -> Values {
        values.map(|value| value.map(|value| value.as_ref().to_vec())).collect()
    }
    let any = array.as_any();
    if let Some(array) = any.downcast_ref::<StringArray>() {
        owned(array.iter())
    } else if let Some(array) = any.downcast_ref::<LargeStringArray>() {
        owned(array.iter())
    } else if let Some(array) = any.downcast_ref::<StringViewArray>() {
        owned(array.iter())
    } else if let Some(array) = any.downcast_ref::<BinaryArray>() {
        owned(array.iter())
    } else if let Some(array) = any.downcast_ref::<LargeBinaryArray>() {
        owned(array.iter())
    } else {
        owned(any.downcast_ref::<BinaryViewArray>().unwrap().iter())
    }
}

/// Fails unless `read` is rows `rows` of `columns`.
pub fn assert_rows(read: &Rows, columns: &[Values; 2], rows: &[u64]) {
    assert_eq!(read.len(), rows.len());
    for (at, &row) in rows.iter().enumerate() {
        for (column, values) in columns.iter().enumerate() {
            let expected = values[row as usize].as_deref();
            assert_eq!(read.bytes(column, at), expected, "column {column} of row {row}");
        }
    }
}

/// Writes two nullable binary columns as `kind` describes.
pub fn write_values(path: &Path, kind: &FileKind, columns: &[Values; 2]) {
    let arrays = columns.each_ref().map(|values| array(Text::Binary, values));
    let fields = ["prompt", "response"].map(|name| Field::new(name, DataType::Binary, true));
    let batch = RecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), arrays.to_vec()).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties(kind))).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Writes two nullable binary columns as one row group with one plain data page each.
pub fn write_columns(path: &Path, compression: Compression, columns: &[Values; 2]) {
    let [prompt, response] = columns.each_ref().map(|values| array(Text::Binary, values));
    let schema =
        Schema::new(vec![Field::new("prompt", DataType::Binary, true), Field::new("response", DataType::Binary, true)]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![prompt, response]).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_dictionary_enabled(false)
        .set_data_page_size_limit(1 << 30)
        .set_data_page_row_count_limit(1 << 30)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .build();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}
