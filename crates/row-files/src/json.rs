//! Rows of JSON: one object per line (JSONL), the elements of an array, or objects one after the other.
//!
//! One row at a time is in memory, and is checked there. Values of unwanted columns are skipped, however deep they nest. A
//! dotted name is a member of an object: `translation.en`. If a key occurs twice, its last value counts, as in Python's
//! `json`. Numbers keep their digits.

use std::collections::HashSet;

use crate::chat;
use crate::column::Column;
use crate::error::{Error, LIST, NUMBERS, OBJECT, RowFault};
use crate::input::{Input, append};
use crate::json_text::{self, Kind};
use crate::row::{Cell, LIST_LEVELS, Row, one_text};

/// Keys of an object that may hold a file's rows.
#[rustfmt::skip]
pub(crate) const ROW_LISTS: [&str; 14] = [
    "data", "rows", "train", "training", "examples", "samples", "records", "items", "instances", "test", "validation", "valid", "val", "dev",
];

/// A longer row's buffer is released before the next row.
const KEPT_ROW_BYTES: usize = 1 << 20;

/// The arrangement of rows in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One row per line.
    Lines,
    /// Elements of one array.
    Array,
    /// Objects one after the other, over any number of lines.
    Objects,
    /// Elements of the first array in an object, such as `{"data": [..]}`.
    Wrapped,
}

/// Rows of a JSON file.
pub(crate) struct JsonRows {
    input: Input,
    layout: Layout,
    wanted: Vec<Column>,
    /// `None`: they are not wanted.
    late: Option<LateColumns>,
    buffer: Vec<u8>,
    /// The next line to read, from 1.
    line: u64,
    state: ArrayState,
}

/// Members of rows that the file's columns lack: those were found in its first rows.
#[derive(Debug)]
struct LateColumns {
    known: HashSet<String>,
    /// How many more are noticed.
    left: usize,
    /// New since they were last taken.
    new: Vec<String>,
}

/// The most late columns of a file, and the longest name of one: no more are kept.
const MAX_LATE: usize = 256;
const MAX_LATE_BYTES: usize = 256;

impl LateColumns {
    fn see(&mut self, name: &str) {
        if self.left > 0 && name.len() <= MAX_LATE_BYTES && !self.known.contains(name) {
            self.left -= 1;
            self.known.insert(name.to_owned());
            self.new.push(name.to_owned());
        }
    }
}

/// The state of reading an array.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ArrayState {
    /// Before the opening bracket.
    Start,
    /// After the opening bracket.
    First,
    /// After an element.
    Rest,
    /// After a comma.
    Next,
    /// After the closing bracket.
    End,
}

impl JsonRows {
    /// Rows of a file.
    pub fn new(input: Input, layout: Layout, wanted: &[Column]) -> Self {
        let state = ArrayState::Start;
        Self { input, layout, wanted: wanted.to_vec(), late: None, buffer: Vec::new(), line: 1, state }
    }

    /// From here on columns beside these are noticed, which were found in the file's first rows.
    pub fn notice_columns_beside(&mut self, columns: &[String]) {
        self.late = Some(LateColumns { known: columns.iter().cloned().collect(), left: MAX_LATE, new: Vec::new() });
    }

    /// The columns that the rows since the last call were the first to have.
    pub fn take_late_columns(&mut self) -> Vec<String> {
        self.late.as_mut().map(|late| std::mem::take(&mut late.new)).unwrap_or_default()
    }

    pub fn input(&self) -> &Input {
        &self.input
    }

    pub fn into_input(self) -> Input {
        self.input
    }

    /// The names of the next row's columns; `None` at the end. Adds the row's length to `bytes`.
    pub fn next_names(
        &mut self,
        line: &mut u64,
        bytes: &mut u64,
    ) -> Result<Option<Result<Vec<String>, RowFault>>, Error> {
        let Some(is_whole) = self.next_text(line)? else { return Ok(None) };
        let names = match is_whole {
            true => names_or_fault(&self.buffer),
            false => Err(RowFault::TooLong(self.input.most_row_bytes())),
        };
        *bytes += self.buffer.len() as u64;
        self.release();
        Ok(Some(names))
    }

