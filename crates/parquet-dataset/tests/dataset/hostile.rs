//! Files that differ from the request: each gives a typed error with the problem, the place, the expected and the found
//! value.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Decimal128Array, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use parquet_dataset::{Dataset, DatasetOptions, Error, Residency};

use crate::files::{FileKind, assert_rows, both, open, write, write_columns};

fn written(kind: &FileKind) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    write(&path, kind);
    (directory, path)
}

fn write_batch(path: &PathBuf, batch: &RecordBatch, properties: WriterProperties) {
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

/// The error of opening `path`, without the leading path.
fn open_error(path: &PathBuf, columns: &[&str]) -> (String, Option<String>) {
    let error = Dataset::open(std::slice::from_ref(path), &DatasetOptions::new(columns.iter().copied())).err().unwrap();
    let text = error.to_string();
    let prefix = format!("{}: ", path.display());
    (text.strip_prefix(&prefix).unwrap_or(&text).to_owned(), error.hint())
}

#[test]
fn a_column_of_the_wrong_type_is_answered_with_the_string_columns() {
    let (_directory, path) = written(&FileKind::default());
    let (error, hint) = open_error(&path, &["prompt", "id"]);
    assert_eq!(error, "column `id` is INT64, expected a string column");
    assert_eq!(hint.as_deref(), Some("the file's string columns: prompt, response"));
    let (error, _) = open_error(&path, &["tags"]);
    assert_eq!(error, "column `tags` is a list, map or struct, expected a string column");
    let (error, _) = open_error(&path, &["tags.list.item"]);
    assert!(error.contains("repeated, expected a string column"), "{error}");
}

#[test]
fn a_missing_column_is_answered_with_the_string_columns() {
    let (_directory, path) = written(&FileKind::default());
    let (error, hint) = open_error(&path, &["answer"]);
    assert_eq!(error, "no column `answer`, expected a string column of that name");
    assert_eq!(hint.as_deref(), Some("the file's string columns: prompt, response"));
}

#[test]
fn a_decimal_stored_as_bytes_is_not_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let amounts: ArrayRef = Arc::new(Decimal128Array::from(vec![1, 2]).with_precision_and_scale(30, 2).unwrap());
    let batch = RecordBatch::try_from_iter([("amount", amounts)]).unwrap();
    write_batch(&path, &batch, WriterProperties::builder().build());
    let (error, hint) = open_error(&path, &["amount"]);
    assert!(error.contains("expected a string column"), "{error}");
    assert_eq!(hint.as_deref(), Some("the file has no string column"));
}

#[test]
fn a_string_inside_a_struct_is_read_by_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("c")]));
    let field = Arc::new(Field::new("text", DataType::Utf8, true));
    let nulls = arrow_buffer::NullBuffer::from(vec![true, true, false]);
    let outer = StructArray::new(vec![field].into(), vec![texts], Some(nulls));
    let schema = Schema::new(vec![Field::new("outer", outer.data_type().clone(), true)]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(outer)]).unwrap();
    write_batch(&path, &batch, WriterProperties::builder().build());
    let dataset = Dataset::open(&[path], &DatasetOptions::new(["outer.text"])).unwrap();
    let rows = dataset.read_range(0..3).unwrap();
    assert_eq!([0, 1, 2].map(|row| rows.bytes(0, row)), [Some(&b"a"[..]), None, None]);
}

#[test]
fn a_file_without_rows_is_an_error_alone_and_nothing_among_others() {
    let directory = tempfile::tempdir().unwrap();
    let (empty, full) = (directory.path().join("empty.parquet"), directory.path().join("full.parquet"));
    let columns = write(&full, &FileKind { rows: 20, ..FileKind::default() });
    write(&empty, &FileKind { rows: 0, ..FileKind::default() });
    let (error, _) = open_error(&empty, &["prompt"]);
    assert_eq!(error, "no rows in this file, expected at least one row");
    let dataset = Dataset::open(&[empty.clone(), full, empty], &both()).unwrap();
    assert_eq!(dataset.rows(), 20);
    assert_rows(&dataset.read_rows(&[19, 0]).unwrap(), &columns, &[19, 0]);
}

#[test]
fn what_is_not_a_parquet_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let check = |bytes: &[u8], expected: &str| {
        std::fs::write(&path, bytes).unwrap();
        let (error, _) = open_error(&path, &["prompt"]);
        assert_eq!(error, format!("not a parquet file: {expected}"));
    };
    check(b"", "it is 0 bytes long, expected at least 12");
    check(b"prompt,response\nhello,world\n", "it ends with \"rld\\n\", expected PAR1");
    let (error, _) = open_error(&directory.path().to_owned(), &["prompt"]);
    assert_eq!(error, "not a parquet file: expected a regular file, got a directory");
    std::fs::write(&path, b"PAR1....\xff\xff\xff\x7fPAR1").unwrap();
    let (error, _) = open_error(&path, &["prompt"]);
    assert_eq!(error, "the footer is corrupt: it declares 2147483647 bytes, expected at most 4");
    let (error, _) = open_error(&directory.path().join("absent.parquet"), &["prompt"]);
    assert!(error.starts_with("cannot open: "), "{error}");
    assert!(matches!(Dataset::open(&[], &both()), Err(Error::NoFiles)));
}

