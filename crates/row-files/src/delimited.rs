//! Rows of CSV and TSV, by the rules of RFC 4180 and of the readers in Python, pandas and spreadsheets.
//!
//! The first row names the columns. A quoted field may contain the delimiter, line breaks and, written twice, quotes. A quote
//! within a field that does not begin with a quote is an ordinary character, and text after a closing quote belongs to the
//! field. In a TSV a quote is an ordinary character, unless [`Quoting`] says otherwise. Rows end with a line feed, a carriage
//! return, or both. Empty lines and lines of white space are skipped.
//!
//! This is our own state machine, because an unclosed quote has to be an error: it would swallow all later rows, and other
//! readers do not report it.

use std::collections::HashMap;

use crate::column::Column;
use crate::error::{Error, RowFault};
use crate::input::{Input, append};
use crate::options::Quoting;
use crate::row::{Cell, Row};

/// The most columns of a file.
const MAX_FIELDS: usize = 100_000;

/// What pandas and `datasets` take for a missing value.
const MISSING: [&str; 10] = ["NaN", "nan", "None", "NULL", "null", "N/A", "n/a", "NA", "<NA>", "#N/A"];

/// Rows of a CSV or TSV file.
pub(crate) struct DelimitedRows {
    records: Records,
    /// For each wanted column, its index in the header.
    places: Vec<Option<usize>>,
    fields: usize,
    notes: Notes,
}

/// What a wrong use of quotes would look like, counted over the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Rows with a field that spans lines, and the line of the first.
    pub spanning: (u64, u64),
    /// Rows with a field that begins and ends with a quote which belongs to its text, and the line of the first.
    pub quoted: (u64, u64),
    /// Rows with text between the closing quote of a field and the next delimiter, and the line of the first.
    pub unescaped: (u64, u64),
    /// Rows with a field such as `NaN`, which other readers take for a missing value, and the line of the first.
    pub missing: (u64, u64),
}

impl Notes {
    fn count(&mut self, records: &Records, row: &Row) {
        let is_quoted = |cell: &Cell| {
            cell.text().is_some_and(|text| text.len() > 1 && text.starts_with('"') && text.ends_with('"'))
        };
        let is_missing = |cell: &Cell| cell.text().is_some_and(|text| MISSING.contains(&text));
        let found = [
            (records.breaks() > 0, &mut self.spanning),
            (!records.has_quotes && row.cells.iter().any(is_quoted), &mut self.quoted),
            (records.has_text_after_quote, &mut self.unescaped),
            (row.cells.iter().any(is_missing), &mut self.missing),
        ];
        for (is_found, (rows, first)) in found {
            if is_found {
                *rows += 1;
                *first = if *rows == 1 { row.line } else { *first };
            }
        }
    }
}

impl DelimitedRows {
    /// Reads the header.
    pub fn new(input: Input, delimiter: u8, quoting: Quoting, wanted: &[Column]) -> Result<Self, Error> {
        let mut records = Records::new(input, delimiter, quoting);
        let header = records.header()?;
        let places = wanted.iter().map(|column| header.iter().position(|name| *name == column.name)).collect();
        Ok(Self { records, places, fields: header.len(), notes: Notes::default() })
    }

    pub fn input(&self) -> &Input {
        &self.records.input
    }

    pub fn into_input(self) -> Input {
        self.records.input
    }

    /// Reads the next row; `None` at the end.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        // The memory of an earlier row is not needed beside this one.
        row.cells.clear();
        let Some(read) = self.records.next()? else { return Ok(None) };
        row.line = self.records.first_line;
        let read = read.and_then(|()| self.fill(row));
        if read.is_ok() {
            self.notes.count(&self.records, row);
        }
        self.records.release();
        Ok(Some(read))
    }

    /// What was noticed about the rows so far.
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    fn fill(&self, row: &mut Row) -> Result<(), RowFault> {
        let records = &self.records;
        if records.ends.len() != self.fields {
            let (expected, got) = (self.fields, records.ends.len());
            return Err(RowFault::Fields { expected, got, has_quotes: records.has_quoted_field });
        }
        let fields = records.fields()?;
        row.cells.clear();
        row.cells.extend(self.places.iter().map(|place| place.map_or(Cell::Null, |place| Cell::Text(fields(place)))));
        Ok(())
    }
}

/// The names of columns, the second `text` as `text (2)`: a name means one column.
fn numbered(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts = HashMap::new();
    let numbered = names.map(|name| {
        let count = counts.entry(name.clone()).and_modify(|count| *count += 1).or_insert(1_usize);
        if *count == 1 || name.is_empty() { name } else { format!("{name} ({count})") }
    });
    numbered.collect()
}

