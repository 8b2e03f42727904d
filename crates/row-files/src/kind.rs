//! [`Kind`]: the format of a file, from its content, or from its name if the content is ambiguous.

use std::path::Path;

use crate::chat_lists::ChatLists;
use crate::delimited::Records;
use crate::error::{Error, RowFault};
use crate::input::{Compression, Input};
use crate::json::{self, JsonRows, Layout};
use crate::row::Row;

/// The storage format of a file's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Apache Parquet.
    Parquet,
    /// JSON, in one of its layouts.
    Json(Layout),
    /// Fields between delimiters, with a header.
    Delimited(u8),
}

/// A file's detected format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The storage format of its rows.
    pub form: Form,
    /// The compression of the file.
    pub compression: Compression,
    /// The file's column names. For JSON: the keys of the first rows. For parquet: columns of text and of messages.
    pub columns: Vec<String>,
    /// For parquet: the column whose messages are lists.
    pub chat: Option<ChatLists>,
}

/// Bytes of text from which the form is detected.
const PROBE_BYTES: usize = 64 << 10;
/// Rows of JSON whose keys count as columns.
const PROBE_ROWS: usize = 1000;
/// The most bytes of those rows.
const PROBE_ROW_BYTES: u64 = 4 << 20;
/// The most columns that are kept.
const MAX_COLUMNS: usize = 100_000;

/// Extensions, before `.gz` or `.zst`, of the file names that are taken from a directory.
pub const FILE_EXTENSIONS: [&str; 7] = ["parquet", "jsonl", "ndjson", "json", "csv", "tsv", "tab"];

/// The last part of a file's name, without `.gz` or `.zst`, in lower case.
pub fn extension(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let name = [".gz", ".zst", ".gzip", ".zstd"].iter().find_map(|packed| name.strip_suffix(packed)).unwrap_or(&name);
    name.rsplit_once('.').map(|(_, extension)| extension.to_owned())
}

impl Form {
    /// The form's name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parquet => "parquet",
            Self::Json(Layout::Lines) => "JSONL",
            Self::Json(Layout::Array) => "a JSON array",
            Self::Json(Layout::Objects) => "JSON objects",
            Self::Json(Layout::Wrapped) => "a JSON array in an object",
            Self::Delimited(b'\t') => "TSV",
            Self::Delimited(_) => "CSV",
        }
    }
}

impl Kind {
    /// Detects the kind of a file from its beginning.
    ///
    /// # Errors
    /// The file cannot be read, or has a form that this crate does not read.
    pub fn of(path: &Path) -> Result<Self, Error> {
        let mut input = Input::open(path, false)?;
        let compression = input.compression();
        let beginning = beginning(&mut input)?;
        drop(input);
        let form = form(path, &beginning)?;
        let mut chat = None;
        let columns = match form {
            Form::Parquet if compression == Compression::None => {
                let mut columns = parquet_dataset::string_columns(path)?;
                chat = ChatLists::among(&parquet_dataset::list_columns(path)?);
                columns.extend(chat.iter().map(|chat| chat.column.clone()));
                columns
            }
            Form::Parquet => Vec::new(),
            Form::Json(layout) => keys(path, layout)?,
            Form::Delimited(delimiter) => Records::new(Input::open(path, false)?, delimiter).header()?,
        };
        Ok(Self { form, compression, columns, chat })
    }
}

/// The beginning of a file's text, up to [`PROBE_BYTES`].
fn beginning(input: &mut Input) -> Result<Vec<u8>, Error> {
    let mut beginning = Vec::with_capacity(PROBE_BYTES);
    while beginning.len() < PROBE_BYTES {
        let buffer = input.buffer()?;
        if buffer.is_empty() {
            break;
        }
        let used = buffer.len().min(PROBE_BYTES - beginning.len());
        beginning.extend_from_slice(&buffer[..used]);
        input.consume(used);
    }
    Ok(beginning)
}