#[test]
fn an_unsupported_compression_is_named_with_its_place() {
    let (_directory, path) = written(&FileKind::default());
    let mut bytes = std::fs::read(&path).unwrap();
    // In the footer a column's codec is field 4 of its metadata, an i32 after the list of path parts: find
    // `response` and the zigzag 1 (SNAPPY) behind it, and make it 4 (BROTLI).
    let name = bytes.windows(8).rposition(|window| window == b"response").unwrap();
    let in_metadata = bytes[..name].windows(8).rposition(|window| window == b"response").unwrap_or(name);
    let at = [in_metadata, name].into_iter().find(|&at| bytes[at + 8] == 0x15 && bytes[at + 9] == 0x02);
    let Some(at) = at else { return };
    bytes[at + 9] = 0x08;
    std::fs::write(&path, &bytes).unwrap();
    let (error, hint) = open_error(&path, &["prompt", "response"]);
    assert_eq!(error, "row group 0: column `response`: compression BROTLI is not supported");
    assert!(hint.unwrap().contains("snappy, zstd, gzip"));
}

#[test]
fn a_file_that_changes_while_it_is_open_is_an_error() {
    let change = |edit: &dyn Fn(&PathBuf)| {
        let (directory, dataset, _) = open(&FileKind::default(), &both());
        let path = directory.path().join("train.parquet");
        dataset.read_rows(&[1]).unwrap();
        edit(&path);
        dataset.read_rows(&[999]).err()
    };
    let appended = change(&|path| OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap());
    assert!(matches!(&appended, Some(Error::Changed { .. })), "{appended:?}");
    let cut = change(&|path| OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap());
    let cut = cut.unwrap().to_string();
    assert!(cut.contains("changed while it was open: it was ") && cut.ends_with("now 100"), "{cut}");
    let touched = change(&|path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
    });
    assert!(matches!(&touched, Some(Error::Changed { .. })), "{touched:?}");
    let removed = change(&|path| std::fs::remove_file(path).unwrap());
    assert!(removed.is_none(), "the file is still open and whole: {removed:?}");
}

#[test]
fn more_files_than_descriptors_are_opened_again_when_they_are_needed() {
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..80).map(|number| directory.path().join(format!("{number}.parquet"))).collect();
    let mut columns = [Vec::new(), Vec::new()];
    for (path, seed) in paths.iter().zip(0..) {
        let written = write(path, &FileKind { rows: 5, seed, ..FileKind::default() });
        columns.iter_mut().zip(written).for_each(|(all, more)| all.extend(more));
    }
    let dataset = Dataset::open(&paths, &both()).unwrap();
    let rows: Vec<u64> = (0..400).map(|row| row * 37 % 400).collect();
    assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
    // The first file's descriptor is closed by now; another file under its name is noticed.
    std::fs::rename(&paths[1], &paths[0]).unwrap();
    dataset.read_range(100..400).unwrap();
    let error = dataset.read_rows(&[0]).unwrap_err();
    assert!(error.to_string().ends_with("changed while it was open: another file now has its name"), "{error}");
}

#[test]
fn a_value_or_a_read_beyond_the_limit_is_refused_before_it_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let values = vec![Some(b"short".to_vec()), Some(vec![b'x'; 8 << 20])];
    write_columns(&path, Compression::SNAPPY, &[values.clone(), values]);
    for whole_page_bytes in [1 << 16, 32 << 20] {
        let mut options = both();
        options.whole_page_bytes = whole_page_bytes;
        options.max_value_bytes = 1 << 20;
        let dataset = Dataset::open(std::slice::from_ref(&path), &options).unwrap();
        assert_eq!(dataset.read_rows(&[0]).unwrap().bytes(1, 0), Some(&b"short"[..]));
        let error = dataset.read_rows(&[1]).unwrap_err().to_string();
        let expected = "row group 0: column `prompt`: rows 0 to 1: a value is 8388608 bytes, expected at most 1048576";
        assert!(error.ends_with(expected), "{error}");
        options.max_value_bytes = 64 << 20;
        options.max_read_bytes = 10 << 20;
        for residency in [Residency::UltraLowMem, Residency::InMemory] {
            options.residency = residency;
            let dataset = Dataset::open(std::slice::from_ref(&path), &options).unwrap();
            let error = dataset.read_rows(&[1]).unwrap_err().to_string();
            assert!(error.contains("one read is 16777216 bytes, expected at most 10485760"), "{error}");
        }
    }
}

#[test]
fn a_row_asked_for_many_times_counts_each_time_against_the_limit() {
    let mut options = both();
    options.max_read_bytes = 100_000;
    let (_directory, dataset, columns) = open(&FileKind::default(), &options);
    let rows = vec![7; 100];
    assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
    let error = dataset.read_rows(&vec![7; 1_000_000]).unwrap_err().to_string();
    assert!(error.contains("one read is"), "{error}");
}