/// Rows as fields, including the header.
pub(crate) struct Records {
    input: Input,
    delimiter: u8,
    /// Whether quotes enclose fields.
    has_quotes: bool,
    /// The longest row that is held.
    most: usize,
    /// The fields of the row, back to back.
    bytes: Vec<u8>,
    /// The end of each field.
    ends: Vec<usize>,
    /// The line on which the row begins, from 1.
    pub first_line: u64,
    /// The next line to read.
    line: u64,
    /// Line breaks within the fields of the row.
    breaks: u64,
    /// Whether a field of the row begins with a quote that encloses it.
    has_quoted_field: bool,
    /// Whether text follows the closing quote of a field of the row: other writers mean a quote within the text, such as `\"`.
    has_text_after_quote: bool,
    /// Whether the last byte was a carriage return that ended a row.
    after_return: bool,
}

/// The place of the next byte relative to a field.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a field.
    Start,
    /// In a field without quotes, or after its closing quote.
    Plain,
    /// Between the quotes of a field.
    Quoted,
    /// After a quote that either closes the field or is the first of two.
    Quote,
}

impl Records {
    pub fn new(input: Input, delimiter: u8, quoting: Quoting) -> Self {
        let (bytes, ends, most) = (Vec::new(), Vec::new(), input.most_row_bytes());
        let has_quotes = quoting.is_on(delimiter);
        Self {
            input,
            delimiter,
            has_quotes,
            most,
            bytes,
            ends,
            first_line: 1,
            line: 1,
            breaks: 0,
            has_quoted_field: false,
            has_text_after_quote: false,
            after_return: false,
        }
    }

    /// The line breaks within the fields of the row that was read last.
    fn breaks(&self) -> u64 {
        self.breaks
    }

    /// The names of the columns. Excel may write `sep=;` before them, which names the delimiter.
    pub fn header(&mut self) -> Result<Vec<String>, Error> {
        let broken = |records: &Self, fault: RowFault| Error::Broken {
            path: records.input.path().to_owned(),
            line: records.first_line,
            reason: format!("the header: {fault}"),
        };
        match self.next()? {
            None => Ok(Vec::new()),
            Some(Err(fault)) => Err(broken(self, fault)),
            Some(Ok(())) => {
                if self.first_line == 1 && self.bytes == b"sep=" && self.ends.len() == 2 {
                    return self.header();
                }
                let fields = self.fields().map_err(|fault| broken(self, fault))?;
                Ok(numbered((0..self.ends.len()).map(|place| fields(place).trim().to_owned())))
            }
        }
    }

    /// The row's fields by index, if all of them are UTF-8: a character that a delimiter cuts in two is not.
    fn fields(&self) -> Result<impl Fn(usize) -> String, RowFault> {
        let text = std::str::from_utf8(&self.bytes).map_err(|_| RowFault::NotUtf8(None))?;
        if !self.ends.iter().all(|&end| text.is_char_boundary(end)) {
            return Err(RowFault::NotUtf8(None));
        }
        Ok(|place: usize| {
            let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
            text[start..self.ends[place]].to_owned()
        })
    }

    /// Releases the memory of a long row.
    fn release(&mut self) {
        if self.bytes.capacity() > 1 << 20 {
            self.bytes = Vec::new();
        }
    }

    /// Reads the fields of the next row that is not empty; `None` at the end.
    pub fn next(&mut self) -> Result<Option<Result<(), RowFault>>, Error> {
        loop {
            self.bytes.clear();
            self.ends.clear();
            match self.read()? {
                None => return Ok(None),
                Some(Ok(())) if self.ends.len() == 1 && self.bytes.trim_ascii().is_empty() => {}
                Some(read) => return Ok(Some(read)),
            }
        }
    }

