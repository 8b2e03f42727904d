//! [`Kind`]: the format of a file, from its content, or from its name if the content is ambiguous.

use std::path::Path;

use crate::MAX_ROW_BYTES;
use crate::classes::Classes;
use crate::delimited::Records;
use crate::encoding::Encoding;
use crate::error::{Error, RowError, RowFault};
use crate::fasta::FastaRows;
use crate::fasta_files;
use crate::input::{Compression, Input, guess_encoding};
use crate::json::{self, JsonRows, Layout};
use crate::options::{Quoting, ReadOptions};

/// The storage format of a file's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Apache Parquet.
    Parquet,
    /// JSON, in one of its layouts.
    Json(Layout),
    /// Fields between delimiters, with a header.
    Delimited(u8),
    /// Sequences behind their names.
    Fasta,
}

/// A file's detected format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The storage format of its rows.
    pub form: Form,
    /// The compression of the file.
    pub compression: Compression,
    /// The file's column names. For JSON: the keys of the first rows. Members of objects have dotted names.
    pub columns: Vec<String>,
    /// The names of classes that numbers stand for.
    pub classes: Classes,
    /// The file's rows, if it says so.
    pub rows: Option<u64>,
    /// How the file is read.
    pub options: ReadOptions,
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
            Self::Fasta => "FASTA",
        }
    }
}

impl Kind {
    /// Detects the kind of a file from its beginning.
    ///
    /// # Errors
    /// The file cannot be read, or has a form that this crate does not read.
    pub fn detect(path: &Path, options: &ReadOptions) -> Result<Self, Error> {
        // Only text has an encoding.
        let mut input = Input::open(path, &ReadOptions::default(), false)?;
        let compression = input.compression();
        let mut beginning = beginning(&mut input)?;
        if options.encoding.is_some() && !is_parquet(&beginning) {
            beginning = self::beginning(&mut Input::open(path, options, false)?)?;
        }
        let form = form(path, &beginning)?;
        let (mut classes, mut rows) = (Classes::default(), None);
        let columns = match form {
            Form::Parquet if compression == Compression::None => {
                let described = parquet_dataset::described(path)?;
                classes = described.features.as_deref().map(Classes::of_features).unwrap_or_default();
                rows = Some(described.rows);
                parquet_columns(&described.columns)
            }
            Form::Parquet => Vec::new(),
            Form::Json(layout) => keys(path, layout, options)?,
            Form::Fasta => FastaRows::columns(path, options)?,
            Form::Delimited(delimiter) => {
                Records::new(Input::open(path, options, false)?, delimiter, options.quoting).header()?
            }
        };
        Ok(Self { form, compression, columns, classes, rows, options: *options })
    }

    /// The form and the dialect of the file, such as "CSV between `;` in windows-1252".
    pub fn in_words(&self) -> String {
        let mut words = self.form.name().to_owned();
        if let Form::Delimited(delimiter) = self.form {
            words += match delimiter {
                b';' => " between `;`",
                b'|' => " between `|`",
                _ => "",
            };
            words += match self.options.quoting {
                Quoting::Auto => "",
                Quoting::Quoted => " with quotes",
                Quoting::Plain => " without quotes",
            };
        }
        let encoding = self.options.encoding.filter(|encoding| self.form != Form::Parquet && !encoding.is_utf8());
        words + &encoding.map_or_else(String::new, |encoding| format!(" in {}", encoding.name()))
    }

    /// The encoding of the file's texts; `None` for parquet.
    pub fn encoding(&self) -> Option<String> {
        let is_text = self.form != Form::Parquet;
        is_text.then(|| self.options.encoding.map_or_else(|| "utf-8".to_owned(), Encoding::name))
    }

    /// The text between two fields, and whether quotes enclose fields, if the file has fields.
    pub fn dialect(&self) -> Option<(char, bool)> {
        let Form::Delimited(delimiter) = self.form else { return None };
        Some((char::from(delimiter), self.options.quoting.is_on(delimiter)))
    }

