//! Parts of long values: exactly the requested bytes, for every storage and every cache state.

use std::ops::Range;

use parquet::basic::{Compression, Encoding};
use parquet_dataset::{Dataset, Residency};
use proptest::prelude::*;

use crate::files::{FileKind, Numbers, Values, any_kind, both, compressions, open, write_columns};

/// The middle of a value, as an example of a caller's range.
fn middle(row: u64, column: usize, bytes: u64) -> Range<u64> {
    let start = (row * 31 + column as u64 * 7) % bytes;
    start..start + 1 + (row + 3) % 9
}

#[track_caller]
fn assert_parts(dataset: &Dataset, columns: &[Values; 2], rows: &[u64], whole: u64) {
    let read = dataset.read_parts(rows, whole, &middle).unwrap();
    assert_eq!(read.len(), rows.len());
    for (at, &row) in rows.iter().enumerate() {
        for (column, values) in columns.iter().enumerate() {
            let value = values[row as usize].as_deref();
            let expected = value.map(|value| match value.len() as u64 > whole {
                true => {
                    let part = middle(row, column, value.len() as u64);
                    &value[part.start as usize..(part.end as usize).min(value.len())]
                }
                false => value,
            });
            assert_eq!(read.bytes(column, at), expected, "column {column} of row {row}");
            assert_eq!(read.value_bytes(column, at), value.map(|value| value.len() as u64));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_part_is_that_part_of_the_value_however_it_is_stored_and_held(
        kind in any_kind(300), whole in 0u64..60, seed: u64, small_pages: bool, mode in 0..3,
    ) {
        let mut options = both();
        options.block_rows = 1 + (seed % 100) as u32;
        if small_pages {
            options.whole_page_bytes = 64;
        }
        options.residency = match mode {
            0 => Residency::UltraLowMem,
            1 => Residency::RowGroupCache { bytes: 3000 },
            _ => Residency::InMemory,
        };
        let (_directory, dataset, columns) = open(&kind, &options);
        let mut numbers = Numbers(seed);
        for _ in 0..4 {
            let rows: Vec<u64> = (0..20).map(|_| numbers.below(kind.rows as u64)).collect();
            assert_parts(&dataset, &columns, &rows, whole);
        }
    }

    #[test]
    fn no_value_and_no_read_is_larger_than_the_pages_say(kind in any_kind(300), seed: u64, most in 1u64..200) {
        let (_directory, dataset, columns) = open(&kind, &both());
        let start_of = |_: u64, _: usize, _: u64| 0..most;
        let lengths = |values: &Values| values.iter().flatten().map(|value| value.len() as u64).collect::<Vec<_>>();
        for has_map in [false, true] {
            if has_map {
                dataset.find_pages().unwrap();
            }
            for (column, values) in columns.iter().enumerate() {
                let largest = lengths(values).into_iter().max().unwrap_or(0);
                prop_assert!(dataset.largest_value_bytes(column) >= largest);
            }
            let count = 1 + (seed % 40) as usize;
            // The rows with the longest prompts, within the limit.
            let mut rows: Vec<u64> = (0..kind.rows as u64).collect();
            rows.sort_by_key(|&row| std::cmp::Reverse(columns[0][row as usize].as_ref().map_or(0, Vec::len)));
            rows.truncate(count);
            let read = dataset.read_parts(&rows, most, &start_of).unwrap();
            let bytes = |column, row| read.bytes(column, row).map_or(0, |value| value.len() as u64);
            let sum: u64 = (0..read.len()).map(|row| bytes(0, row) + bytes(1, row)).sum();
            prop_assert!(sum <= dataset.most_read_bytes(count, most), "{sum}");
        }
    }
}

#[test]
fn a_long_value_is_cut_in_any_codec_and_its_neighbours_are_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let mut values: Values = (0..40u64).map(|row| Some(format!("row {row}").into_bytes())).collect();
    values[7] = Some((0..9_000_000u32).map(|at| (at % 251) as u8).collect());
    values[8] = None;
    let columns = [values.clone(), values];
    for compression in compressions() {
        write_columns(&path, compression, &columns);
        for bytes in [0, 50 << 20] {
            let mut options = both();
            options.max_value_bytes = 1 << 20;
            if bytes > 0 {
                options.residency = Residency::RowGroupCache { bytes };
            }
            let dataset = Dataset::open(std::slice::from_ref(&path), &options).unwrap();
            for _ in 0..2 {
                assert_parts(&dataset, &columns, &[6, 7, 8, 39, 0], 1000);
            }
            assert!(dataset.cached_bytes() < 1 << 20, "{}: the long value is held", dataset.cached_bytes());
        }
    }
}

#[test]
fn a_long_value_of_a_large_dictionary_is_read_in_part_and_whole() {
    let kind = FileKind { dictionary: true, dictionary_bytes: 64 << 20, rows: 1, ..FileKind::default() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let long: Vec<u8> = (0..6_000_000u32).map(|at| b'a' + (at % 23) as u8).collect();
    let values: Values =
        (0..30usize).map(|row| if row % 3 == 0 { Some(long.clone()) } else { Some(vec![b'x'; row]) }).collect();
    let columns = [values.clone(), values];
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
        crate::files::write_values(&path, &FileKind { compression, ..kind.clone() }, &columns);
        let dataset = Dataset::open(std::slice::from_ref(&path), &both()).unwrap();
        assert_parts(&dataset, &columns, &[29, 27, 3, 4, 0], 100);
        let whole = dataset.read_rows(&[4, 3]).unwrap();
        assert_eq!((whole.bytes(0, 0), whole.bytes(1, 1)), (Some(&b"xxxx"[..]), Some(&long[..])));
        dataset.find_pages().unwrap();
        assert_eq!(dataset.largest_value_bytes(0), long.len() as u64);
        let decoding = dataset.costs(Residency::UltraLowMem, 1)[1].bytes;
        assert!(decoding < 1 << 20, "{decoding} bytes for a dictionary that holds nothing but short values");
    }
}

#[test]
fn a_read_beyond_its_bytes_is_refused_in_every_residency_and_fewer_rows_fit() {
    for residency in [Residency::UltraLowMem, Residency::InMemory] {
        let mut options = both();
        options.residency = residency;
        let (_directory, dataset, columns) =
            open(&FileKind { nullable: false, encoding: Encoding::PLAIN, ..FileKind::default() }, &options);
        let all = |_: u64, _: usize, bytes: u64| 0..bytes;
        let rows: Vec<u64> = (0..500).collect();
        let error = dataset.read_parts_within(&rows, 2000, 10, &all).unwrap_err();
        assert!(error.is_read_too_large(), "{error}");
        let few = dataset.read_parts_within(&rows[..10], 2000, 10, &all).unwrap();
        crate::files::assert_rows(&few, &columns, &rows[..10]);
    }
}
