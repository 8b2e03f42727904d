//! Page maps are restored unchanged, and only for the files that they were made from.

use std::sync::Arc;

use parquet_dataset::{Dataset, IoLog};

use crate::files::{FileKind, assert_rows, both, open, write};

#[test]
fn a_page_map_given_back_spares_the_walk() {
    let (directory, dataset, columns) = open(&FileKind::default(), &both());
    let map = dataset.page_map().unwrap();
    let log = Arc::new(IoLog::default());
    let mut options = both();
    options.page_map = Some(map.clone());
    options.io_log = Some(Arc::clone(&log));
    let again = Dataset::open(&[directory.path().join("train.parquet")], &options).unwrap();
    log.take();
    assert_eq!(again.page_map().unwrap(), map);
    assert_rows(&again.read_rows(&[777]).unwrap(), &columns, &[777]);
    assert_eq!(log.take().len(), 2, "one page of each column, no header");
    let after = again.page_map().unwrap();
    assert!(after != map && after.len() == map.len(), "it knows what two pages hold");
}

#[test]
fn a_page_map_of_another_file_is_ignored() {
    let (_directory, other, _) = open(&FileKind { seed: 2, ..FileKind::default() }, &both());
    let mut options = both();
    options.page_map = Some(other.page_map().unwrap());
    let (_directory, dataset, columns) = open(&FileKind::default(), &options);
    let rows = [5, 999];
    assert_rows(&dataset.read_rows(&rows).unwrap(), &columns, &rows);
}

#[test]
fn a_page_map_of_other_columns_is_ignored() {
    let (directory, dataset, columns) = open(&FileKind::default(), &both());
    let mut options = parquet_dataset::DatasetOptions::new(["response", "prompt"]);
    options.page_map = Some(dataset.page_map().unwrap());
    let dataset = Dataset::open(&[directory.path().join("train.parquet")], &options).unwrap();
    let [prompt, response] = columns;
    assert_rows(&dataset.read_rows(&[321]).unwrap(), &[response, prompt], &[321]);
}

#[test]
fn a_page_map_serves_its_files_in_any_order_and_among_others() {
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..3).map(|number| directory.path().join(format!("{number}.parquet"))).collect();
    let written: Vec<_> =
        paths.iter().zip(0..).map(|(path, seed)| write(path, &FileKind { seed, ..FileKind::default() })).collect();
    let map = Dataset::open(&paths[..2], &both()).unwrap().page_map().unwrap();
    let log = Arc::new(IoLog::default());
    let mut options = both();
    options.page_map = Some(map);
    options.io_log = Some(Arc::clone(&log));
    let dataset = Dataset::open(&[paths[2].clone(), paths[1].clone()], &options).unwrap();
    log.take();
    let rows = dataset.read_rows(&[1500]).unwrap();
    assert_eq!(rows.bytes(0, 0), written[1][0][500].as_deref());
    assert_eq!(log.take().len(), 2);
    dataset.read_rows(&[500]).unwrap();
    assert_eq!(log.take().len(), 2 * (10 + 1), "the file that the map does not know is walked");
}

#[test]
fn a_damaged_page_map_is_never_believed() {
    let (directory, dataset, columns) = open(&FileKind { rows: 300, ..FileKind::default() }, &both());
    let map = dataset.page_map().unwrap();
    for at in (0..map.len()).step_by(7) {
        let mut damaged = map.clone();
        damaged[at] ^= 0x21;
        for bytes in [damaged, map[..at].to_vec()] {
            let mut options = both();
            options.page_map = Some(bytes);
            let dataset = Dataset::open(&[directory.path().join("train.parquet")], &options).unwrap();
            assert_rows(&dataset.read_rows(&[299, 0]).unwrap(), &columns, &[299, 0]);
        }
    }
}