    /// The most bytes that a row of the file can have: the file's, unless it is compressed or parquet, and at most [`MAX_ROW_BYTES`].
    pub fn longest_possible_row(&self, path: &Path) -> u64 {
        let is_text = self.form != Form::Parquet && self.compression == Compression::None;
        // A letter of two bytes in another encoding has at most three in UTF-8, and one of a single byte two or three.
        let growth = if self.options.encoding.is_some() { 3 } else { 1 };
        let bytes = if is_text { growth * file_bytes(path) } else { u64::MAX };
        bytes.min(MAX_ROW_BYTES as u64)
    }

    /// Whether the file is parquet that can be read in place, row by row, with these columns.
    pub fn is_in_place(&self, path: &Path, columns: &[String]) -> bool {
        let is_plain = self.form == Form::Parquet && self.compression == Compression::None;
        is_plain && is_in_place(path, columns)
    }
}

/// Whether a file is parquet whose rows can be read in place: it has these columns, each a string a row. A file that the disk does not
/// give counts as one, so its reader reports the disk's error, and rows are not read in another way without a word.
pub fn is_in_place(path: &Path, columns: &[String]) -> bool {
    !parquet_dataset::RowCursor::open(path, columns, None)
        .is_err_and(|error| !matches!(error, parquet_dataset::Error::Io { .. }))
}

fn is_parquet(beginning: &[u8]) -> bool {
    beginning.starts_with(b"PAR1") || beginning.starts_with(b"PARE")
}

/// Names of groups between a list and its elements.
const WRAPPERS: [&str; 4] = ["list", "array", "bag", "key_value"];

/// The columns of a parquet file: the top level, and the members of structs by their dotted names. The elements of a list
/// are not columns.
fn parquet_columns(leaves: &[parquet_dataset::LeafColumn]) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    let mut known = std::collections::HashSet::new();
    for leaf in leaves {
        let mut end = 0;
        for part in leaf.path.split('.') {
            if leaf.is_repeated && end > 0 && WRAPPERS.contains(&part) {
                break;
            }
            end += part.len() + usize::from(end > 0);
            let name = &leaf.path[..end];
            if columns.len() < MAX_COLUMNS && known.insert(name.to_owned()) {
                columns.push(name.to_owned());
            }
        }
    }
    columns
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

/// The length of a file.
pub(crate) fn file_bytes(path: &Path) -> u64 {
    regular_file::metadata(path).map_or(0, |file| file.len())
}

