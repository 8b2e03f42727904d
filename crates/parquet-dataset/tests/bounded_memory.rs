//! Measures peak memory by the operating system's own counter. One test in its own process, because the counter is the
//! process's. Linux only: other systems have no such counter to read and reset.
#![cfg(target_os = "linux")]

#[path = "dataset/files.rs"]
#[allow(dead_code)]
mod files;
#[path = "dataset/many_columns.rs"]
mod many_columns;

use std::path::Path;

use files::{FileKind, Numbers, both, write, write_columns};
use parquet::basic::Compression;
use parquet_dataset::{Dataset, DatasetOptions, Residency, inspect};

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Runs `work` and returns how far the peak exceeds the resident memory before.
fn growth_bytes(work: impl FnOnce()) -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak_bytes();
    work();
    peak_bytes() - before
}

const MIB: u64 = 1 << 20;

#[test]
fn memory_is_bounded_by_what_was_allowed_whatever_the_file_says() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");

    // Two pages of 48 MiB each: a row costs stream buffers, not a whole page.
    let values: files::Values = (0..48).map(|row| Some(vec![b'a' + row % 26; 1 << 20])).collect();
    for compression in files::compressions() {
        write_columns(&path, compression, &[values.clone(), values.clone()]);
        let bytes = growth_bytes(|| {
            let dataset = Dataset::open(std::slice::from_ref(&path), &both()).unwrap();
            assert_eq!(dataset.read_rows(&[40]).unwrap().bytes(1, 0), values[40].as_deref());
        });
        assert!(bytes < 24 * MIB, "{compression:?}: {} MiB for one row of a page of 48 MiB", bytes / MIB);
    }
    drop(values);

    // One value of 60 MB among short ones: only its read part counts, within the bill.
    let mut values: files::Values = (0..500).map(|row| Some(format!("row {row}").into_bytes())).collect();
    values[77] = Some(vec![b'a'; 60_000_000]);
    let in_dictionary = FileKind { dictionary: true, dictionary_bytes: 1 << 30, page_rows: 500, ..FileKind::default() };
    for compression in files::compressions() {
        for is_in_dictionary in [false, true] {
            match is_in_dictionary {
                false => write_columns(&path, compression, &[values.clone(), values.clone()]),
                true => {
                    let kind = FileKind { compression, ..in_dictionary.clone() };
                    files::write_values(&path, &kind, &[values.clone(), values.clone()]);
                }
            }
            let mut bill = 0;
            let bytes = growth_bytes(|| {
                let dataset = Dataset::open(std::slice::from_ref(&path), &both()).unwrap();
                dataset.find_pages().unwrap();
                bill = dataset.costs(Residency::UltraLowMem, 1).iter().map(|row| row.bytes).sum();
                let all: Vec<u64> = (0..500).collect();
                let read = dataset.read_parts(&all, 2000, &|_, _, _| 0..2000).unwrap();
                assert_eq!((read.bytes(1, 77).unwrap().len(), read.value_bytes(1, 77)), (2000, Some(60_000_000)));
                assert_eq!(read.bytes(0, 78), values[78].as_deref());
            });
            let name = format!("{compression:?}, dictionary: {is_in_dictionary}");
            assert!(bytes < bill + 2 * MIB, "{name}: {bytes} bytes, {bill} billed");
            assert!(bytes < 14 * MIB, "{name}: {} MiB for the start of a value of 60 MB", bytes / MIB);
        }
    }
    drop(values);

    // A footer of 58 MB, of which one column is read.
    many_columns::write(&path, 20_000, 26);
    let bytes = growth_bytes(|| {
        let dataset = Dataset::open(std::slice::from_ref(&path), &DatasetOptions::new(["column 19999"])).unwrap();
        assert_eq!(dataset.read_rows(&[25]).unwrap().bytes(0, 0), Some(&b"text"[..]));
    });
    assert!(bytes < 2 * MIB, "{} KiB for one of 20,000 columns", bytes / 1024);
    let bytes = growth_bytes(|| {
        let found = inspect(&path).unwrap();
        assert_eq!((found.columns.len(), found.rows(), found.columns[7].pages), (20_000, 26, Some(26)));
    });
    assert!(bytes < 24 * MIB, "{} MiB to inspect 20,000 columns", bytes / MIB);

    // Blocks are loaded and dropped, and a large dataset passes through a small cache.
    let kind = FileKind { rows: 200_000, page_rows: 5_000, ..FileKind::default() };
    write(&path, &kind);
    let bytes = growth_bytes(|| {
        let mut options = both();
        options.residency = Residency::RowGroupCache { bytes: 2 * MIB };
        options.block_rows = 1024;
        let dataset = Dataset::open(std::slice::from_ref(&path), &options).unwrap();
        for start in (0..200_000).step_by(1000) {
            dataset.read_range(start..start + 1000).unwrap();
        }
    });
    assert!(bytes < 12 * MIB, "{} MiB through a cache of 2 MiB", bytes / MIB);

    // Damage: no declared size is trusted.
    for seed in 0..3 {
        let compression = if seed == 0 { Compression::UNCOMPRESSED } else { Compression::SNAPPY };
        let dictionary = seed == 2;
        write(&path, &FileKind { rows: 200, page_rows: 50, compression, dictionary, seed, ..FileKind::default() });
        let sound = std::fs::read(&path).unwrap();
        let bytes = growth_bytes(|| damage(&path, &sound, seed));
        assert!(bytes < 48 * MIB, "{} MiB of a damaged file of {} bytes", bytes / MIB, sound.len());
    }
}

fn damage(path: &Path, sound: &[u8], seed: u64) {
    let mut numbers = Numbers(seed);
    let mut options = both();
    options.max_read_bytes = 8 * MIB;
    for _ in 0..600 {
        let mut damaged = sound.to_vec();
        let at = numbers.below(sound.len() as u64) as usize;
        let end = (at + 1 + numbers.below(5) as usize).min(sound.len());
        damaged[at..end].fill(0xff);
        std::fs::write(path, damaged).unwrap();
        if let Ok(dataset) = Dataset::open(&[path.to_owned()], &options) {
            let _ = dataset.read_range(0..dataset.rows().min(100_000));
            let _ = dataset.page_map();
        }
    }
}