    /// Reads the next row; `None` at the end.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        // The memory of an earlier row is not needed beside this one.
        row.cells.clear();
        let Some(is_whole) = self.next_text(&mut row.line)? else { return Ok(None) };
        let read = match is_whole {
            true => match &mut self.late {
                Some(late) => parse_noting(&self.buffer, &self.wanted, row, &mut |name| late.see(name)),
                None => parse(&self.buffer, &self.wanted, row),
            },
            false => Err(RowFault::TooLong(self.input.most_row_bytes())),
        };
        self.release();
        Ok(Some(read))
    }

    /// Releases the memory of a long row, except to name it.
    fn release(&mut self) {
        if self.buffer.capacity() > KEPT_ROW_BYTES {
            self.buffer = Vec::new();
        }
    }

    /// Copies the text of the next row into the buffer; false if it is too long.
    fn next_text(&mut self, first_line: &mut u64) -> Result<Option<bool>, Error> {
        self.buffer.clear();
        if self.layout != Layout::Lines {
            return self.next_element(first_line);
        }
        loop {
            *first_line = self.line;
            let Some(is_whole) = self.input.read_line(&mut self.buffer)? else { return Ok(None) };
            self.line += 1;
            if !is_whole || !self.buffer.trim_ascii().is_empty() {
                return Ok(Some(is_whole));
            }
            self.buffer.clear();
        }
    }

    fn broken<T>(&self, reason: impl Into<String>) -> Result<T, Error> {
        Err(Error::Broken { path: self.input.path().to_owned(), line: self.line, reason: reason.into() })
    }

    /// Returns the next byte that is not white space, without consuming it.
    fn peek(&mut self) -> Result<Option<u8>, Error> {
        loop {
            let buffer = self.input.buffer()?;
            if buffer.is_empty() {
                return Ok(None);
            }
            let blank = buffer.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(buffer.len());
            let (found, lines) = (buffer.get(blank).copied(), memchr::memchr_iter(b'\n', &buffer[..blank]).count());
            self.line += lines as u64;
            self.input.consume(blank);
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Finds the next element and copies its text.
    fn next_element(&mut self, first_line: &mut u64) -> Result<Option<bool>, Error> {
        let is_array = self.layout != Layout::Objects;
        if self.layout == Layout::Wrapped && self.state == ArrayState::Start {
            self.skip_to_array()?;
        }
        loop {
            let next = self.peek()?;
            *first_line = self.line;
            let next = match (self.state, next) {
                (ArrayState::Start, Some(b'[')) if is_array => ArrayState::First,
                (ArrayState::Rest, Some(b',')) if is_array => ArrayState::Next,
                (ArrayState::First | ArrayState::Rest, Some(b']')) if is_array => ArrayState::End,
                (ArrayState::End, None) => return Ok(None),
                (ArrayState::End, Some(_)) if self.layout == Layout::Wrapped => {
                    self.refuse_more_lists()?;
                    return Ok(None);
                }
                (_, None) if !is_array => return Ok(None),
                (_, None) => return self.broken("the file ends before its JSON array does"),
                (ArrayState::End, Some(_)) => {
                    return self.broken("expected nothing after the JSON array, got more text");
                }
                (ArrayState::Rest, Some(_)) if is_array => {
                    return self.broken("expected `,` or `]` after an element of the JSON array");
                }
                (_, Some(b',' | b']' | b'}')) => return self.broken("expected a JSON object"),
                (_, Some(_)) => {
                    let is_whole = self.copy_element()?;
                    self.state = ArrayState::Rest;
                    return Ok(Some(is_whole));
                }
            };
            self.state = next;
            self.input.consume(1);
        }
    }

    /// Skips text up to the first bracket outside of strings.
    fn skip_to_array(&mut self) -> Result<(), Error> {
        let (mut is_text, mut is_escaped) = (false, false);
        loop {
            let buffer = self.input.buffer()?;
            if buffer.is_empty() {
                return self.broken("the file ends before a list of rows begins");
            }
            let mut found = None;
            for (at, &byte) in buffer.iter().enumerate() {
                match byte {
                    _ if is_escaped => is_escaped = false,
                    b'\\' => is_escaped = is_text,
                    b'"' => is_text = !is_text,
                    b'[' if !is_text => {
                        found = Some(at);
                        break;
                    }
                    _ => {}
                }
            }
            let used = found.unwrap_or(buffer.len());
            self.line += memchr::memchr_iter(b'\n', &buffer[..used]).count() as u64;
            self.input.consume(used);
            if found.is_some() {
                return Ok(());
            }
        }
    }

    /// Reads the object to its end, behind its list of rows. A second list of rows would be left out without a word.
    fn refuse_more_lists(&mut self) -> Result<(), Error> {
        while self.peek()? == Some(b',') {
            self.input.consume(1);
            self.buffer.clear();
            if self.peek()? != Some(b'"') {
                break;
            }
            self.copy_element()?;
            let name: Option<String> = serde_json::from_slice(&self.buffer).ok();
            let Some(name) = name.filter(|_| matches!(self.peek(), Ok(Some(b':')))) else { break };
            self.input.consume(1);
            if self.peek()? == Some(b'[') && ROW_LISTS.contains(&&*name) {
                return Err(Error::Lists { path: self.input.path().to_owned(), line: self.line, list: name });
            }
            self.buffer.clear();
            if self.peek()?.is_some() {
                self.copy_element()?;
            }
        }
        self.buffer.clear();
        Ok(())
    }

    /// Copies one JSON value, which begins here, up to the longest row; false if the value is longer.
    fn copy_element(&mut self) -> Result<bool, Error> {
        let most = self.input.most_row_bytes();
        let (mut depth, mut is_text, mut is_escaped, mut is_whole) = (0_u64, false, false, true);
        loop {
            let buffer = self.input.buffer()?;
            if buffer.is_empty() {
                return match depth == 0 && !is_text {
                    true => Ok(is_whole),
                    false => self.broken("the file ends in the middle of a JSON object"),
                };
            }
            let (mut used, mut is_over) = (buffer.len(), false);
            for (at, &byte) in buffer.iter().enumerate() {
                if is_text {
                    match byte {
                        _ if is_escaped => is_escaped = false,
                        b'\\' => is_escaped = true,
                        b'"' => is_text = false,
                        _ => continue,
                    }
                    is_over = !is_text && depth == 0;
                } else {
                    match byte {
                        b'"' => is_text = true,
                        b'{' | b'[' => depth += 1,
                        // A number or a word ends at any of these bytes.
                        b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t' if depth == 0 => {
                            (used, is_over) = (at, true);
                            break;
                        }
                        b'}' | b']' => {
                            depth -= 1;
                            is_over = depth == 0;
                        }
                        _ => {}
                    }
                }
                if is_over {
                    used = at + 1;
                    break;
                }
            }
            let part = &buffer[..used];
            self.line += memchr::memchr_iter(b'\n', part).count() as u64;
            if self.buffer.len() + used <= most {
                append(&mut self.buffer, part);
            } else {
                is_whole = false;
            }
            self.input.consume(used);
            if is_over {
                return Ok(is_whole);
            }
        }
    }
}

