//! Errors: a file that cannot be read as rows, and a row that cannot be used.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::encoding::Encoding;
use crate::meaning::{Meaning, Unpaired, quoted};

/// A file that cannot be read as rows, or not to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused to open, read or write.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file, as it was given.
        path: PathBuf,
        /// The attempted action: "open", "read".
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The content is of a kind that this crate does not read.
    #[error("{}: {what}; expected parquet, JSONL, a JSON array, CSV or TSV, plain, .gz or .zst", path.display())]
    Format {
        /// The file, as it was given.
        path: PathBuf,
        /// The kind that the content seems to have.
        what: String,
        /// A solution for the user.
        hint: &'static str,
    },
    /// Compressed bytes that are damaged, end early, or would unpack to far more than any real file.
    #[error("{}: {reason}", path.display())]
    Compressed {
        /// The file, as it was given.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// The text around the rows is broken, so that nothing after this line can be read.
    #[error("{}:{line}: {reason}", path.display())]
    Broken {
        /// The file, as it was given.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The problem.
        reason: String,
    },
    /// An object holds a second list of rows.
    #[error("{}:{line}: a second list of rows, `{list}`: expected one list in a file", path.display())]
    Lists {
        /// The file, as it was given.
        path: PathBuf,
        /// The line on which the second list begins, from 1.
        line: u64,
        /// Its name.
        list: String,
    },
    /// The file has no columns for a prompt and a response.
    #[error("{}: no column `{missing}`", path.display())]
    Columns {
        /// The file, as it was given.
        path: PathBuf,
        /// The missing column.
        missing: String,
        /// The columns of the file.
        columns: Vec<String>,
        /// The text between two fields, if the file has fields.
        delimiter: Option<char>,
    },
    /// The columns have several meanings.
    #[error("{}: the columns can be read in {} ways: {}", path.display(), meanings.len(), words(meanings))]
    Question {
        /// The file, as it was given.
        path: PathBuf,
        /// Each meaning, with the settings that choose it.
        meanings: Vec<Meaning>,
    },
    /// A column that would change the meaning of the rows is not in the first ones, by which it was found.
    #[error("{}:{line}: the first row with a column `{column}`; without it rows are read as: {meaning}", path.display())]
    LateColumn {
        /// The file, as it was given.
        path: PathBuf,
        /// The row's line, from 1.
        line: u64,
        /// The column.
        column: String,
        /// The reading.
        meaning: String,
    },
    /// A setting about columns cannot be used.
    #[error("`data.{key}`: {reason}")]
    Setting {
        /// The key in `data`.
        key: &'static str,
        /// The problem.
        reason: String,
    },
    /// A part of a parquet file would take more memory than is allowed, so that it was not decoded.
    #[error("{}: {what} takes {bytes} bytes, expected at most {limit}", path.display())]
    PartTooLarge {
        /// The file, as it was given.
        path: PathBuf,
        /// The footer, or a page of a column.
        what: String,
        /// The bytes that it declares.
        bytes: u64,
        /// The allowed bytes.
        limit: u64,
    },
    /// The parquet crate could not decode the file.
    #[error("{}: {reason}", path.display())]
    Decode {
        /// The file, as it was given.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// The file changed while it was read.
    #[error("{}: changed while it was read", path.display())]
    Changed {
        /// The file, as it was given.
        path: PathBuf,
    },
    /// Reading a parquet file failed.
    #[error(transparent)]
    Parquet(#[from] parquet_dataset::Error),
    /// A row cannot be used, and such rows end the conversion.
    #[error("{0}")]
    Row(RowError),
    /// Some files hold pairs, and others texts alone.
    #[error("{}: has only a text column, but {} has prompts and responses", text.display(), pairs.display())]
    Mixed {
        /// A file of texts.
        text: PathBuf,
        /// A file of pairs.
        pairs: PathBuf,
    },
    /// Rows could not be written.
    #[error("cannot write rows: {0}")]
    Write(io::Error),
    /// The table of duplicates would need more memory than its limit.
    #[error("finding duplicates among more than {rows} rows needs {bytes} bytes, more than the limit")]
    Duplicates {
        /// Rows read so far that are not duplicates.
        rows: u64,
        /// The bytes that the table would need.
        bytes: u64,
    },
    /// The caller asked to stop.
    #[error("stopped")]
    Stopped,
}

fn words(meanings: &[Meaning]) -> String {
    meanings.iter().map(|meaning| meaning.words.as_str()).collect::<Vec<_>>().join("; or ")
}

/// Kinds of values that are not text.
pub(crate) const LIST: &str = "a list";
pub(crate) const NUMBERS: &str = "a list of numbers";
pub(crate) const OBJECT: &str = "an object";

/// A serde_json error without its place, which counts lines within the row.
pub(crate) fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason).to_owned()
}

