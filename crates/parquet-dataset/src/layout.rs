//! The shape of a dataset: its files, row groups and rows, and one fingerprint.

use std::path::PathBuf;

use serde::Serialize;
use sha2::{Digest, Sha256};

/// The shape of a dataset. Two datasets with the same fingerprint hold the same rows in the same order, unless pages
/// changed while the footer did not. [`DatasetOptions::page_map`](crate::DatasetOptions::page_map) detects such changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// The files, in the order given.
    pub files: Vec<FileLayout>,
}

/// The shape of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileLayout {
    /// The path, as it was given. Not part of the fingerprint: a file that was moved is the same file.
    pub path: PathBuf,
    /// The file's size.
    pub bytes: u64,
    /// Rows of each row group.
    pub row_groups: Vec<u64>,
    /// SHA-256 of the footer, in hexadecimal. The footer holds every chunk's place, sizes and statistics, so different
    /// content that was written anew practically always has a different footer.
    pub footer_sha256: String,
}

impl FileLayout {
    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.row_groups.iter().sum()
    }
}

impl Layout {
    /// Rows of all files.
    pub fn rows(&self) -> u64 {
        self.files.iter().map(FileLayout::rows).sum()
    }

    /// Identifies the content: SHA-256, in hexadecimal, over each file's size, row counts and footer. Paths and times
    /// are not included.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(b"parquet-dataset layout 1\n");
        for file in &self.files {
            hash.update(format!("{} {:?} {}\n", file.bytes, file.row_groups, file.footer_sha256));
        }
        hex(&hash.finalize())
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(path: &str, row_groups: Vec<u64>) -> Layout {
        Layout { files: vec![FileLayout { path: path.into(), bytes: 100, row_groups, footer_sha256: "ab".to_owned() }] }
    }

    #[test]
    fn a_moved_file_keeps_its_fingerprint_and_another_cut_does_not() {
        assert_eq!(layout("a", vec![3, 4]).fingerprint(), layout("b/c", vec![3, 4]).fingerprint());
        assert_ne!(layout("a", vec![3, 4]).fingerprint(), layout("a", vec![4, 3]).fingerprint());
    }

    #[test]
    fn the_order_of_files_is_part_of_the_fingerprint() {
        let (a, b) = (layout("a", vec![1]).files.remove(0), layout("b", vec![2]).files.remove(0));
        let (forth, back) = (Layout { files: vec![a.clone(), b.clone()] }, Layout { files: vec![b, a] });
        assert_ne!(forth.fingerprint(), back.fingerprint());
    }
}