/// Parses one row from its text.
pub(crate) fn parse(text: &[u8], wanted: &[Column], row: &mut Row) -> Result<(), RowFault> {
    parse_noting(text, wanted, row, &mut |_| {})
}

/// As [`parse`]; `seen` gets the names of the row's members.
fn parse_noting(text: &[u8], wanted: &[Column], row: &mut Row, seen: &mut dyn FnMut(&str)) -> Result<(), RowFault> {
    let text = std::str::from_utf8(text).map_err(|_| RowFault::NotUtf8(None))?;
    row.cells.clear();
    row.cells.resize_with(wanted.len(), Cell::default);
    let value = json_text::value(text).map_err(|fault| {
        let column = text[..fault.at].chars().count() + 1;
        RowFault::NotJson(format!("{} (column {column})", fault.reason))
    })?;
    match json_text::kind(value) {
        Kind::Object => fill(value, "", wanted, &mut row.cells, seen),
        Kind::List => Err(RowFault::NotAnObject(LIST)),
        Kind::Text => Err(RowFault::NotAnObject("a string")),
        Kind::Number => Err(RowFault::NotAnObject("a number")),
        Kind::Bool => Err(RowFault::NotAnObject("true or false")),
        Kind::Null => Err(RowFault::NotAnObject("null")),
    }
}

/// Fills the cells of the wanted members of `object`, whose own path with its last dot is `within`.
fn fill(
    object: &str,
    within: &str,
    wanted: &[Column],
    cells: &mut [Cell],
    seen: &mut dyn FnMut(&str),
) -> Result<(), RowFault> {
    let mut outcome = Ok(());
    json_text::members(object, |name, value| {
        seen(&name);
        for (column, cell) in wanted.iter().zip(cells.iter_mut()) {
            if outcome.is_ok() && column.name.strip_prefix(within) == Some(&*name) {
                match cell_of(value, column) {
                    Ok(found) => *cell = found,
                    Err(fault) => outcome = Err(fault),
                }
            }
        }
        let below = |column: &Column| {
            column
                .name
                .strip_prefix(within)
                .and_then(|rest| rest.strip_prefix(&*name))
                .is_some_and(|r| r.starts_with('.'))
        };
        if outcome.is_ok() && json_text::kind(value) == Kind::Object && wanted.iter().any(below) {
            outcome = fill(value, &format!("{within}{name}."), wanted, cells, &mut |_| {});
        }
    });
    outcome
}

