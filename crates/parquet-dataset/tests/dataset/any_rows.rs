//! Compares reads of any rows, in any kind of file that writers make, with the parquet crate's own reader.

use parquet::basic::{Compression, Encoding};
use parquet::file::properties::WriterVersion;
use parquet_dataset::{Dataset, Residency, Value};
use proptest::prelude::*;

use crate::files::{FileKind, Numbers, Text, any_kind, assert_rows, both, compressions, open, read_with_arrow, write};

/// The residencies, with two caches: one so small that blocks evict each other, and one that holds all blocks.
fn any_residency() -> impl Strategy<Value = Residency> {
    prop_oneof![
        Just(Residency::UltraLowMem),
        Just(Residency::InMemory),
        prop_oneof![Just(100u64), Just(5_000), Just(1 << 20)].prop_map(|bytes| Residency::RowGroupCache { bytes })
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn any_rows_of_any_file_are_what_the_plain_reader_reads(
        kind in any_kind(400),
        picks in proptest::collection::vec(any::<u64>(), 0..60),
        residency in any_residency(),
        block_rows in 1u32..200,
        whole_page_bytes in prop_oneof![Just(0usize), Just(300), Just(4 << 20)],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("train.parquet");
        write(&path, &kind);
        let columns = read_with_arrow(&path);
        let mut options = both();
        options.residency = residency;
        options.block_rows = block_rows;
        options.whole_page_bytes = whole_page_bytes;
        let dataset = Dataset::open(&[path], &options).unwrap();
        prop_assert_eq!(dataset.rows(), kind.rows as u64);
        let rows: Vec<u64> = picks.iter().map(|pick| pick % dataset.rows()).collect();
        assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
        let ranges: Vec<_> = rows.chunks(2).map(|pair| pair[0]..*pair.last().unwrap()).collect();
        let expected: Vec<u64> = ranges.iter().cloned().flatten().collect();
        assert_rows(&dataset.read(&ranges).unwrap(), &columns, &expected);
    }

    #[test]
    fn rows_are_numbered_over_all_files(
        kinds in proptest::collection::vec(any_kind(120), 1..4),
        picks in proptest::collection::vec(any::<u64>(), 1..60),
        residency in any_residency(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut columns = [Vec::new(), Vec::new()];
        let mut paths = Vec::new();
        for (number, kind) in kinds.iter().enumerate() {
            let path = directory.path().join(format!("{number}.parquet"));
            let written = write(&path, kind);
            columns.iter_mut().zip(written).for_each(|(all, more)| all.extend(more));
            paths.push(path);
        }
        let mut options = both();
        options.residency = residency;
        options.block_rows = 50;
        let dataset = Dataset::open(&paths, &options).unwrap();
        prop_assert_eq!(dataset.rows(), columns[0].len() as u64);
        let rows: Vec<u64> = picks.iter().map(|pick| pick % dataset.rows()).collect();
        assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
        let all: Vec<u64> = (0..dataset.rows()).collect();
        assert_rows(&dataset.read_range(0..dataset.rows()).unwrap(), &columns, &all);
    }
}

#[test]
fn every_encoding_compression_and_version_reads_whole_and_streamed() {
    for compression in compressions() {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            for (dictionary, encoding) in [
                (false, Encoding::PLAIN),
                (true, Encoding::PLAIN),
                (false, Encoding::DELTA_LENGTH_BYTE_ARRAY),
                (false, Encoding::DELTA_BYTE_ARRAY),
            ] {
                let kind = FileKind { compression, version, dictionary, encoding, ..FileKind::default() };
                for whole_page_bytes in [0, 4 << 20] {
                    let mut options = both();
                    options.whole_page_bytes = whole_page_bytes;
                    let (_directory, dataset, columns) = open(&kind, &options);
                    let rows = [999, 0, 500, 501, 502, 499, 100, 99];
                    assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
                }
            }
        }
    }
}

#[test]
fn pages_far_larger_than_the_stream_buffer_read_the_same() {
    // One page of several megabytes, with values larger than the buffer in it.
    for compression in compressions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("train.parquet");
        let columns = write_large_page(&path, compression);
        let mut options = both();
        options.whole_page_bytes = 1 << 20;
        let dataset = Dataset::open(&[path], &options).unwrap();
        let mut numbers = Numbers(3);
        let mut rows: Vec<u64> = (0..40).map(|_| numbers.below(dataset.rows())).collect();
        rows.push(dataset.rows() - 1);
        assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
    }
}

fn write_large_page(path: &std::path::Path, compression: Compression) -> [crate::files::Values; 2] {
    let mut numbers = Numbers(9);
    let mut column = |scale: u64| -> crate::files::Values {
        (0..2000u64)
            .map(|row| {
                let length = if row % 500 == 7 { 300_000 } else { numbers.below(scale) };
                // Half of it compresses, half of it does not.
                Some((0..length).map(|at| if at % 64 < 32 { b'a' + numbers.below(26) as u8 } else { b'x' }).collect())
            })
            .collect()
    };
    let columns = [column(2000), column(500)];
    crate::files::write_columns(path, compression, &columns);
    columns
}

#[test]
fn null_empty_and_broken_text_reach_the_caller() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let values = vec![Some(b"text".to_vec()), None, Some(Vec::new()), Some(vec![0xc3, 0x28])];
    crate::files::write_columns(&path, Compression::SNAPPY, &[values.clone(), values]);
    let dataset = Dataset::open(&[path], &both()).unwrap();
    let rows = dataset.read_rows(&[3, 2, 1, 0]).unwrap();
    let seen: Vec<_> = (0..4).map(|row| rows.value(0, row)).collect();
    assert_eq!(seen, [Value::Invalid(&[0xc3, 0x28]), Value::Text(""), Value::Null, Value::Text("text")]);
}

#[test]
fn a_row_beyond_the_end_is_an_error_with_the_number_of_rows() {
    let (_directory, dataset, _) = open(&FileKind { rows: 10, ..FileKind::default() }, &both());
    let error = dataset.read_rows(&[3, 10]).unwrap_err();
    assert_eq!(error.to_string(), "row 10 was requested, expected less than 10");
    assert!(dataset.read_range(5..11).is_err());
    assert!(dataset.read_range(5..5).unwrap().is_empty());
    assert!(dataset.read_rows(&[]).unwrap().is_empty());
}

#[test]
fn threads_read_one_dataset_at_once() {
    let kind = FileKind { rows: 3000, text: Text::LargeUtf8, dictionary: true, ..FileKind::default() };
    let mut options = both();
    options.block_rows = 128;
    options.residency = Residency::RowGroupCache { bytes: 60_000 };
    let (_directory, dataset, columns) = open(&kind, &options);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (dataset, columns) = (&dataset, &columns);
            scope.spawn(move || {
                let mut numbers = Numbers(thread);
                for _ in 0..40 {
                    let start = numbers.below(2600);
                    let rows: Vec<u64> = (0..32).map(|_| start + numbers.below(400)).collect();
                    assert_rows(&dataset.read_rows(&rows).unwrap(), columns, &rows);
                }
            });
        }
    });
    assert!(dataset.cached_bytes() <= 60_000);
}