/// Other formats, by their first bytes, with the hint for the user.
const OTHERS: [(&[u8], &str, &str); 8] = [
    (b"PK\x03\x04", "a zip archive or a spreadsheet", "unpack the archive, or save the sheet as CSV in UTF-8"),
    (b"BZh", "compressed with bzip2", "unpack it: `bunzip2 FILE`"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it: `unxz FILE`"),
    (b"ARROW1", "an Arrow file", "write it as parquet: `pyarrow.parquet.write_table(table, \"rows.parquet\")`"),
    (b"SQLite format 3", "an SQLite database", "write the rows as CSV: `sqlite3 -header -csv FILE 'select ..'`"),
    (b"\xff\xfe", "text in UTF-16", "save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > utf8.csv`"),
    (b"\xfe\xff", "text in UTF-16", "save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > utf8.csv`"),
    (b"\x80\x04", "a Python pickle", "write the rows as JSONL: one `json.dumps(row)` a line"),
];

fn form(path: &Path, beginning: &[u8]) -> Result<Form, Error> {
    let refused = |what: String, hint| Err(Error::Format { path: path.to_owned(), what, hint });
    if beginning.starts_with(b"PAR1") {
        return Ok(Form::Parquet);
    }
    if let Some((_, what, hint)) = OTHERS.iter().find(|(magic, ..)| beginning.starts_with(magic)) {
        return refused(format!("this is {what}"), hint);
    }
    if let Some(encoding) = utf16(beginning) {
        return refused(
            format!("this is text in {encoding} without a byte order mark"),
            "save it as UTF-8: `iconv -f UTF-16LE -t UTF-8 FILE > utf8.csv`, or `-f UTF-16BE`",
        );
    }
    let extension = extension(path).unwrap_or_default();
    let text = beginning.trim_ascii_start();
    if extension == "parquet" && !text.is_empty() {
        return refused(
            format!("not a parquet file: it begins with {:?}", String::from_utf8_lossy(&text[..text.len().min(8)])),
            "the file is damaged or incomplete, or has the wrong name",
        );
    }
    match (extension.as_str(), text.first()) {
        ("csv", _) => return Ok(Form::Delimited(delimiter(text))),
        ("tsv" | "tab", _) => return Ok(Form::Delimited(b'\t')),
        ("json", Some(b'[')) => return Ok(Form::Json(Layout::Array)),
        (_, Some(b'[')) => return Ok(Form::Json(array_or_lines(text))),
        (_, Some(b'{')) => return Ok(Form::Json(object(text))),
        ("jsonl" | "ndjson" | "json", _) => return Ok(Form::Json(Layout::Lines)),
        _ => {}
    }
    let first_line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_text = std::str::from_utf8(first_line).is_ok_and(|line| !line.contains('\0'));
    if is_text && [b'\t', b','].iter().any(|delimiter| first_line.contains(delimiter)) {
        return Ok(Form::Delimited(delimiter(text)));
    }
    let what = if text.is_empty() { "the file is empty" } else { "no rows were recognised" };
    refused(what.to_owned(), "name the file by its form, such as rows.jsonl or rows.csv")
}

/// The UTF-16 of a text whose first letters are ASCII: every other byte is zero.
fn utf16(text: &[u8]) -> Option<&'static str> {
    let (pairs, _) = text[..text.len().min(64)].as_chunks::<2>();
    let all = |is_pair: fn(&[u8; 2]) -> bool| pairs.len() > 1 && pairs.iter().all(is_pair);
    let little = all(|pair| pair[0] != 0 && pair[1] == 0).then_some("UTF-16LE");
    little.or_else(|| all(|pair| pair[0] == 0 && pair[1] != 0).then_some("UTF-16BE"))
}

/// The most frequent delimiter of the first line: a comma, or the semicolon or tab of some spreadsheets.
fn delimiter(text: &[u8]) -> u8 {
    let mut counts = [(b',', 0_usize), (b';', 0), (b'\t', 0)];
    let mut is_quoted = false;
    for &byte in text.iter().take_while(|byte| **byte != b'\n') {
        is_quoted ^= byte == b'"';
        if let Some(found) = counts.iter_mut().find(|(delimiter, _)| !is_quoted && *delimiter == byte) {
            found.1 += 1;
        }
    }
    let most = counts.iter().map(|(_, count)| *count).max().unwrap_or(0);
    counts.iter().find(|(_, count)| *count == most).map_or(b',', |(delimiter, _)| *delimiter)
}

/// Distinguishes arrays on separate lines from one array.
fn array_or_lines(text: &[u8]) -> Layout {
    let first_line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let has_more = text.len() > first_line.len() + 1;
    if has_more && serde_json::from_slice::<serde::de::IgnoredAny>(first_line).is_ok() {
        Layout::Lines
    } else {
        Layout::Array
    }
}

/// A file that begins with an object: one row per line, objects over several lines, or an object around a list of rows.
fn object(text: &[u8]) -> Layout {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    let first = lines.next().unwrap_or_default();
    let is_whole = first.ends_with(b"\n") || text.len() < PROBE_BYTES;
    let next_line = lines.next().map(<[u8]>::trim_ascii_start);
    if (next_line.is_none() || !is_whole || json::names(first).is_none()) && wraps_rows(text) {
        return Layout::Wrapped;
    }
    // A file with a single row could also be objects over several lines; both layouts read it.
    if !is_whole || json::names(first).is_some() {
        return Layout::Lines;
    }
    // A broken line before a line that is a row is a broken row, not another layout.
    match next_line.is_some_and(|line| line.starts_with(b"{") && json::names(line.trim_ascii()).is_some()) {
        true => Layout::Lines,
        false => Layout::Objects,
    }
}

/// Keys of an object that may hold a file's rows.
const ROW_LISTS: [&str; 8] = ["data", "rows", "train", "examples", "samples", "records", "items", "instances"];

/// Whether an object's first list holds objects, under one of these keys.
fn wraps_rows(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    ROW_LISTS.iter().any(|name| {
        let Some((before, after)) = text.split_once(&format!("\"{name}\"")) else { return false };
        let list = after.trim_start().strip_prefix(':').and_then(|value| value.trim_start().strip_prefix('['));
        !before.contains('[') && list.is_some_and(|list| list.trim_start().starts_with('{'))
    })
}

/// The keys of the first rows, in the order of their first occurrence.
fn keys(path: &Path, layout: Layout) -> Result<Vec<String>, Error> {
    let mut rows = JsonRows::new(Input::open(path, false)?, layout, &[]);
    let (mut keys, mut row, mut bytes): (Vec<String>, _, u64) = (Vec::new(), Row::default(), 0);
    let mut known = std::collections::HashSet::new();
    for _ in 0..PROBE_ROWS {
        match rows.next(&mut row)? {
            Some(Err(RowFault::TooLong)) => continue,
            Some(_) if bytes <= PROBE_ROW_BYTES => {}
            _ => break,
        }
        bytes += rows.text().len() as u64;
        for (name, _) in json::names(rows.text()).unwrap_or_default() {
            if keys.len() < MAX_COLUMNS && known.insert(name.clone()) {
                keys.push(name);
            }
        }
    }
    Ok(keys)
}