fn cell_of(value: &str, column: &Column) -> Result<Cell, RowFault> {
    let lone = || RowFault::NotJson("half of a surrogate pair".to_owned());
    Ok(match json_text::kind(value) {
        Kind::Null => Cell::Null,
        Kind::Text => Cell::Text(json_text::text(value).ok_or_else(lone)?.into_owned()),
        Kind::Number | Kind::Bool => Cell::Text(value.to_owned()),
        Kind::List if column.is_chat => {
            Cell::Turns(chat::from_list(value).map_err(|reason| RowFault::Messages(column.name.clone(), reason))?)
        }
        Kind::List if column.is_list => Cell::Text(value.to_owned()),
        Kind::List => {
            let turns = || chat::from_list(value).ok().map(Cell::Turns);
            let other = || Cell::Other(if is_of_numbers(value) { NUMBERS } else { LIST });
            text_of_list(value, column, LIST_LEVELS).or_else(turns).unwrap_or_else(other)
        }
        Kind::Object => Cell::Other(OBJECT),
    })
}

/// A list of texts, or of such lists as HotpotQA's paragraphs have them, as one text; null for an empty one: such as the answers to a question of SQuAD that has none.
fn text_of_list(list: &str, column: &Column, levels: usize) -> Option<Cell> {
    let mut texts = Vec::new();
    json_text::elements(list, |element| {
        texts.push(match json_text::kind(element) {
            Kind::Text => json_text::text(element),
            Kind::Number if column.has_numbers => Some(element.trim().into()),
            Kind::List if levels > 1 => match text_of_list(element, column, levels - 1) {
                Some(Cell::Text(text)) => Some(text.into()),
                _ => None,
            },
            _ => None,
        });
    });
    let texts = texts.into_iter().collect::<Option<Vec<_>>>()?;
    Some(if texts.is_empty() { Cell::Null } else { Cell::Text(one_text(&texts, &column.name)) })
}

/// Whether a list has numbers alone.
fn is_of_numbers(list: &str) -> bool {
    let (mut count, mut numbers) = (0_u64, 0_u64);
    json_text::elements(list, |element| {
        count += 1;
        numbers += u64::from(matches!(json_text::kind(element), Kind::Number));
    });
    count > 0 && count == numbers
}

/// The most names of a row: nested members are counted.
const MAX_NAMES: usize = 100_000;

fn names_or_fault(text: &[u8]) -> Result<Vec<String>, RowFault> {
    names(text).map_or_else(|| parse(text, &[], &mut Row::default()).map(|()| Vec::new()), Ok)
}

/// The names of a row's columns, with the dotted names of members of objects.
pub(crate) fn names(text: &[u8]) -> Option<Vec<String>> {
    let value = json_text::value(std::str::from_utf8(text).ok()?).ok()?;
    let mut names = Vec::new();
    let is_object = json_text::kind(value) == Kind::Object;
    is_object.then(|| add_names(value, "", &mut names)).map(|()| names)
}

fn add_names(object: &str, within: &str, names: &mut Vec<String>) {
    json_text::members(object, |name, value| {
        if names.len() < MAX_NAMES {
            let path = format!("{within}{name}");
            if json_text::kind(value) == Kind::Object && path.len() < MAX_PATH_BYTES {
                names.push(path.clone());
                add_names(value, &format!("{path}."), names);
            } else {
                names.push(path);
            }
        }
    });
}

/// Objects with a longer path have no dotted names.
const MAX_PATH_BYTES: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_columns_are_bounded_in_number_and_length() {
        let mut late = LateColumns { known: HashSet::from(["a".to_owned()]), left: MAX_LATE, new: Vec::new() };
        late.see("a");
        late.see(&"x".repeat(MAX_LATE_BYTES + 1));
        (0..1000).for_each(|number| late.see(&number.to_string()));
        assert_eq!((late.new.len(), late.new[0].as_str()), (MAX_LATE, "0"));
        assert_eq!(late.known.len(), MAX_LATE + 1);
    }

    #[test]
    fn paragraphs_as_lists_of_sentences_are_one_text_and_of_several_answers_the_first_counts() {
        let text_of = |column: &str, value: &str| {
            let mut row = Row::default();
            parse(format!("{{\"{column}\": {value}}}").as_bytes(), &[Column::text(column)], &mut row).unwrap();
            row.cells[0].clone()
        };
        assert_eq!(text_of("sentences", r#"[["a", "b"], ["c"]]"#), Cell::Text("a\nb\nc".to_owned()));
        assert_eq!(text_of("answer", r#"["A", "B"]"#), Cell::Text("A".to_owned()));
        assert_eq!(text_of("sentences", r#"[[["a"]]]"#), Cell::Other(LIST));
        assert_eq!(text_of("tokens", "[[1, 2]]"), Cell::Other(LIST));
    }
}
