//! Reads prove laziness: opening reads only footers, and reading rows reads only their pages.

use std::ops::Range;
use std::sync::Arc;

use parquet_dataset::{Dataset, DatasetOptions, IoLog, Residency};

use crate::files::{FileKind, both, open};

fn logged() -> (DatasetOptions, Arc<IoLog>) {
    let log = Arc::new(IoLog::default());
    let mut options = both();
    options.io_log = Some(Arc::clone(&log));
    (options, log)
}

fn bytes(log: &IoLog) -> Vec<Range<u64>> {
    log.take().into_iter().map(|read| read.bytes).collect()
}

/// A file whose pages are far apart compared with the size of a header.
fn large_pages() -> FileKind {
    FileKind { rows: 40_000, page_rows: 2_000, ..FileKind::default() }
}

#[test]
fn opening_reads_the_footer_only() {
    let (options, log) = logged();
    let (directory, dataset, _) = open(&large_pages(), &options);
    let length = dataset.layout().files[0].bytes;
    let reads = bytes(&log);
    assert_eq!(reads.len(), 1, "{reads:?}");
    assert_eq!(reads[0].end, length);
    assert!(reads[0].end - reads[0].start <= 64 * 1024);
    drop(directory);
}

#[test]
fn walking_page_headers_reads_a_few_hundred_bytes_a_page() {
    let (options, log) = logged();
    let (_directory, dataset, _) = open(&large_pages(), &options);
    log.take();
    dataset.page_map().unwrap();
    let reads = bytes(&log);
    // 20 pages in each of two columns.
    assert_eq!(reads.len(), 40, "{reads:?}");
    assert!(reads.iter().all(|read| read.end - read.start <= 512), "{reads:?}");
}

#[test]
fn reading_a_row_reads_its_page_in_each_column_and_no_other() {
    for offset_index in [false, true] {
        let (options, log) = logged();
        let (_directory, dataset, _) = open(&FileKind { offset_index, ..large_pages() }, &options);
        dataset.page_map().unwrap();
        log.take();
        dataset.read_range(0..40_000).unwrap();
        let pages = bytes(&log);
        assert_eq!(pages.len(), 40, "{pages:?}");
        for (row, page) in [(0, 0), (1_999, 0), (2_000, 1), (39_999, 19)] {
            dataset.read_rows(&[row]).unwrap();
            assert_eq!(bytes(&log), [pages[page].clone(), pages[20 + page].clone()], "row {row}");
        }
        dataset.read_range(5_000..7_000).unwrap();
        let touched = [2, 3, 22, 23].map(|page| pages[page].clone());
        assert_eq!(bytes(&log), touched);
    }
}

#[test]
fn a_page_is_read_once_for_any_number_of_its_rows_in_any_order() {
    let (options, log) = logged();
    let (_directory, dataset, _) = open(&large_pages(), &options);
    dataset.page_map().unwrap();
    log.take();
    dataset.read_rows(&[1_500, 3, 2_100, 4, 3, 2_050, 1_999]).unwrap();
    assert_eq!(bytes(&log).len(), 4);
}

#[test]
fn an_offset_index_spares_the_walk() {
    let (options, log) = logged();
    let (_directory, dataset, _) = open(&FileKind { offset_index: true, ..large_pages() }, &options);
    log.take();
    dataset.page_map().unwrap();
    assert_eq!(bytes(&log).len(), 2);
}

#[test]
fn the_dictionary_is_read_only_where_a_page_needs_it() {
    let (options, log) = logged();
    let kind = FileKind { dictionary: true, dictionary_bytes: 2_000, ..large_pages() };
    let (_directory, dataset, _) = open(&kind, &options);
    dataset.page_map().unwrap();
    log.take();
    dataset.read_rows(&[0]).unwrap();
    let first = bytes(&log);
    assert_eq!(first.len(), 4, "a page and a dictionary for each column: {first:?}");
    dataset.read_rows(&[39_999]).unwrap();
    let last = bytes(&log);
    assert_eq!(last.len(), 2, "the writer gave up its dictionary before the last page: {last:?}");
}

#[test]
fn a_row_group_that_is_not_asked_for_is_not_touched() {
    let (options, log) = logged();
    let (_directory, dataset, _) = open(&FileKind { row_group_rows: 10_000, ..large_pages() }, &options);
    log.take();
    dataset.read_rows(&[25_000]).unwrap();
    // For each column, the walk over one row group's headers, and one page.
    assert_eq!(bytes(&log).len(), 2 * (5 + 1));
}

#[test]
fn what_the_cache_holds_is_not_read_again() {
    let (mut options, log) = logged();
    options.residency = Residency::RowGroupCache { bytes: 64 << 20 };
    let (_directory, dataset, _) = open(&large_pages(), &options);
    dataset.read_rows(&[100]).unwrap();
    log.take();
    dataset.read_rows(&[101, 4_095, 0]).unwrap();
    assert_eq!(bytes(&log), []);
    dataset.set_residency(Residency::UltraLowMem);
    dataset.read_rows(&[101]).unwrap();
    assert_eq!(bytes(&log).len(), 2);
}

#[test]
fn only_the_columns_asked_for_are_read() {
    let log = Arc::new(IoLog::default());
    let (directory, _, columns) = open(&large_pages(), &both());
    let mut options = DatasetOptions::new(["response"]);
    options.io_log = Some(Arc::clone(&log));
    let dataset = Dataset::open(&[directory.path().join("train.parquet")], &options).unwrap();
    dataset.page_map().unwrap();
    log.take();
    let rows = dataset.read_rows(&[20_000]).unwrap();
    assert_eq!(rows.bytes(0, 0), columns[1][20_000].as_deref());
    assert_eq!(bytes(&log).len(), 1);
}
