//! Rows of JSON: one object per line (JSONL), the elements of an array, or objects one after the other.
//!
//! serde_json reads one row at a time from a buffer of at most [`MAX_ROW_BYTES`]. Values of unwanted columns are skipped
//! without being held, however deep they nest. If a key occurs twice, its last value counts, as in Python's `json`.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::MAX_ROW_BYTES;
use crate::chat;
use crate::columns::Column;
use crate::error::{Error, LIST, OBJECT, RowFault, reason};
use crate::input::Input;
use crate::row::{Cell, Row};

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
    buffer: Vec<u8>,
    /// The next line to read, from 1.
    line: u64,
    place: Place,
}

/// The state of reading an array.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
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
    pub fn new(input: Input, layout: Layout, wanted: &[Column]) -> Self {
        Self { input, layout, wanted: wanted.to_vec(), buffer: Vec::new(), line: 1, place: Place::Start }
    }

    pub fn input(&self) -> &Input {
        &self.input
    }

    pub fn into_input(self) -> Input {
        self.input
    }

    /// The text of the last row read.
    pub fn text(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads the next row; `None` at the end.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        let Some(is_whole) = self.next_text(&mut row.line)? else { return Ok(None) };
        if !is_whole {
            return Ok(Some(Err(RowFault::TooLong)));
        }
        Ok(Some(parse(&self.buffer, &self.wanted, row)))
    }

    /// Copies the text of the next row into the buffer; false if it is too long.
    fn next_text(&mut self, first_line: &mut u64) -> Result<Option<bool>, Error> {
        // After a large row, release the buffer's memory.
        if self.buffer.capacity() > 1 << 20 {
            self.buffer = Vec::new();
        }
        self.buffer.clear();
        if self.layout != Layout::Lines {
            return self.next_element(first_line);
        }
        loop {
            *first_line = self.line;
            let Some(is_whole) = self.input.read_line(&mut self.buffer, MAX_ROW_BYTES)? else { return Ok(None) };
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
        if self.layout == Layout::Wrapped && self.place == Place::Start {
            self.skip_to_array()?;
        }
        loop {
            let next = self.peek()?;
            *first_line = self.line;
            let next = match (self.place, next) {
                (Place::Start, Some(b'[')) if is_array => Place::First,
                (Place::Rest, Some(b',')) if is_array => Place::Next,
                (Place::First | Place::Rest, Some(b']')) if is_array => Place::End,
                (Place::End, None) => return Ok(None),
                (Place::End, Some(_)) if self.layout == Layout::Wrapped => return Ok(None),
                (_, None) if !is_array => return Ok(None),
                (_, None) => return self.broken("the file ends before its JSON array does"),
                (Place::End, Some(_)) => return self.broken("expected nothing after the JSON array, got more text"),
                (Place::Rest, Some(_)) if is_array => {
                    return self.broken("expected `,` or `]` after an element of the JSON array");
                }
                (_, Some(b',' | b']' | b'}')) => return self.broken("expected a JSON object"),
                (_, Some(_)) => {
                    let is_whole = self.copy_element()?;
                    self.place = Place::Rest;
                    return Ok(Some(is_whole));
                }
            };
            self.place = next;
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

    /// Copies one JSON value, which begins here, up to the longest row; false if the value is longer.
    fn copy_element(&mut self) -> Result<bool, Error> {
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
            if self.buffer.len() + used <= MAX_ROW_BYTES {
                self.buffer.extend_from_slice(part);
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
    let text = std::str::from_utf8(text).map_err(|_| RowFault::NotUtf8)?;
    row.cells.clear();
    row.cells.resize_with(wanted.len(), Cell::default);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let mut chat = None;
    let read = RowSeed { wanted, cells: &mut row.cells, chat: &mut chat }.deserialize(&mut deserializer);
    match read.and_then(|found| deserializer.end().map(|()| found)) {
        Ok(None) => Ok(()),
        Ok(Some(found)) => Err(RowFault::NotAnObject(found)),
        Err(error) => Err(match chat {
            Some(column) if error.is_data() => RowFault::Messages(column, reason(&error)),
            _ => RowFault::NotJson(format!("{} (column {})", reason(&error), error.column())),
        }),
    }
}

/// The names of an object's columns, each with its value's type.
pub(crate) fn names(text: &[u8]) -> Option<Vec<(String, &'static str)>> {
    struct Names;
    impl<'de> Visitor<'de> for Names {
        type Value = Vec<(String, &'static str)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut names = Vec::new();
            while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                let cell = map.next_value_seed(CellSeed { is_chat: false })?;
                let kind = match cell {
                    Cell::Null => "null",
                    Cell::Other(kind) => kind,
                    _ => "text",
                };
                names.push((name.into_owned(), kind));
            }
            Ok(names)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let names = deserializer.deserialize_map(Names).ok()?;
    deserializer.end().ok().map(|()| names)
}

/// Reads an object into cells; for anything else returns its type.
struct RowSeed<'a> {
    wanted: &'a [Column],
    cells: &'a mut [Cell],
    /// The column of messages to read.
    chat: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for RowSeed<'_> {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for RowSeed<'_> {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            let Some(column) = self.wanted.iter().position(|column| *column.name == *name) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let is_chat = self.wanted[column].is_chat;
            if is_chat {
                *self.chat = Some(self.wanted[column].name.clone());
            }
            self.cells[column] = map.next_value_seed(CellSeed { is_chat })?;
            *self.chat = None;
        }
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Some(LIST))
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Some("a string"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Some("true or false"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Some("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Some("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Some("a number"))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Some("null"))
    }
}

/// Reads one value. In a column of messages, a list is read as messages.
struct CellSeed {
    is_chat: bool,
}

impl<'de> DeserializeSeed<'de> for CellSeed {
    type Value = Cell;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cell, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for CellSeed {
    type Value = Cell;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Cell, E> {
        Ok(Cell::Null)
    }

    fn visit_str<E>(self, text: &str) -> Result<Cell, E> {
        Ok(Cell::Text(text.to_owned()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Cell, E> {
        Ok(Cell::Text(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Cell, E> {
        Ok(Cell::Text(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Cell, E> {
        Ok(Cell::Text(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Cell, E> {
        // Rust's debug form keeps the point of 1.0, as JSON does.
        Ok(Cell::Text(format!("{value:?}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Cell, A::Error> {
        if self.is_chat {
            return chat::turns(list).map(Cell::Turns);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Cell::Other(LIST))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Cell, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Cell::Other(OBJECT))
    }
}