/// Other formats, by their first bytes, with the hint for the user.
const OTHERS: [(&[u8], &str, &str); 12] = [
    (b"PK\x03\x04", "a zip archive or a spreadsheet", "unpack the archive, or save the sheet as CSV in UTF-8"),
    (b"BZh", "compressed with bzip2", "unpack it: `bunzip2 FILE`"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it: `unxz FILE`"),
    (b"ARROW1", "an Arrow file", "write it as parquet: `pyarrow.parquet.write_table(table, \"rows.parquet\")`"),
    (b"SQLite format 3", "an SQLite database", "write the rows as CSV: `sqlite3 -header -csv FILE 'select ..'`"),
    (b"\xff\xfe\0\0", "text in UTF-32", "write it in UTF-8: `iconv -f UTF-32 -t UTF-8 FILE > utf8.csv`"),
    (b"\0\0\xfe\xff", "text in UTF-32", "write it in UTF-8: `iconv -f UTF-32 -t UTF-8 FILE > utf8.csv`"),
    (b"\xff\xfe", "text in UTF-16", "read it with `--encoding utf-16le`"),
    (b"\xfe\xff", "text in UTF-16", "read it with `--encoding utf-16be`"),
    (b"\xd0\xcf\x11\xe0", "a spreadsheet of an old Excel", "save the sheet as CSV in UTF-8"),
    (b"\x93NUMPY", "an array of NumPy", "write the rows as JSONL: one `json.dumps(row)` a line"),
    (b"\x80\x04", "a Python pickle", "write the rows as JSONL: one `json.dumps(row)` a line"),
];

fn form(path: &Path, beginning: &[u8]) -> Result<Form, Error> {
    let refused = |what: String, hint| Err(Error::Format { path: path.to_owned(), what, hint });
    if is_parquet(beginning) {
        return Ok(Form::Parquet);
    }
    if beginning.starts_with(b"version https://git-lfs.github.com/spec/") {
        return refused(
            "this is a pointer of Git LFS, and the rows are elsewhere".to_owned(),
            "fetch the file itself: `git lfs pull`, or `hf download REPOSITORY FILE --repo-type dataset`",
        );
    }
    if let Some((_, what, hint)) = OTHERS.iter().find(|(magic, ..)| beginning.starts_with(magic)) {
        return refused(format!("this is {what}"), hint);
    }
    if let Some(encoding) = utf16(beginning) {
        return refused(
            format!("this is text in {encoding} without a byte order mark"),
            match encoding {
                "UTF-16LE" => "read it with `--encoding utf-16le`",
                _ => "read it with `--encoding utf-16be`",
            },
        );
    }
    if beginning.get(257..262) == Some(b"ustar") {
        return refused("this is a tar archive".to_owned(), "unpack it: `tar -xf FILE`, and name the files in it");
    }
    let extension = extension(path).unwrap_or_default();
    let text = beginning.trim_ascii_start();
    if text.is_empty() {
        return refused("the file is empty".to_owned(), "expected at least one row");
    }
    if is_html(text) {
        return refused(
            "this is a page of HTML".to_owned(),
            "download the file itself, not the page that shows it: at Hugging Face `/resolve/`, at GitHub `/raw/`",
        );
    }
    if extension == "parquet" {
        return refused(
            format!("not a parquet file: it begins with {:?}", String::from_utf8_lossy(&text[..text.len().min(8)])),
            "the file is damaged or incomplete, or has the wrong name",
        );
    }
    if is_by_columns(text) {
        return refused(
            "this is one object with a list for each column".to_owned(),
            "write an object a row; pandas does with `df.to_json(path, orient=\"records\", lines=True)`",
        );
    }
    if fasta_files::is_fasta(&extension) {
        return Ok(Form::Fasta);
    }
    let first_line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_object =
        || first_line.starts_with(b"{") && serde_json::from_slice::<serde::de::IgnoredAny>(first_line).is_ok();
    match (extension.as_str(), text.first()) {
        ("csv" | "tsv" | "tab", _) if is_object() => return Ok(Form::Json(Layout::Lines)),
        ("tsv" | "tab", _) if first_line.contains(&b'\t') || !first_line.iter().any(|byte| b",;|".contains(byte)) => {
            return Ok(Form::Delimited(b'\t'));
        }
        ("csv" | "tsv" | "tab", _) => return Ok(Form::Delimited(delimiter(text))),
        ("json", Some(b'[')) => return Ok(Form::Json(Layout::Array)),
        (_, Some(b'[')) => return Ok(Form::Json(array_or_lines(text))),
        (_, Some(b'{')) => return Ok(Form::Json(object(text))),
        ("jsonl" | "ndjson" | "json", _) => return Ok(Form::Json(Layout::Lines)),
        _ => {}
    }
    let is_text = std::str::from_utf8(first_line).is_ok_and(|line| !line.contains('\0'));
    if is_text && [b'\t', b','].iter().any(|delimiter| first_line.contains(delimiter)) {
        return Ok(Form::Delimited(delimiter(text)));
    }
    refused(
        "no rows were recognised".to_owned(),
        "name the file by its form, such as rows.jsonl or rows.csv; lines of plain text become rows by \
         `jq -Rc 'select(length > 0) | {text: .}' FILE > rows.jsonl`",
    )
}

fn is_html(text: &[u8]) -> bool {
    let begins = |tag: &str| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag.as_bytes()));
    begins("<!doctype html") || begins("<html") || begins("<head")
}

