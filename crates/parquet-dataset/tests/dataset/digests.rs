//! Data that changes behind an unchanged footer: bytes that were read once are compared whenever they are read again.

use std::path::{Path, PathBuf};

use parquet::basic::Compression;
use parquet::file::properties::WriterVersion;
use parquet_dataset::{Dataset, DatasetOptions, Error};

use crate::files::{FileKind, Values, assert_rows, both, compressions, write, write_columns};

fn open(path: &Path, options: DatasetOptions) -> Dataset {
    Dataset::open(&[path.to_owned()], &options).unwrap()
}

fn with_map(map: &[u8]) -> DatasetOptions {
    DatasetOptions { page_map: Some(map.to_vec()), ..both() }
}

/// Changes a byte in the middle of the file's data in place, and restores the file's modification time.
fn change_a_byte(path: &Path, at: usize) {
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 0x20;
    // In place: the file keeps its inode.
    std::fs::write(path, bytes).unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

fn written(kind: &FileKind) -> (tempfile::TempDir, PathBuf, [Values; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let columns = write(&path, kind);
    (directory, path, columns)
}

/// The offset of the first `text` in the file.
fn find(path: &Path, text: &[u8]) -> Option<usize> {
    std::fs::read(path).unwrap().windows(text.len()).position(|window| window == text)
}

#[test]
fn a_page_with_other_bytes_is_an_error_and_every_other_page_is_read() {
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        let kind = FileKind { compression: Compression::UNCOMPRESSED, version, nullable: false, ..FileKind::default() };
        let (_directory, path, columns) = written(&kind);
        let dataset = open(&path, both());
        dataset.read_range(0..1000).unwrap();
        let map = dataset.page_map().unwrap();
        assert_eq!(dataset.known_segments(), 20, "ten pages in each of two columns");
        assert_eq!(open(&path, with_map(&map)).touched_files(), [] as [&Path; 0]);
        change_a_byte(&path, find(&path, b"row 55").unwrap());
        let again = open(&path, with_map(&map));
        assert_eq!(again.touched_files(), [path.as_path()]);
        let error = again.read_rows(&[7]).unwrap_err();
        assert!(matches!(&error, Error::Rewritten { at, .. } if *at < 10_000), "{error}");
        let text = error.to_string();
        let words = ["row group 0: column `prompt`: rows 0 to 99: page at byte ", ": the data changed since this run"];
        assert!(words.iter().all(|words| text.contains(words)), "{text}");
        assert!(error.hint().unwrap().contains("--allow-changed data"));
        let rows: Vec<u64> = (100..1000).collect();
        assert_rows(&again.read_rows(&rows).unwrap(), &columns, &rows);
        let accepted = open(&path, DatasetOptions { forget_digests: true, ..with_map(&map) });
        assert_eq!((accepted.touched_files(), accepted.known_segments()), (vec![], 0));
        accepted.read_rows(&[7]).unwrap();
    }
}

#[test]
fn a_page_that_was_never_read_is_not_known() {
    let kind = FileKind { compression: Compression::UNCOMPRESSED, nullable: false, ..FileKind::default() };
    let (_directory, path, _) = written(&kind);
    let dataset = open(&path, both());
    dataset.read_range(0..500).unwrap();
    let map = dataset.page_map().unwrap();
    let last_page = (900..1000).find_map(|row| find(&path, format!("row {row}").as_bytes()));
    change_a_byte(&path, last_page.unwrap());
    let again = open(&path, with_map(&map));
    assert_eq!(again.touched_files(), [path.as_path()], "that much can be said");
    again.read_range(0..1000).unwrap();
}

#[test]
fn within_one_process_too_a_page_is_what_it_was() {
    let kind = FileKind { compression: Compression::UNCOMPRESSED, nullable: false, ..FileKind::default() };
    let (_directory, path, _) = written(&kind);
    let dataset = open(&path, both());
    dataset.read_rows(&[7]).unwrap();
    change_a_byte(&path, find(&path, b"row 55").unwrap());
    assert!(matches!(dataset.read_rows(&[8]), Err(Error::Rewritten { .. })));
}

#[test]
fn damage_of_a_known_page_is_called_a_change_in_every_codec_and_size() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let value = |row: usize| (0..200_000).map(|at| b'a' + ((at * at + row * 7) % 23) as u8).collect();
    let values: Values = (0..30).map(|row| if row == 11 { None } else { Some(value(row)) }).collect();
    let columns = [values.clone(), values];
    for compression in compressions() {
        write_columns(&path, compression, &columns);
        let length = std::fs::metadata(&path).unwrap().len();
        // Held whole, and streamed.
        for whole_page_bytes in [64 << 20, 1 << 16] {
            let options = DatasetOptions { whole_page_bytes, ..both() };
            let dataset = open(&path, options.clone());
            let all: Vec<u64> = (0..30).collect();
            assert_rows(&dataset.read_rows(&all).unwrap(), &columns, &all);
            let map = dataset.page_map().unwrap();
            let again = DatasetOptions { page_map: Some(map), ..options };
            for at in [5, 100, length as usize / 3, length as usize / 2 + 99, length as usize * 4 / 5] {
                change_a_byte(&path, at);
                let read = Dataset::open(std::slice::from_ref(&path), &again).and_then(|dataset| {
                    dataset.find_pages()?;
                    dataset.read_rows(&all)
                });
                let error = read.map(|_| ()).unwrap_err();
                let name = format!("{compression:?}, whole pages up to {whole_page_bytes}, byte {at}");
                assert!(matches!(&error, Error::Rewritten { .. }), "{name}: {error}");
                change_a_byte(&path, at);
            }
            assert_rows(&open(&path, again).read_rows(&all).unwrap(), &columns, &all);
        }
    }
}

