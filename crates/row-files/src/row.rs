//! [`Row`]: the values of one row in the columns that are wanted, and where the row begins.

use crate::chat::Turn;

/// One row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The line of the file on which the row begins, from 1; for parquet the row, from 0.
    pub line: u64,
    /// A value for each wanted column, in their order.
    pub cells: Vec<Cell>,
}

/// One value.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Cell {
    /// The row does not have the column, or has null there.
    #[default]
    Null,
    /// Text; of a number or a truth value its JSON.
    Text(String),
    /// A list of messages.
    Turns(Vec<Turn>),
    /// Something that is no text, by its name.
    Other(&'static str),
}

impl Cell {
    /// The text, where it is text.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}
