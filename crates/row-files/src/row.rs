//! [`Row`]: a row's values in the wanted columns, and its first line.

use crate::chat::Turn;

/// One row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The line of the file on which the row begins, from 1; for parquet the row, from 0.
    pub line: u64,
    /// A value for each wanted column, in the order of the columns.
    pub cells: Vec<Cell>,
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
    /// The text, if the cell is text.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}