/// The most columns that a message lists.
const SHOWN_COLUMNS: usize = 12;

impl Error {
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> Self {
        // Decoders report faults of compressed bytes by these kinds.
        let reason = match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                format!("the compressed data ends early ({source})")
            }
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Other if action == "read" => {
                format!("the compressed data is damaged: {source}")
            }
            _ => return Self::Io { path: path.to_owned(), action, source },
        };
        Self::Compressed { path: path.to_owned(), reason }
    }

    /// The error of a file whose columns have no single meaning. `delimiter` is the text between two fields, if the file has fields.
    pub fn unpaired(path: &Path, unpaired: Unpaired, columns: Vec<String>, delimiter: Option<char>) -> Self {
        let path = path.to_owned();
        match unpaired {
            Unpaired::Missing(missing) => Self::Columns { path, missing, columns, delimiter },
            Unpaired::Template(key, reason) => Self::Setting { key, reason },
            // Each row is one message: no two of its columns are a pair.
            Unpaired::Question(_) if is_of_messages(&columns) => {
                Self::Columns { path, missing: "response".to_owned(), columns, delimiter }
            }
            Unpaired::Question(meanings) => Self::Question { path, meanings },
        }
    }

    /// Advice for the `hint:` line under the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Format { hint, .. } => Some((*hint).to_owned()),
            Self::Compressed { reason, .. } if reason.contains("unpack to") => {
                Some("unpack the file first, if it is what it should be".to_owned())
            }
            Self::Compressed { reason, .. } if reason.contains("a window of") => Some(
                "unpack it first: `zstd -d --long=31 FILE`. `zstd` without `--ultra` and `--long` needs less"
                    .to_owned(),
            ),
            Self::Compressed { .. } => Some("copy or download the file again".to_owned()),
            Self::Broken { .. } => Some("the file is damaged or was not written completely".to_owned()),
            Self::Lists { path, list, .. } => Some(format!(
                "write each list to a file of its own: `jq -c '.{list}[]' {} > {list}.jsonl`",
                quoted(&path.to_string_lossy())
            )),
            Self::Columns { .. } if self.layout_command().is_some() => self.layout_command(),
            Self::Columns { path, .. } if path.extension().is_some_and(|extension| extension == "txt") => Some(format!(
                "lines of plain text become rows by `jq -Rc 'select(length > 0) | {{text: .}}' {} > rows.jsonl`",
                quoted(&path.to_string_lossy())
            )),
            Self::Columns { columns, missing, .. } if is_preference(columns) && missing == "prompt" => Some(
                "answers of which one was chosen are for `preference.loss`: `--lora --set preference.loss=dpo`".to_owned(),
            ),
            Self::Columns { columns, missing, .. } => Some(match (columns.as_slice(), joined(missing, columns)) {
                ([], _) => "the file has no columns".to_owned(),
                (_, Some(template)) => format!(
                    "several columns make one text by a template: `data.source_template={template}`, or `data.target_template` for targets"
                ),
                ([column], None) => format!(
                    "its only column is `{}`; one text alone is for pretraining: `data.objective=span-corruption` with `data.text_column`",
                    shortened(column)
                ),
                (columns, None) => format!(
                    "set `data.prompt_column` and `data.response_column` to two of: {}",
                    listed(columns)
                ),
            }),
            Self::PartTooLarge { .. } => Some(
                "raise `--memory-budget`, or write the file again with smaller pages: `pyarrow.parquet.write_table(table, \
                 path, data_page_size=1 << 20, write_batch_size=64)`"
                    .to_owned(),
            ),
            Self::Decode { .. } => Some("the file is damaged or incomplete; copy or write it again".to_owned()),
            Self::Changed { .. } => Some("start again when no other process writes to the file".to_owned()),
            Self::Parquet(error) => error.hint(),
            // Texts of parquet have no other encoding.
            Self::Row(row) if row.is_row && matches!(row.fault, RowFault::NotUtf8(_)) => None,
            Self::Row(row) if row.is_row && matches!(row.fault, RowFault::WrongType(_, OBJECT)) => Some(format!(
                "name a member of the object instead; `inspect {}` lists them",
                quoted(&row.path.to_string_lossy())
            )),
            Self::Row(row) if !row.is_row && matches!(row.fault, RowFault::WrongType(_, NUMBERS)) => row.numbers_as_texts(),
            Self::Row(row) => row.fault.hint(),
            Self::Mixed { .. } => Some("convert them apart, or name the columns".to_owned()),
            Self::Duplicates { .. } => Some("raise `--memory-budget`, or use `--deduplicate exact`".to_owned()),
            Self::LateColumn { path, line, column, .. } => {
                let is_lines = path.extension().is_some_and(|extension| extension == "jsonl");
                let file = quoted(&path.display().to_string());
                let command = format!("(sed -n {line}p {file}; sed {line}d {file}) > ordered.jsonl");
                let how = if is_lines { format!(", such as by `{command}`") } else { String::new() };
                Some(format!(
                    "to use `{column}`, put a row with it first{how}; to leave it out, name the columns with `data.prompt_column` and \
                     `data.response_column`"
                ))
            }
            Self::Setting { key, .. } if key.ends_with("template") => {
                Some(format!("for example `data.{key}=\"{{subject}}\\n{{body}}\"`"))
            }
            Self::Setting { .. } => Some("for example `data.source_lang=en` and `data.target_lang=de`".to_owned()),
            Self::Question { .. } | Self::Io { .. } | Self::Write(_) | Self::Stopped => None,
        }
    }
}

