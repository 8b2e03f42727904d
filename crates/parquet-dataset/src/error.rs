//! Errors, worded so that a person can act on them.
//!
//! [`Error`] is for callers: it always has the file, and the row group, column and rows as far as they are known.
//! Decoding code returns a [`Fault`], which has no place yet.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Errors of opening or reading a dataset. Rows are numbered from 0 within their file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to open, examine or read a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file, as it was given.
        path: PathBuf,
        /// The attempted action: "open", "read 4096 bytes at 1024".
        action: String,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A dataset was opened without any file.
    #[error("no parquet file was given, expected at least one")]
    NoFiles,
    /// A dataset was opened without any column.
    #[error("no column was requested, expected at least one string column")]
    NoColumns,
    /// The file lacks parquet's magic bytes or is too short to hold a footer.
    #[error("{}: not a parquet file: {reason}", path.display())]
    NotParquet {
        /// The file, as it was given.
        path: PathBuf,
        /// The bytes in place of the magic bytes or the footer's length.
        reason: String,
    },
    /// The file, or a requested column of it, is encrypted.
    #[error("{}: the file is encrypted, and its keys are not here", path.display())]
    Encrypted {
        /// The file, as it was given.
        path: PathBuf,
    },
    /// The footer exists but cannot be parsed, or contradicts itself or the file's size.
    #[error("{}: the footer is corrupt: {reason}", path.display())]
    Footer {
        /// The file, as it was given.
        path: PathBuf,
        /// The found value.
        reason: String,
    },
    /// No file has any row.
    #[error("{}: no rows in {}, expected at least one row", path.display(), file_count(*files))]
    NoRows {
        /// The first file.
        path: PathBuf,
        /// The number of files.
        files: usize,
    },
    /// A requested column does not exist.
    #[error("{}: no column `{column}`, expected a string column of that name", path.display())]
    MissingColumn {
        /// The file, as it was given.
        path: PathBuf,
        /// The requested column.
        column: String,
        /// The file's string columns.
        string_columns: Vec<String>,
    },
    /// A requested column is not a flat string or binary column.
    #[error("{}: column `{column}` is {found}, expected a string column", path.display())]
    WrongType {
        /// The file, as it was given.
        path: PathBuf,
        /// The requested column.
        column: String,
        /// The column's type in parquet's words.
        found: String,
        /// The file's string columns.
        string_columns: Vec<String>,
    },
    /// The file is valid parquet, but uses a feature that this crate does not read.
    #[error("{place}: {what} is not supported")]
    Unsupported {
        /// The place of the feature.
        place: Box<Location>,
        /// The codec, encoding or layout.
        what: String,
    },
    /// The bytes contradict themselves, the footer or their checksum.
    #[error("{place}: corrupt: {reason}")]
    Corrupt {
        /// The place of the damage.
        place: Box<Location>,
        /// The expected and the found value.
        reason: String,
    },
    /// A single value, or all values of one read, exceed the caller's limit.
    #[error("{place}: {what} is {bytes} bytes, expected at most {limit}")]
    TooLarge {
        /// The place of the value.
        place: Box<Location>,
        /// "a value" or "one read".
        what: &'static str,
        /// The size, or a lower bound of it.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file is not the same as when it was opened.
    #[error("{}: changed while it was open: {change}", path.display())]
    Changed {
        /// The file, as it was given.
        path: PathBuf,
        /// The change, with the old and the new value.
        change: String,
    },
    /// The footer is the same, but a page differs from this run's first read of it.
    #[error("{place}: page at byte {at}: the data changed since this run read it first")]
    Rewritten {
        /// The place of the page.
        place: Box<Location>,
        /// The page's first byte in the file.
        at: u64,
    },
    /// A requested row is beyond the end. Rows are numbered over all files here.
    #[error("row {row} was requested, expected less than {rows}")]
    RowOutOfRange {
        /// The requested row.
        row: u64,
        /// The number of rows in the dataset.
        rows: u64,
    },
}

impl Error {
    /// Advice for the `hint:` line under the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::MissingColumn { string_columns, .. } | Self::WrongType { string_columns, .. } => {
                Some(match string_columns.is_empty() {
                    true => "the file has no string column".to_owned(),
                    false => format!("the file's string columns: {}", string_columns.join(", ")),
                })
            }
            Self::Unsupported { .. } => Some(
                "rewrite the file with plain or dictionary encoding and snappy, zstd, gzip or no compression"
                    .to_owned(),
            ),
            Self::Encrypted { .. } => Some("write the rows again without encryption, where the keys are".to_owned()),
            Self::NotParquet { .. } | Self::Footer { .. } | Self::Corrupt { .. } => {
                Some("the file is damaged or incomplete; copy or write it again".to_owned())
            }
            Self::Rewritten { .. } => {
                Some("restore the old file, or resume with the new one: `--allow-changed data`".to_owned())
            }
            Self::Changed { .. } => Some("start again when no other process writes to the file".to_owned()),
            _ => None,
        }
    }

    /// Whether all values of one read together exceed the caller's limit: fewer rows may fit.
    pub fn is_read_too_large(&self) -> bool {
        matches!(self, Self::TooLarge { what: "one read", .. })
    }

    pub(crate) fn io(path: &Path, action: impl Into<String>, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), action: action.into(), source }
    }
}

