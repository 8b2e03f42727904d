//! [`Row`]: a row's values in the wanted columns, and its first line.

use std::borrow::Cow;

use serde_json::Value;

use crate::chat::Turn;
use crate::column::Column;
use crate::python_text;

/// One row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The line of the file on which the row begins, from 1; for parquet the row, from 0.
    pub line: u64,
    /// A value for each wanted column, in the order of the columns.
    pub cells: Vec<Cell>,
}

/// The most levels of a list of texts: a list of lists of texts is one text as well.
pub(crate) const LIST_LEVELS: usize = 2;

/// The one text that a list of texts stands for: its elements with line breaks between them. Of the answers to a question,
/// which say the same in several ways, it is the first.
pub(crate) fn one_text(texts: &[impl AsRef<str>], column: &str) -> String {
    let taken = if has_answers(column) { &texts[..1] } else { texts };
    taken.iter().map(AsRef::as_ref).collect::<Vec<&str>>().join("\n")
}

/// Whether a column of this name has the answers to a question, of which the first is the text.
pub(crate) fn has_answers(column: &str) -> bool {
    ["answers", "answer"].contains(&column) || column.ends_with("answers.text")
}

/// The answer that a cell holds as the text of an object, in JSON or as Python writes it: such cells has a CSV of SQuAD. An object without
/// an answer is null, and other texts are `None`.
pub(crate) fn written_answer(text: &str) -> Option<Cell> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let parsed = serde_json::from_str::<Value>(text).ok();
    let object = parsed.or_else(|| serde_json::from_str(&python_text::json(text)?).ok())?;
    let answer = match object.get("text")? {
        Value::Array(answers) => answers.first().map(Value::as_str),
        answer => Some(answer.as_str()),
    };
    answer.map_or(Some(Cell::Null), |answer| answer.map(|answer| Cell::Text(answer.to_owned())))
}

/// A text of a row: a cell, or a text that was made from cells.
pub(crate) enum TextPlace {
    Cell(usize),
    Made(String),
}

impl Row {
    /// Gives a column a text in place of none.
    pub(crate) fn fill_empty(&mut self, columns: &[Column], name: &str, text: &str) {
        let place = columns.iter().position(|column| column.name == name);
        match place.and_then(|place| self.cells.get_mut(place)) {
            Some(Cell::Text(here)) if !here.trim().is_empty() => {}
            Some(cell @ (Cell::Null | Cell::Text(_))) => *cell = Cell::Text(text.to_owned()),
            _ => {}
        }
    }

    /// The place of a text that was borrowed from this row.
    pub(crate) fn place_of(&self, text: Cow<'_, str>) -> TextPlace {
        let text = match text {
            Cow::Owned(text) => return TextPlace::Made(text),
            Cow::Borrowed(text) => text,
        };
        let is_here = |cell: &Cell| cell.text().is_some_and(|here| std::ptr::eq(here, text));
        self.cells.iter().position(is_here).map_or_else(|| TextPlace::Made(text.to_owned()), TextPlace::Cell)
    }

    /// Takes texts out of the row: a long one is not copied. The rest of the row is dropped.
    pub(crate) fn take<const N: usize>(&mut self, mut places: [TextPlace; N]) -> [String; N] {
        for number in 1..N {
            let (before, after) = places.split_at_mut(number);
            let TextPlace::Cell(cell) = after[0] else { continue };
            if before.iter().any(|place| matches!(place, TextPlace::Cell(other) if *other == cell)) {
                after[0] = TextPlace::Made(self.cells[cell].text().unwrap_or_default().to_owned());
            }
        }
        let texts = places.map(|place| match place {
            TextPlace::Made(text) => text,
            TextPlace::Cell(index) => match std::mem::take(&mut self.cells[index]) {
                Cell::Text(text) => text,
                _ => String::new(),
            },
        });
        self.cells.clear();
        texts
    }
}

/// One value.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Cell {
    /// The row does not have the column, or its value is null.
    #[default]
    Null,
    /// Text; a number or a boolean as JSON.
    Text(String),
    /// A list of messages.
    Turns(Vec<Turn>),
    /// A value that is not text, by the name of its type.
    Other(&'static str),
}

impl Cell {
    /// Bytes of the cell's texts.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Turns(turns) => turns.iter().map(|turn| turn.role.len() + turn.content.len()).sum(),
            Self::Null | Self::Other(_) => 0,
        }
    }

    /// The text, if the cell is text.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}