/// Whether each row is one message of a tree, as OpenAssistant publishes them.
pub(crate) fn is_of_messages(columns: &[String]) -> bool {
    ["message_id", "parent_id", "text", "role"].iter().all(|name| columns.iter().any(|column| column == name))
}

/// Whether these are columns of answers of which one was chosen.
fn is_preference(columns: &[String]) -> bool {
    ["chosen", "rejected"].iter().all(|name| columns.iter().any(|column| column == name))
}

/// The template that a name of several columns stands for, such as `title,body` or `{title} {body}`.
fn joined(name: &str, columns: &[String]) -> Option<String> {
    if name.contains('{') {
        return Some(shortened(name));
    }
    let names: Vec<&str> = name.split([',', '+']).map(str::trim).collect();
    let all_exist = names.iter().all(|name| columns.iter().any(|column| column == name));
    let template = names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join("\\n");
    (names.len() > 1 && all_exist).then_some(template)
}

/// The first columns, and the number of the others.
pub fn listed(columns: &[String]) -> String {
    let shown = columns.iter().take(SHOWN_COLUMNS).map(|name| shortened(name)).collect::<Vec<_>>().join(", ");
    match columns.len().checked_sub(SHOWN_COLUMNS + 1) {
        Some(more) => format!("{shown} and {} more", more + 1),
        None => shown,
    }
}

/// A name from the file, short enough for a message.
pub(crate) fn shortened(name: &str) -> String {
    const MAX_CHARS: usize = 60;
    let printable: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_CHARS + 1).collect();
    match printable.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &printable[..end]),
        None => printable,
    }
}

/// A row that cannot be used, and its first line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// The file, as it was given.
    pub path: PathBuf,
    /// The line of the file on which the row begins, from 1; for parquet the row, from 0.
    pub line: u64,
    /// Whether `line` counts rows.
    pub is_row: bool,
    /// The problem.
    pub fault: RowFault,
}

/// What takes a list of numbers for what it is.
const LABELS_BY_NUMBER: &str = "numbers of labels are for `--set task.name=multi-label-classification`";

impl RowError {
    /// The ways out of a list of numbers in JSON: a task that takes them, and the command that makes texts of them.
    fn numbers_as_texts(&self) -> Option<String> {
        let RowFault::WrongType(column, _) = &self.fault else { return None };
        let path = column.split('.').map(|name| format!("[\"{name}\"]")).collect::<String>();
        let (change, file) = (quoted(&format!(".{path} |= map(tostring)")), quoted(&self.path.to_string_lossy()));
        Some(format!(
            "{LABELS_BY_NUMBER}; as texts, which a model can write: `jq -c {change} {file} > texts.jsonl`, better with their names"
        ))
    }
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, is_row, fault } = self;
        match is_row {
            true => write!(f, "{}: row {line}: {fault}", path.display()),
            false => write!(f, "{}:{line}: {fault}", path.display()),
        }
    }
}

