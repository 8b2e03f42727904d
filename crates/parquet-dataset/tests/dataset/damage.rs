//! Damaged files: whichever byte is wrong or missing, the result is rows or a typed error.

use std::path::Path;

use parquet::basic::{Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterVersion;
use parquet_dataset::{Dataset, Error, inspect};

use crate::files::{FileKind, Numbers, both, write};

/// Opens, maps, inspects and reads; returns the first error.
fn use_everything(path: &Path, whole_page_bytes: usize) -> Result<(), Error> {
    let mut options = both();
    options.whole_page_bytes = whole_page_bytes;
    options.max_value_bytes = 1 << 20;
    options.max_read_bytes = 8 << 20;
    inspect(path)?;
    let dataset = Dataset::open(&[path.to_owned()], &options)?;
    let rows = dataset.rows().min(2000);
    dataset.read_rows(&[rows - 1, 0, rows / 2])?;
    dataset.read_range(0..rows)?;
    dataset.page_map().map(|_| ())
}

fn assert_named(error: &Error, path: &Path, what: &str) {
    let text = error.to_string();
    assert!(text.starts_with(&path.display().to_string()), "{what}: {text}");
    assert!(!text.contains("decoder panic"), "{what}: {text}");
}

fn kinds() -> Vec<FileKind> {
    let small = FileKind { rows: 60, page_rows: 20, row_group_rows: 40, ..FileKind::default() };
    let v2 = WriterVersion::PARQUET_2_0;
    let zstd = Compression::ZSTD(ZstdLevel::default());
    let gzip = Compression::GZIP(GzipLevel::default());
    let delta = Encoding::DELTA_BYTE_ARRAY;
    let lengths = Encoding::DELTA_LENGTH_BYTE_ARRAY;
    vec![
        FileKind { compression: Compression::UNCOMPRESSED, ..small.clone() },
        FileKind { compression: Compression::UNCOMPRESSED, dictionary: true, version: v2, ..small.clone() },
        FileKind { compression: Compression::UNCOMPRESSED, encoding: delta, ..small.clone() },
        FileKind { compression: Compression::UNCOMPRESSED, encoding: lengths, version: v2, ..small.clone() },
        FileKind { offset_index: true, ..small.clone() },
        FileKind { compression: zstd, dictionary: true, ..small.clone() },
        FileKind { compression: gzip, version: v2, offset_index: true, ..small },
    ]
}

#[test]
fn a_file_with_any_byte_changed_gives_rows_or_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    for (number, kind) in kinds().into_iter().enumerate() {
        write(&path, &kind);
        let sound = std::fs::read(&path).unwrap();
        let mut numbers = Numbers(number as u64);
        let (mut errors, mut reads) = (0, 0);
        // Every byte of the footer, which holds most declarations, and a third of the other bytes.
        for at in (0..sound.len()).filter(|at| at + 3000 > sound.len() || at % 3 == number % 3) {
            let mut damaged = sound.clone();
            damaged[at] = match numbers.below(4) {
                0 => 0,
                1 => 0xff,
                2 => damaged[at] ^ 1 << numbers.below(8),
                _ => numbers.next() as u8,
            };
            std::fs::write(&path, &damaged).unwrap();
            let whole_page_bytes = if at % 3 == 0 { 0 } else { 1 << 20 };
            match use_everything(&path, whole_page_bytes) {
                Ok(()) => reads += 1,
                Err(error) => {
                    errors += 1;
                    assert_named(&error, &path, &format!("kind {number}, byte {at}"));
                }
            }
        }
        assert!(errors > 0 && reads > 0, "kind {number}: {errors} errors, {reads} reads");
    }
}

#[test]
fn a_file_that_ends_anywhere_gives_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    write(&path, &FileKind { rows: 60, page_rows: 20, ..FileKind::default() });
    let sound = std::fs::read(&path).unwrap();
    for length in 0..sound.len() {
        std::fs::write(&path, &sound[..length]).unwrap();
        let error = use_everything(&path, 1 << 20).unwrap_err();
        assert_named(&error, &path, &format!("length {length}"));
        assert!(matches!(error, Error::NotParquet { .. } | Error::Footer { .. }), "length {length}: {error}");
    }
}

#[test]
fn a_file_with_a_hole_in_it_gives_rows_or_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    for (number, kind) in kinds().into_iter().enumerate() {
        write(&path, &kind);
        let sound = std::fs::read(&path).unwrap();
        let mut numbers = Numbers(number as u64 + 100);
        for _ in 0..300 {
            let start = numbers.below(sound.len() as u64) as usize;
            let end = (start + numbers.below(200) as usize).min(sound.len());
            let mut damaged = sound.clone();
            match numbers.below(3) {
                0 => damaged[start..end].fill(0),
                1 => drop(damaged.drain(start..end)),
                _ => damaged[start..end].iter_mut().for_each(|byte| *byte = numbers.next() as u8),
            }
            std::fs::write(&path, &damaged).unwrap();
            if let Err(error) = use_everything(&path, if end.is_multiple_of(2) { 0 } else { 1 << 20 }) {
                assert_named(&error, &path, &format!("kind {number}, bytes {start} to {end}"));
            }
        }
    }
}
