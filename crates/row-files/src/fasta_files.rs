//! The names of FASTA files.

use std::path::{Path, PathBuf};

/// Whether a file has sequences, by its extension.
pub(crate) fn is_fasta(extension: &str) -> bool {
    ["fasta", "fa", "faa"].contains(&extension)
}

/// The file of labels beside a file of sequences, if it is there.
pub(crate) fn labels_beside(path: &Path) -> Option<PathBuf> {
    let extension = path.extension()?.to_str()?;
    let stem = path.file_stem()?.to_str()?;
    let labels = path.with_file_name(format!("{stem}.labels.{extension}"));
    (is_fasta(&extension.to_lowercase()) && !stem.ends_with(".labels") && labels.is_file()).then_some(labels)
}
