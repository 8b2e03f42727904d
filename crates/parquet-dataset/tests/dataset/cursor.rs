//! Rows in order equal the rows in any order, and cost as much as the file is long.

use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet_dataset::{IoLog, RowCursor, Rows};
use proptest::prelude::*;

use crate::files::{FileKind, Values, any_kind, both, compressions, open};

fn read(path: &Path) -> [Values; 2] {
    let mut cursor = RowCursor::open(path, &both().columns, None).unwrap();
    let (mut row, mut values) = (Rows::default(), [Vec::new(), Vec::new()]);
    while cursor.next(u64::MAX, &mut row).unwrap() {
        (0..2).for_each(|column| values[column].push(row.bytes(column, 0).map(<[u8]>::to_vec)));
    }
    assert_eq!((cursor.rows(), cursor.next_row()), (values[0].len() as u64, values[0].len() as u64));
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn the_rows_of_any_file_in_order_are_those_that_were_written(kind in any_kind(300)) {
        let (directory, _, values) = open(&kind, &both());
        prop_assert_eq!(read(&directory.path().join("train.parquet")), values);
    }
}

/// A file with `rows` prompts of `bytes` each, of which every `distinct` rows are the same.
fn write(path: &Path, rows: usize, bytes: usize, distinct: usize, properties: WriterProperties) -> Vec<String> {
    let text = |row: usize| {
        let mut state = (row % distinct) as u64 + 1;
        let mut text = String::with_capacity(bytes);
        while text.len() < bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text.push_str(&format!("{state:016x}"));
        }
        text.truncate(bytes);
        text
    };
    let texts: Vec<String> = (0..rows).map(text).collect();
    let prompts: ArrayRef = Arc::new(texts.iter().map(Some).collect::<StringArray>());
    let responses: ArrayRef = Arc::new((0..rows).map(|_| Some("r")).collect::<StringArray>());
    let batch = RecordBatch::try_from_iter([("prompt", prompts), ("response", responses)]).unwrap();
    let mut writer =
        ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    texts
}

/// Reads a file in order. Returns the bytes that were read, as a multiple of the file's length.
fn cost(path: &Path, expected: &[String]) -> f64 {
    let log = Arc::new(IoLog::default());
    let mut cursor = RowCursor::open(path, &both().columns, Some(Arc::clone(&log))).unwrap();
    let mut row = Rows::default();
    for text in expected {
        assert!(cursor.next(u64::MAX, &mut row).unwrap());
        assert!(row.bytes(0, 0) == Some(text.as_bytes()), "another text");
    }
    assert!(!cursor.next(u64::MAX, &mut row).unwrap());
    let read: u64 = log.take().iter().map(|read| read.bytes.end - read.bytes.start).sum();
    read as f64 / std::fs::metadata(path).unwrap().len() as f64
}

#[test]
fn rows_of_any_size_in_pages_of_any_length_are_read_at_most_twice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rows.parquet");
    let most = 8 << 20;
    for bytes in [64 << 10, 512 << 10, 3 << 20, 16 << 20] {
        for page_rows in if bytes > most { vec![1, 1024] } else { vec![1, 7, 1024] } {
            for (dictionary, compression) in [
                (false, Compression::UNCOMPRESSED),
                (true, Compression::UNCOMPRESSED),
                (false, Compression::SNAPPY),
                (true, Compression::ZSTD(ZstdLevel::default())),
            ] {
                let properties = WriterProperties::builder()
                    .set_data_page_row_count_limit(page_rows)
                    .set_write_batch_size(page_rows)
                    .set_data_page_size_limit(usize::MAX)
                    .set_dictionary_enabled(dictionary)
                    .set_dictionary_page_size_limit(usize::MAX)
                    .set_compression(compression);
                let rows = (most / bytes).max(2);
                let expected = write(&path, rows, bytes, rows, properties.build());
                let cost = cost(&path, &expected);
                assert!(cost < 2.0, "{bytes} bytes, {page_rows} rows a page, {dictionary} {compression}: {cost}");
            }
        }
    }
}

#[test]
fn a_page_of_a_thousand_rows_or_of_long_ones_is_read_at_most_twice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rows.parquet");
    // A page of a thousand rows of 16 MiB would be longer than the format allows.
    for (rows, bytes, compression) in [
        (1030, 64 << 10, Compression::UNCOMPRESSED),
        (1030, 64 << 10, Compression::SNAPPY),
        (80, 1 << 20, Compression::UNCOMPRESSED),
        (6, 16 << 20, Compression::UNCOMPRESSED),
        (6, 16 << 20, Compression::SNAPPY),
    ] {
        let properties = WriterProperties::builder()
            .set_data_page_row_count_limit(1024)
            .set_write_batch_size(1024)
            .set_data_page_size_limit(usize::MAX)
            .set_dictionary_enabled(false)
            .set_compression(compression);
        let expected = write(&path, rows, bytes, rows, properties.build());
        let cost = cost(&path, &expected);
        assert!(cost < 2.0, "{rows} rows of {bytes} bytes, {compression}: {cost}");
    }
}

#[test]
fn a_row_that_repeats_a_value_of_a_large_dictionary_gets_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rows.parquet");
    for (bytes, distinct) in [(100 << 10, 50), (3 << 20, 2)] {
        for compression in compressions() {
            let properties = WriterProperties::builder()
                .set_dictionary_page_size_limit(usize::MAX)
                .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
                .set_compression(compression);
            let expected = write(&path, 2 * distinct + 1, bytes, distinct, properties.build());
            cost(&path, &expected);
        }
    }
}

#[test]
fn of_a_long_value_no_more_is_read_than_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rows.parquet");
    for (dictionary, encoding) in
        [(false, Encoding::PLAIN), (false, Encoding::DELTA_BYTE_ARRAY), (true, Encoding::PLAIN)]
    {
        let properties = WriterProperties::builder()
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_dictionary_enabled(dictionary)
            .set_dictionary_page_size_limit(usize::MAX)
            .set_encoding(Encoding::PLAIN)
            .set_column_encoding("prompt".into(), encoding);
        let expected = write(&path, 5, 2 << 20, 5, properties.build());
        let mut cursor = RowCursor::open(&path, &both().columns, None).unwrap();
        let mut row = Rows::default();
        for text in expected {
            assert!(cursor.next(1000, &mut row).unwrap());
            assert_eq!(row.value_bytes(0, 0), Some(2 << 20));
            assert_eq!(row.take_bytes(0), Some(text.as_bytes()[..1000].to_vec()));
        }
    }
}

#[test]
fn a_page_with_any_byte_changed_is_rows_or_a_typed_error() {
    let (directory, _, _) = open(
        &FileKind { rows: 60, page_rows: 20, row_group_rows: 40, dictionary: true, ..FileKind::default() },
        &both(),
    );
    let path = directory.path().join("train.parquet");
    let sound = std::fs::read(&path).unwrap();
    let (mut errors, mut reads) = (0, 0);
    for at in 4..sound.len() - 4 {
        let mut damaged = sound.clone();
        damaged[at] ^= 1 << (at % 8);
        std::fs::write(&path, &damaged).unwrap();
        let read = RowCursor::open(&path, &both().columns, None).and_then(|mut cursor| {
            let mut row = Rows::default();
            while cursor.next(1 << 20, &mut row)? {}
            Ok(())
        });
        match read {
            Ok(()) => reads += 1,
            Err(error) => {
                errors += 1;
                assert!(error.to_string().starts_with(&path.display().to_string()), "{at}: {error}");
            }
        }
    }
    assert!(errors > 0 && reads > 0, "{errors} errors, {reads} reads");
}
