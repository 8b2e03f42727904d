//! Shared by the tests of this crate: the sample tokenizer, and parquet files made on the spot.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use arrow_array::{ArrayRef, BinaryArray, RecordBatch};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use parquet_dataset::{Dataset, DatasetOptions, Residency};
use serde_json::json;
use tempfile::TempDir;

use crate::Tokenizer;

/// The tokenizer of the sample data.
pub fn sample_tokenizer() -> &'static Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sample-tokenizer.json");
        Arc::new(Tokenizer::load(&path).unwrap())
    });
    &TOKENIZER
}

/// A tokenizer of lower-case letters and blanks.
pub fn letters() -> Tokenizer {
    let pieces = ["<unk>", "\u{2581}"].into_iter().map(str::to_owned).chain(('a'..='z').map(String::from));
    let vocab: Vec<(String, f64)> = pieces.map(|piece| (piece, -1.0)).collect();
    let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": metaspace, "post_processor": null, "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}});
    Tokenizer::from_bytes(file.to_string().as_bytes(), Path::new("t.json")).unwrap()
}

/// Parquet files of one test, removed when dropped.
pub struct Files {
    directory: TempDir,
    paths: Vec<PathBuf>,
}

/// A value of a test file: bytes, so that broken text can be written too.
pub type Bytes = Option<Vec<u8>>;

impl Files {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), paths: Vec::new() }
    }

    /// Adds a file of the columns `prompt` and `response`.
    pub fn with(mut self, rows: &[(Bytes, Bytes)], row_group_rows: usize) -> Self {
        let path = self.directory.path().join(format!("{}.parquet", self.paths.len()));
        let column = |value: fn(&(Bytes, Bytes)) -> Option<&[u8]>| -> ArrayRef {
            Arc::new(rows.iter().map(value).collect::<BinaryArray>())
        };
        let columns = [("prompt", column(|row| row.0.as_deref())), ("response", column(|row| row.1.as_deref()))];
        let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, values)| (name, values, true)));
        let batch = batch.unwrap();
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(row_group_rows)).build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        self.paths.push(path);
        self
    }

    /// Adds a file of `rows` good rows: row `n` asks for `n` and answers with its square.
    pub fn with_squares(self, rows: u64, row_group_rows: usize) -> Self {
        let text = |text: String| Some(text.into_bytes());
        let rows: Vec<_> = (0..rows).map(|n| (text(format!("{n} squared")), text((n * n).to_string()))).collect();
        self.with(&rows, row_group_rows)
    }

    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    pub fn open(&self) -> Arc<Dataset> {
        let mut options = DatasetOptions::new(["prompt", "response"]);
        options.residency = Residency::InMemory;
        Arc::new(Dataset::open(&self.paths, &options).unwrap())
    }
}
