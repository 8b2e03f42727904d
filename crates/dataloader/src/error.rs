//! Errors between reading a row and returning a batch: what failed, where, expected and got.

use std::path::PathBuf;

/// Errors of this crate. Each names its subject; [`Error::hint`] tells the user what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading rows failed.
    #[error(transparent)]
    Dataset(#[from] parquet_dataset::Error),
    /// Reading rows of a file that is not parquet failed.
    #[error(transparent)]
    Rows(#[from] row_files::Error),
    /// A row cannot be a sample and [`BadRows::Error`](crate::BadRows::Error) is in force.
    #[error("{0}")]
    BadRow(BadRow),
    /// A `tokenizer.json` cannot be read or parsed.
    #[error("{}: not a usable tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The file reader's message.
        reason: String,
    },
    /// A tokenizer has none of the usual tokens for a role.
    #[error("{}: no {role} token: expected one of {expected}", path.display())]
    MissingToken {
        /// The tokenizer's file.
        path: PathBuf,
        /// `end-of-sequence` or `padding`.
        role: &'static str,
        /// The names that were looked for.
        expected: String,
    },
    /// The tokenizer has no tokens for a text.
    #[error("{}: cannot tokenize a text: {reason}", path.display())]
    Encode {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's message.
        reason: String,
    },
    /// Options that contradict each other, the tokenizer, or the data.
    #[error("{0}")]
    Options(String),
    /// A position beyond this data: a run over other data saved it.
    #[error("the data has no epoch {epoch}, sample {sample}: an epoch has {rows} samples")]
    Position {
        /// The epoch asked for.
        epoch: u64,
        /// The sample asked for.
        sample: u64,
        /// Samples of an epoch.
        rows: u64,
    },
    /// Training a tokenizer failed.
    #[error("training the tokenizer: {0}")]
    Training(String),
    /// A text file cannot be read.
    #[error("{}: {source}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The system's message.
        source: std::io::Error,
    },
    /// A file holds no text: a damaged parquet file, zeros, another format.
    #[error("{}: not a text file: {reason}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The found content.
        reason: String,
    },
    /// A decoding thread could not be started or died: a bug, or a machine without resources.
    #[error("a decoding thread failed: {0}")]
    Thread(String),
}

impl Error {
    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::BadRow(_) => Some("set `data.bad_rows = \"skip\"` to skip such rows; they are counted and reported"),
            Self::Tokenizer { .. } => Some(
                "a tokenizer is a `tokenizer.json`, a `spiece.model`, a `vocab.json` with `merges.txt`, or a model directory with one",
            ),
            Self::MissingToken { .. } => {
                Some("name the token in the model's config, or add it to the tokenizer as a special token")
            }
            Self::NotText { .. } => Some("inputs are text files in UTF-8, or whole parquet files"),
            Self::Position { .. } => Some("the data changed since the checkpoint was written"),
            _ => None,
        }
    }
}

/// Why a row cannot be a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BadValue {
    /// The value is null.
    Null,
    /// The value is the empty string, or white space only.
    Empty,
    /// The bytes are not UTF-8.
    NotUtf8,
    /// The text is no label.
    NoLabel,
    /// The model has no such label.
    UnknownLabel,
    /// A number is expected.
    NotANumber,
    /// The text is no list in JSON.
    NoList,
    /// There are more labels than words, or fewer.
    UnequalLists,
    /// The tokenizer makes no token of a word, so its label has no place.
    WordWithoutToken,
    /// The value is longer than what is read of a row of labels.
    TooLong,
    /// A token of the value stands for an image.
    Image,
}

impl std::fmt::Display for BadValue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Null => "is null",
            Self::Empty => "is empty",
            Self::NotUtf8 => "is not UTF-8",
            Self::NoLabel => "is not a label: expected true or false, or 1 or 0",
            Self::UnknownLabel => "has a label that is none of the model's",
            Self::NotANumber => "is not a number",
            Self::NoList => "is not a list of texts in JSON",
            Self::UnequalLists => "has another number of labels than there are words or texts",
            Self::WordWithoutToken => "has a word that gives no token",
            Self::TooLong => "is too long for labels and their words",
            Self::Image => "has a token that stands for an image: the model reads texts alone",
        })
    }
}

/// A row that cannot be a sample, and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRow {
    /// The file that holds the row.
    pub file: PathBuf,
    /// The row group in that file, from 0.
    pub row_group: usize,
    /// The row in that file, from 0.
    pub row: u64,
    /// The column with the bad value.
    pub column: String,
    /// The problem with it.
    pub value: BadValue,
}

impl std::fmt::Display for BadRow {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { file, row_group, row, column, value } = self;
        write!(formatter, "{}: row group {row_group}: row {row}: column `{column}` {value}", file.display())
    }
}

/// The message that a thread panicked with.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".to_owned())
}