/// Whether a short file is one object of lists that are equally long, such as pandas writes with `orient="list"`.
fn is_by_columns(text: &[u8]) -> bool {
    if text.first() != Some(&b'{') || text.len() >= PROBE_BYTES {
        return false;
    }
    let Ok(object) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(text) else { return false };
    let lengths: Option<Vec<usize>> = object
        .values()
        .map(|value| value.as_array().filter(|list| !list.iter().any(|e| e.is_object() || e.is_array())).map(Vec::len))
        .collect();
    lengths.is_some_and(|lengths| lengths.len() > 1 && lengths[0] > 1 && lengths.iter().all(|len| *len == lengths[0]))
}

/// The UTF-16 of a text whose first letters are ASCII: every other byte is zero.
fn utf16(text: &[u8]) -> Option<&'static str> {
    let (pairs, _) = text[..text.len().min(64)].as_chunks::<2>();
    let all = |is_pair: fn(&[u8; 2]) -> bool| pairs.len() > 1 && pairs.iter().all(is_pair);
    let little = all(|pair| pair[0] != 0 && pair[1] == 0).then_some("UTF-16LE");
    little.or_else(|| all(|pair| pair[0] == 0 && pair[1] != 0).then_some("UTF-16BE"))
}

/// The delimiter that Excel's first line `sep=;` names, or else the most frequent of the first line: a comma, the semicolon or tab of some
/// spreadsheets, or the bar of some databases.
fn delimiter(text: &[u8]) -> u8 {
    if let Some([named @ (b',' | b';' | b'\t' | b'|'), b'\r' | b'\n', ..]) = text.strip_prefix(b"sep=") {
        return *named;
    }
    let mut counts = [(b',', 0_usize), (b';', 0), (b'\t', 0), (b'|', 0)];
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

/// Whether an object's first list holds objects, under one of these keys.
fn wraps_rows(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    json::ROW_LISTS.iter().any(|name| {
        let Some((before, after)) = text.split_once(&format!("\"{name}\"")) else { return false };
        let list = after.trim_start().strip_prefix(':').and_then(|value| value.trim_start().strip_prefix('['));
        !before.contains('[') && list.is_some_and(|list| list.trim_start().starts_with('{'))
    })
}

/// The keys of the first rows, in the order of their first occurrence.
fn keys(path: &Path, layout: Layout, options: &ReadOptions) -> Result<Vec<String>, Error> {
    let mut rows = JsonRows::new(Input::open(path, options, false)?, layout, &[]);
    let (mut keys, mut bytes, mut line): (Vec<String>, _, _) = (Vec::new(), 0, 0);
    let mut known = std::collections::HashSet::new();
    let mut first_fault = None;
    for _ in 0..PROBE_ROWS {
        let Some(names) = rows.next_names(&mut line, &mut bytes)? else { break };
        match names {
            Err(fault) => _ = first_fault.get_or_insert((line, fault)),
            Ok(names) => {
                for name in names {
                    if keys.len() < MAX_COLUMNS && known.insert(name.clone()) {
                        keys.push(name);
                    }
                }
            }
        }
        if bytes > PROBE_ROW_BYTES {
            break;
        }
    }
    match first_fault {
        // Without one row that can be read, the reason is better than "no columns".
        Some((line, fault)) if keys.is_empty() => Err(Error::Row(row_error(path, line, fault, options))),
        _ => Ok(keys),
    }
}

/// A row's fault with its place, and with the encoding that the file seems to have.
pub(crate) fn row_error(path: &Path, line: u64, fault: RowFault, options: &ReadOptions) -> RowError {
    let fault = match fault {
        RowFault::NotUtf8(None) if options.encoding.is_none() => RowFault::NotUtf8(guess_encoding(path, options)),
        fault => fault,
    };
    RowError { path: path.to_owned(), line, is_row: false, fault }
}
