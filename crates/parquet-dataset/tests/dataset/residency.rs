//! Data kept between reads, and its memory.

use parquet::basic::Compression;
use parquet_dataset::{Dataset, Residency, inspect};

use crate::files::{FileKind, assert_rows, both, open, write};

#[test]
fn ultra_low_mem_holds_no_rows_between_reads() {
    let (_directory, dataset, _) = open(&FileKind::default(), &both());
    dataset.read_range(0..1000).unwrap();
    assert_eq!(dataset.cached_bytes(), 0);
}

#[test]
fn the_cache_stays_within_its_bytes_and_shrinks_at_once() {
    let mut options = both();
    options.block_rows = 64;
    options.residency = Residency::RowGroupCache { bytes: 40_000 };
    let (_directory, dataset, columns) = open(&FileKind { rows: 5000, ..FileKind::default() }, &options);
    for start in (0..4900).step_by(37) {
        let rows: Vec<u64> = (start..start + 50).collect();
        assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
        assert!(dataset.cached_bytes() <= 40_000);
    }
    assert!(dataset.cached_bytes() > 20_000);
    dataset.set_residency(Residency::RowGroupCache { bytes: 10_000 });
    assert!(dataset.cached_bytes() <= 10_000);
    dataset.clear_cache();
    assert_eq!(dataset.cached_bytes(), 0);
}

#[test]
fn a_block_larger_than_the_cache_is_read_row_by_row() {
    let mut options = both();
    options.residency = Residency::RowGroupCache { bytes: 500 };
    let (_directory, dataset, columns) = open(&FileKind::default(), &options);
    for _ in 0..2 {
        assert_rows(&dataset.read_rows(&[4, 900]).unwrap(), &columns, &[4, 900]);
        assert!(dataset.cached_bytes() <= 500);
    }
}

#[test]
fn in_memory_ends_up_holding_every_row_within_its_stated_cost() {
    let mut options = both();
    options.block_rows = 100;
    options.residency = Residency::InMemory;
    let (_directory, dataset, columns) = open(&FileKind::default(), &options);
    let all: Vec<u64> = (0..1000).collect();
    assert_rows(&dataset.read_rows(&all).unwrap(), &columns, &all);
    let costs = dataset.costs(Residency::InMemory, 1);
    let cache = costs.iter().find(|row| row.name == "dataset cache").unwrap().bytes;
    let values: usize = columns.iter().flatten().flatten().map(Vec::len).sum();
    assert!(dataset.cached_bytes() > values as u64, "every value is held");
    assert!(dataset.cached_bytes() <= cache);
}

#[test]
fn a_cache_of_all_blocks_keeps_the_only_one() {
    let mut options = both();
    options.block_rows = 4096;
    let (_directory, dataset, columns) = open(&FileKind { dictionary: false, ..FileKind::default() }, &options);
    let bytes = dataset.bytes_of_all_blocks();
    dataset.set_residency(Residency::RowGroupCache { bytes });
    assert_rows(&dataset.read_rows(&[3, 700]).unwrap(), &columns, &[3, 700]);
    assert!(dataset.cached_bytes() > bytes * 9 / 10, "{} of {bytes}", dataset.cached_bytes());
}

#[test]
fn costs_name_metadata_decoding_and_cache() {
    let (_directory, dataset, _) = open(&FileKind::default(), &both());
    let names = |residency| dataset.costs(residency, 2).iter().map(|row| row.name).collect::<Vec<_>>();
    assert_eq!(names(Residency::UltraLowMem), ["dataset metadata", "dataset decoding", "dataset page map"]);
    let bytes = 123_456;
    let costs = dataset.costs(Residency::RowGroupCache { bytes }, 2);
    assert_eq!(costs.last().map(|row| (row.name, row.bytes)), Some(("dataset cache", bytes)));
    let decoding = |readers| dataset.costs(Residency::UltraLowMem, readers)[1].bytes;
    assert_eq!(decoding(3), 3 * decoding(1));
}

#[test]
fn the_layout_survives_a_move_and_notices_another_content() {
    let (directory, dataset, _) = open(&FileKind { row_group_rows: 300, ..FileKind::default() }, &both());
    let layout = dataset.layout();
    assert_eq!(layout.files[0].row_groups, [300, 300, 300, 100]);
    assert_eq!(layout.rows(), 1000);
    let moved = directory.path().join("moved.parquet");
    std::fs::copy(directory.path().join("train.parquet"), &moved).unwrap();
    let again = Dataset::open(&[moved], &both()).unwrap().layout();
    assert_eq!(again.fingerprint(), layout.fingerprint());
    let other = directory.path().join("other.parquet");
    write(&other, &FileKind { row_group_rows: 300, seed: 2, ..FileKind::default() });
    assert_ne!(Dataset::open(&[other], &both()).unwrap().layout().fingerprint(), layout.fingerprint());
}

#[test]
fn inspect_says_what_a_user_needs_to_know() {
    let (directory, _, _) = open(
        &FileKind { compression: Compression::UNCOMPRESSED, dictionary: true, nullable: false, ..FileKind::default() },
        &both(),
    );
    let found = inspect(&directory.path().join("train.parquet")).unwrap();
    assert_eq!((found.rows(), found.row_groups.len()), (1000, 1));
    assert!(!found.has_page_index && !found.has_checksums);
    let prompt = &found.columns[1];
    assert_eq!((prompt.name.as_str(), prompt.is_string, prompt.is_nullable), ("prompt", true, false));
    assert_eq!(prompt.pages, Some(10));
    assert!(prompt.encodings.iter().any(|encoding| encoding == "RLE_DICTIONARY"), "{:?}", prompt.encodings);
    assert!(found.bytes_to_read_one_row.unwrap() < found.bytes);
    let text = found.to_string();
    for line in ["rows         1000 in 1 row group", "page index   no", "checksums    no", "UNCOMPRESSED"] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    let (directory, _, _) = open(&FileKind { offset_index: true, ..FileKind::default() }, &both());
    assert!(inspect(&directory.path().join("train.parquet")).unwrap().has_page_index);
}