/// Why a row cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowFault {
    /// A line or an element is not JSON.
    NotJson(String),
    /// The row is JSON, but not an object.
    NotAnObject(&'static str),
    /// The row's bytes are not UTF-8, or not in the encoding that was named. The file seems to have the other encoding.
    NotUtf8(Option<Encoding>),
    /// The row is longer than this many bytes.
    TooLong(usize),
    /// A line of a CSV has fewer or more fields than the header.
    Fields {
        /// Fields of the header.
        expected: usize,
        /// Fields of the row.
        got: usize,
        /// Whether quotes enclose one of them.
        has_quotes: bool,
    },
    /// A quote is not closed.
    UnclosedQuote,
    /// The value of this column has a type other than text.
    WrongType(String, &'static str),
    /// The messages of this column have a wrong form.
    Messages(String, String),
    /// The value of this column is no label.
    NoLabel(String),
    /// The value of this column is no number.
    NotANumber(String, String),
    /// The value of this column is no number, where two texts have a score.
    NoScore(String, String),
    /// A record of FASTA is no sequence, or its labels are not there.
    NoSequence(String),
    /// A list of one column has another length than that of another.
    UnequalLists(String, usize, String, usize),
    /// An element of the list of this column, by its place from 1, is null, empty or only white space.
    EmptyElement(String, usize),
    /// This column has no value, or null.
    Null(String),
    /// The value of this column is empty or only white space.
    Empty(String),
}

impl RowFault {
    /// Whether the row is broken, as opposed to a row without text in a column.
    pub fn is_malformed(&self) -> bool {
        !matches!(self, Self::Null(_) | Self::Empty(_))
    }

    /// Whether the fault is one of the column's type, which rows share as a rule.
    pub fn is_of_column(&self) -> bool {
        matches!(self, Self::WrongType(..))
    }

    /// Whether the row could be read with more memory.
    pub fn is_over_budget(&self) -> bool {
        matches!(self, Self::TooLong(limit) if *limit < crate::MAX_ROW_BYTES)
    }

    /// Advice for the `hint:` line under the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NotUtf8(Some(encoding)) => {
                let name = encoding.name();
                Some(format!("the file seems to be in {name}: read it with `--encoding {name}`"))
            }
            Self::NotUtf8(None) => Some(
                "name the encoding of the file with `--encoding`, for example `--encoding windows-1252`; `file FILE` may \
                 know it"
                    .to_owned(),
            ),
            _ if self.is_over_budget() => {
                Some("raise `--memory-budget`, or cut the row into shorter ones".to_owned())
            }
            Self::NotJson(reason) if reason.contains("single quote") => {
                Some("Python's `str(row)` is not JSON; write each row with `json.dumps(row)`".to_owned())
            }
            Self::Fields { has_quotes: false, .. } => Some(
                "a field with a comma, a quote or a line break stands in quotes, and a quote in it is written twice".to_owned(),
            ),
            Self::Fields { .. } | Self::UnclosedQuote => Some(
                "a field with a comma, a quote or a line break stands in quotes, and a quote in it is written twice. If \
                 quotes are ordinary characters: `--quoting none`"
                    .to_owned(),
            ),
            Self::WrongType(_, NUMBERS) => Some(LABELS_BY_NUMBER.to_owned()),
            Self::WrongType(_, LIST) => Some(
                "only a list of texts is read as a text; write the column again as text, or name another one".to_owned(),
            ),
            Self::NotANumber(..) => Some("0 stands for a text that is not relevant, 1 or more for one that is".to_owned()),
            Self::NoSequence(_) => Some(
                "expected a line such as `>P12345` before each sequence of letters; labels are in NAME.labels.fasta, behind the same names"
                    .to_owned(),
            ),
            Self::WrongType(_, OBJECT) | Self::NotAnObject(LIST) => Some(
                "expected an object a row; pandas writes them with `df.to_json(path, orient=\"records\", lines=True)`"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

impl fmt::Display for RowFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJson(reason) => write!(f, "not valid JSON: {reason}"),
            Self::NotAnObject(got) => write!(f, "expected a JSON object, got {got}"),
            Self::NotUtf8(_) => write!(f, "the row is not UTF-8"),
            Self::TooLong(crate::MAX_ROW_BYTES..) => {
                write!(f, "the row is longer than {} MiB", crate::MAX_ROW_BYTES >> 20)
            }
            Self::TooLong(limit) => {
                write!(f, "the row is longer than {} KiB, the most that fits the memory budget", limit >> 10)
            }
            Self::Fields { expected, got, .. } => write!(f, "expected {expected} fields as in the header, got {got}"),
            Self::UnclosedQuote => write!(f, "a quote that opens in this row is never closed"),
            Self::NoLabel(column) => {
                write!(f, "column `{}`: expected a label, which is true or false, or 1 or 0", shortened(column))
            }
            Self::NoSequence(problem) => write!(f, "{problem}"),
            Self::NotANumber(column, got) | Self::NoScore(column, got) => {
                write!(f, "column `{}`: expected a number, got `{}`", shortened(column), shortened(got))
            }
            Self::UnequalLists(column, got, of, expected) => {
                let [column, of] = [column, of].map(|name| shortened(name));
                write!(f, "column `{column}`: expected {expected} texts, one for each element of `{of}`, got {got}")
            }
            Self::EmptyElement(column, place) => write!(f, "column `{}`: element {place} is empty", shortened(column)),
            Self::WrongType(column, got) => write!(f, "column `{}`: expected text, got {got}", shortened(column)),
            Self::Messages(column, reason) => write!(f, "column `{}`: {reason}", shortened(column)),
            Self::Null(column) => write!(f, "column `{}` is null", shortened(column)),
            Self::Empty(column) => write!(f, "column `{}` is empty", shortened(column)),
        }
    }
}
