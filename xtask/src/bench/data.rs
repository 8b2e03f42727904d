//! Rows for benchmarks: as long as a config allows, or with very uneven lengths.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;

/// The lengths of a file's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// 700 words, more than most configs of the benchmarks keep.
    Full,
    /// 5,000 words, for configs of up to 4,096 tokens.
    Long,
    /// From 2 words to 700, most of them short.
    Uneven,
}

const WORDS: [&str; 8] = ["seven", "twelve", "apple", "the", "reverse", "nine", "hundred", "forty"];

/// Writes rows of these lengths below `directory` and returns the file.
pub fn write(directory: &Path, lengths: Lengths) -> Result<PathBuf, String> {
    let path = directory.join(format!("{lengths:?}.parquet").to_lowercase());
    let column = |salt: usize| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            (0..rows(lengths)).map(|row| text(words(lengths, row * 2 + salt), row + salt)),
        ))
    };
    let batch = RecordBatch::try_from_iter([("prompt", column(0)), ("response", column(1))]);
    let batch = batch.map_err(|error| error.to_string())?;
    let file = File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).map_err(|error| error.to_string())?;
    writer.write(&batch).and_then(|()| writer.close()).map_err(|error| error.to_string())?;
    Ok(path)
}

fn rows(lengths: Lengths) -> usize {
    if lengths == Lengths::Long { 32 } else { 512 }
}

fn words(lengths: Lengths, index: usize) -> usize {
    match lengths {
        Lengths::Full => 700,
        Lengths::Long => 5_000,
        // The cube of a number spread evenly over 0..1: half of the rows have fewer than 90 words.
        Lengths::Uneven => {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let even = (index * 611_953 % 1_000) as f64 / 1_000.0;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 700")]
            let words = 2 + (700.0 * even.powi(3)) as usize;
            words
        }
    }
}

fn text(words: usize, salt: usize) -> String {
    let word = |place: usize| WORDS[(place * 5 + salt * 3 + place * salt % 7) % WORDS.len()];
    (0..words).map(word).collect::<Vec<_>>().join(" ")
}