/// A place in a file.
#[derive(Debug, Clone, Default)]
pub struct Location {
    /// The file, as it was given.
    pub path: PathBuf,
    /// The row group, from 0.
    pub row_group: Option<usize>,
    /// The column's dotted path.
    pub column: Option<String>,
    /// Rows of the page that was being read, from 0 within the file.
    pub rows: Option<Range<u64>>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(row_group) = self.row_group {
            write!(f, ": row group {row_group}")?;
        }
        if let Some(column) = &self.column {
            write!(f, ": column `{column}`")?;
        }
        match &self.rows {
            Some(rows) if rows.end == rows.start + 1 => write!(f, ": row {}", rows.start),
            Some(rows) => write!(f, ": rows {} to {}", rows.start, rows.end.saturating_sub(1)),
            None => Ok(()),
        }
    }
}

/// An error of decoding; [`Fault::at`] turns it into an [`Error`] once the place is known.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file could not be read.
    File(io::Error),
    /// The bytes end too early: damage, or a file that was truncated after it was opened.
    UnexpectedEof(Cow<'static, str>),
    /// The bytes are wrong.
    Corrupt(Cow<'static, str>),
    /// The bytes may be valid, but this crate does not read them.
    Unsupported(String),
    /// The bytes of the page at `at` have changed.
    Rewritten { at: u64 },
    /// The bytes exceed the caller's limit.
    TooLarge { what: &'static str, bytes: u64, limit: u64 },
}

impl Fault {
    pub(crate) fn corrupt<T>(reason: impl Into<Cow<'static, str>>) -> Result<T, Self> {
        Err(Self::Corrupt(reason.into()))
    }

    pub(crate) fn unexpected_eof<T>(reason: impl Into<Cow<'static, str>>) -> Result<T, Self> {
        Err(Self::UnexpectedEof(reason.into()))
    }

    /// The problem, without its place.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::File(source) => source.to_string(),
            Self::UnexpectedEof(reason) | Self::Corrupt(reason) => reason.to_string(),
            Self::Unsupported(what) => format!("{what} is not supported"),
            Self::Rewritten { at } => format!("the page at byte {at} changed"),
            Self::TooLarge { what, bytes, limit } => format!("{what} is {bytes} bytes, expected at most {limit}"),
        }
    }

    pub(crate) fn at(self, place: Location) -> Error {
        let place = Box::new(place);
        match self {
            Self::File(source) => Error::Io { path: place.path, action: "read".to_owned(), source },
            Self::UnexpectedEof(reason) | Self::Corrupt(reason) => {
                Error::Corrupt { place, reason: reason.into_owned() }
            }
            Self::Unsupported(what) => Error::Unsupported { place, what },
            Self::Rewritten { at } => Error::Rewritten { place, at },
            Self::TooLarge { what, bytes, limit } => Error::TooLarge { place, what, bytes, limit },
        }
    }
}

fn file_count(files: usize) -> String {
    match files {
        1 => "this file".to_owned(),
        files => format!("this and {} more files", files - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_file_row_group_column_rows_expected_and_got() {
        let place = Location {
            path: "train.parquet".into(),
            row_group: Some(3),
            column: Some("response".to_owned()),
            rows: Some(1200..1300),
        };
        let error = Fault::Corrupt("a value of 900 bytes, expected at most 80".into()).at(place);
        assert_eq!(
            error.to_string(),
            "train.parquet: row group 3: column `response`: rows 1200 to 1299: corrupt: a value of 900 bytes, \
             expected at most 80"
        );
    }

    #[test]
    fn a_wrong_column_is_answered_with_the_columns_that_would_do() {
        let error = Error::WrongType {
            path: "train.parquet".into(),
            column: "response".to_owned(),
            found: "INT64".to_owned(),
            string_columns: vec!["prompt".to_owned(), "answer".to_owned()],
        };
        assert_eq!(error.to_string(), "train.parquet: column `response` is INT64, expected a string column");
        assert_eq!(error.hint().as_deref(), Some("the file's string columns: prompt, answer"));
    }
}