#[test]
fn a_streamed_page_is_checked_as_far_as_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    let values: Values = (0..24).map(|row| Some(vec![b'a' + row; 1 << 20])).collect();
    let columns = [values.clone(), values];
    write_columns(&path, Compression::UNCOMPRESSED, &columns);
    let dataset = open(&path, both());
    dataset.read_rows(&[20]).unwrap();
    let known = dataset.known_segments();
    assert!((2 * 28..2 * 80).contains(&known), "{known} of 384: lengths of values that were passed over, and a value");
    let map = dataset.page_map().unwrap();
    change_a_byte(&path, (3 << 20) + (1 << 19));
    let again = open(&path, with_map(&map));
    assert_rows(&again.read_rows(&[20]).unwrap(), &columns, &[20]);
    change_a_byte(&path, (20 << 20) + 1000);
    assert!(matches!(open(&path, with_map(&map)).read_rows(&[20]), Err(Error::Rewritten { .. })));
}

#[test]
fn a_dictionary_with_other_words_is_an_error() {
    let kind = FileKind { dictionary: true, compression: Compression::UNCOMPRESSED, ..FileKind::default() };
    let (_directory, path, _) = written(&kind);
    let dataset = open(&path, both());
    dataset.read_range(0..1000).unwrap();
    let map = dataset.page_map().unwrap();
    change_a_byte(&path, find(&path, b"longer words").unwrap());
    assert!(matches!(open(&path, with_map(&map)).read_rows(&[900]), Err(Error::Rewritten { .. })));
}

#[test]
fn pages_that_lie_elsewhere_behind_the_same_footer_are_a_change() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.parquet");
    crate::many_columns::write(&path, 2, 1);
    let options = DatasetOptions::new(["column 1"]);
    let map = open(&path, options.clone()).page_map().unwrap();
    // Reduces the compressed size that the page header declares, at byte 9, by one.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9] -= 2;
    std::fs::write(&path, bytes).unwrap();
    let options = DatasetOptions { page_map: Some(map), ..options };
    let error = open(&path, options).find_pages().unwrap_err();
    assert!(matches!(error, Error::Rewritten { at: 4, .. }), "{error}");
}

#[test]
fn a_file_that_was_touched_or_copied_is_named_and_read() {
    let (directory, path, columns) = written(&FileKind::default());
    let dataset = open(&path, both());
    dataset.read_range(0..1000).unwrap();
    let map = dataset.page_map().unwrap();
    let copy = directory.path().join("copy.parquet");
    std::fs::copy(&path, &copy).unwrap();
    let again = open(&copy, with_map(&map));
    assert_eq!(again.touched_files(), [copy.as_path()]);
    again.find_pages().unwrap();
    assert_rows(&again.read_rows(&[3, 999]).unwrap(), &columns, &[3, 999]);
    // The new map has the copy's stamps.
    let map = again.page_map().unwrap();
    assert_eq!(open(&copy, with_map(&map)).touched_files(), [] as [&Path; 0]);
}