    fn read(&mut self) -> Result<Option<Result<(), RowFault>>, Error> {
        let (mut state, mut is_whole, mut is_begun) = (State::Start, true, false);
        (self.first_line, self.breaks) = (self.line, 0);
        (self.has_quoted_field, self.has_text_after_quote) = (false, false);
        loop {
            let buffer = self.input.buffer()?;
            if buffer.is_empty() {
                if !is_begun {
                    return Ok(None);
                }
                self.ends.push(self.bytes.len());
                return Ok(Some(match (is_whole, state) {
                    (_, State::Quoted) => Err(RowFault::UnclosedQuote),
                    (true, _) => Ok(()),
                    (false, _) => Err(RowFault::TooLong(self.most)),
                }));
            }
            let (mut at, mut is_over) = (0, false);
            while at < buffer.len() && !is_over {
                // Text up to the next special byte is taken at once.
                let rest = &buffer[at..];
                let plain = match state {
                    State::Quoted => memchr::memchr(b'"', rest).unwrap_or(rest.len()),
                    State::Plain => memchr::memchr3(self.delimiter, b'\n', b'\r', rest).unwrap_or(rest.len()),
                    State::Start | State::Quote => 0,
                };
                if plain > 0 {
                    let text = &rest[..plain];
                    if state == State::Quoted {
                        let breaks = memchr::memchr_iter(b'\n', text).count() as u64;
                        self.line += breaks;
                        self.breaks += breaks;
                    }
                    match self.bytes.len() + plain <= self.most {
                        true => append(&mut self.bytes, text),
                        false => is_whole = false,
                    }
                    (at, is_begun, self.after_return) = (at + plain, true, false);
                    continue;
                }
                let byte = rest[0];
                at += 1;
                if std::mem::take(&mut self.after_return) && byte == b'\n' {
                    // The second half of the line break that ended the previous row.
                    continue;
                }
                is_begun = true;
                state = match (state, byte) {
                    (State::Quoted, _) => State::Quote,
                    (State::Start, b'"') if self.has_quotes => {
                        self.has_quoted_field = true;
                        State::Quoted
                    }
                    (State::Quote, b'"') => {
                        match self.bytes.len() < self.most {
                            true => self.bytes.push(byte),
                            false => is_whole = false,
                        }
                        State::Quoted
                    }
                    (_, b'\n' | b'\r') => {
                        (self.after_return, is_over) = (byte == b'\r', true);
                        self.line += 1;
                        State::Start
                    }
                    (_, byte) if byte == self.delimiter => {
                        match self.ends.len() < MAX_FIELDS {
                            true => self.ends.push(self.bytes.len()),
                            false => is_whole = false,
                        }
                        State::Start
                    }
                    (state, byte) => {
                        self.has_text_after_quote |= state == State::Quote && byte != b' ';
                        match self.bytes.len() < self.most {
                            true => self.bytes.push(byte),
                            false => is_whole = false,
                        }
                        State::Plain
                    }
                };
            }
            self.input.consume(at);
            if is_over {
                self.ends.push(self.bytes.len());
                return Ok(Some(if is_whole { Ok(()) } else { Err(RowFault::TooLong(self.most)) }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_ROW_BYTES;
    use crate::options::ReadOptions;

    fn rows(text: &str) -> Vec<(u64, Result<Vec<String>, RowFault>)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rows.csv");
        std::fs::write(&path, text).unwrap();
        let mut records =
            Records::new(Input::open(&path, &ReadOptions::default(), false).unwrap(), b',', Quoting::Auto);
        let mut rows = Vec::new();
        while let Some(read) = records.next().unwrap() {
            let text = String::from_utf8(records.bytes.clone()).unwrap();
            let starts = std::iter::once(0).chain(records.ends.iter().copied());
            let fields = starts.zip(&records.ends).map(|(start, &end)| text[start..end].to_owned()).collect();
            rows.push((records.first_line, read.map(|()| fields)));
        }
        rows
    }

    #[track_caller]
    fn check(text: &str, expected: &[(u64, &[&str])]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(line, fields)| (*line, Ok(fields.iter().map(ToString::to_string).collect())))
            .collect();
        assert_eq!(rows(text), expected, "{text:?}");
    }

    #[test]
    fn fields_in_quotes_hold_delimiters_line_breaks_and_quotes() {
        check("a,b\n1,2\n", &[(1, &["a", "b"]), (2, &["1", "2"])]);
        check("\"x,y\",\"1\n2\"\nz,\"say \"\"hi\"\"\"\n", &[(1, &["x,y", "1\n2"]), (3, &["z", "say \"hi\""])]);
        check("a\"b,\"c\"d\n", &[(1, &["a\"b", "cd"])]);
        check(",\n\"\",\"\"", &[(1, &["", ""]), (2, &["", ""])]);
    }

    #[test]
    fn the_first_line_of_excel_names_the_delimiter_and_no_column() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rows.csv");
        let header = |text: &str| {
            std::fs::write(&path, text).unwrap();
            crate::Kind::detect(&path, &ReadOptions::default()).unwrap().columns
        };
        assert_eq!(header("sep=;\r\na;b,c\r\n1;2\r\n"), ["a", "b,c"]);
        assert_eq!(header("\u{feff}sep=,\na,b\n1,2\n"), ["a", "b"]);
        assert_eq!(header("sep=,b\n1,2\n"), ["sep=", "b"]);
        assert_eq!(header("a,b\nsep=,\n"), ["a", "b"]);
    }

    #[test]
    fn rows_end_with_a_line_feed_a_carriage_return_or_both_and_empty_lines_are_none() {
        check("a\r\nb\r\r\nc\rd\n\n\ne", &[(1, &["a"]), (2, &["b"]), (4, &["c"]), (5, &["d"]), (8, &["e"])]);
    }

    #[test]
    fn a_quote_that_nothing_closes_is_no_row() {
        assert_eq!(
            rows("a,b\n\"c,d\ne,f\n"),
            [(1, Ok(vec!["a".to_owned(), "b".to_owned()])), (2, Err(RowFault::UnclosedQuote))]
        );
    }

    #[test]
    fn a_row_that_is_too_long_is_passed_over_and_the_next_one_is_read() {
        let long = "x".repeat(MAX_ROW_BYTES + 1);
        let quotes = "\"\"".repeat(MAX_ROW_BYTES + 1);
        let read = rows(&format!("a\n{long}\nb\n\"{quotes}\"\nc\n"));
        let faults: Vec<_> = read.iter().map(|(line, row)| (*line, row.is_err())).collect();
        assert_eq!(faults, [(1, false), (2, true), (3, false), (4, true), (5, false)]);
    }
}
