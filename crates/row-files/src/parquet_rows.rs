//! [`ParquetRows`]: the rows of a parquet file, in file order: flat columns of text, and messages in lists.

use std::path::Path;

use parquet_dataset::{Dataset, DatasetOptions, ListRow, Lists};

use crate::MAX_ROW_BYTES;
use crate::chat::{MAX_TURNS, Turn, role, too_many};
use crate::columns::Column;
use crate::error::{Error, LIST, RowFault};
use crate::kind::Kind;
use crate::row::{Cell, Row};

/// The most rows of a parquet file that are read at a time.
const READ_ROWS: u64 = 1024;
/// Bytes of values that are read at a time.
const READ_BYTES: u64 = 1 << 20;

/// Rows of a parquet file, in file order.
pub(crate) struct ParquetRows {
    dataset: Option<Dataset>,
    chat: Option<Chat>,
    /// For each wanted column, the place of its values.
    places: Vec<Place>,
    read: parquet_dataset::Rows,
    /// The first row of `read`.
    first: u64,
    /// The next row.
    next: u64,
    at_a_time: u64,
}

/// The place of a wanted column's values.
#[derive(Clone, Copy)]
enum Place {
    /// The file does not have the column.
    Nowhere,
    /// A column of the dataset.
    Flat(usize),
    /// The messages.
    Chat,
    /// The messages, although text is wanted.
    ChatAsText,
}

/// The messages of a file.
struct Chat {
    column: String,
    lists: Lists,
    row: ListRow,
}

impl ParquetRows {
    pub fn open(path: &Path, kind: &Kind, wanted: &[Column]) -> Result<Self, Error> {
        let mut names: Vec<String> = Vec::new();
        let mut places = Vec::with_capacity(wanted.len());
        let mut chat = None;
        for Column { name, is_chat } in wanted {
            places.push(match kind.chat.as_ref().filter(|chat| chat.column == *name) {
                Some(found) => {
                    let leaves = [found.role.clone(), found.content.clone()];
                    let lists = Lists::open(path, &leaves, MAX_TURNS, MAX_ROW_BYTES as u64)?;
                    chat = Some(Chat { column: name.clone(), lists, row: ListRow::default() });
                    if *is_chat { Place::Chat } else { Place::ChatAsText }
                }
                None if kind.columns.contains(name) => {
                    let known = names.iter().position(|found| found == name);
                    Place::Flat(known.unwrap_or_else(|| {
                        names.push(name.clone());
                        names.len() - 1
                    }))
                }
                None => Place::Nowhere,
            });
        }
        let options = DatasetOptions { max_value_bytes: u64::MAX, ..DatasetOptions::new(names) };
        let dataset = match Dataset::open(&[path.to_owned()], &options) {
            Err(parquet_dataset::Error::NoRows { .. } | parquet_dataset::Error::NoColumns) => None,
            opened => Some(opened?),
        };
        let read = parquet_dataset::Rows::default();
        Ok(Self { dataset, chat, places, read, first: 0, next: 0, at_a_time: READ_ROWS })
    }

    /// Rows of the file; none if it has no wanted column.
    pub fn rows(&self) -> u64 {
        let lists = || self.chat.as_ref().map_or(0, |chat| chat.lists.rows());
        self.dataset.as_ref().map_or_else(lists, Dataset::rows)
    }

    /// The next row's number.
    pub fn next_row(&self) -> u64 {
        self.next
    }

    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        row.line = self.next;
        if self.next == self.rows() {
            return Ok(None);
        }
        if self.next == self.first + self.read.len() as u64 {
            self.read_more()?;
        }
        let index = (self.next - self.first) as usize;
        self.next += 1;
        row.cells.clear();
        if let Some(chat) = &mut self.chat {
            chat.lists.next(&mut chat.row)?;
        }
        for place in &self.places {
            let cell = match place {
                Place::Nowhere => Ok(Cell::Null),
                Place::Flat(column) => text(self.read.bytes(*column, index)),
                Place::Chat => self.chat.as_ref().map_or(Ok(Cell::Null), Chat::cell),
                Place::ChatAsText => Ok(Cell::Other(LIST)),
            };
            match cell {
                Ok(cell) => row.cells.push(cell),
                Err(fault) => return Ok(Some(Err(fault))),
            }
        }
        Ok(Some(Ok(())))
    }

    /// Reads the next rows of flat columns, as many as fit.
    fn read_more(&mut self) -> Result<(), Error> {
        let Some(dataset) = &self.dataset else { return Ok(()) };
        loop {
            let rows: Vec<u64> = (self.next..dataset.rows().min(self.next + self.at_a_time)).collect();
            let most = if rows.len() == 1 { u64::MAX } else { READ_BYTES };
            let part = |_, _, bytes: u64| 0..bytes.min(MAX_ROW_BYTES as u64 + 1);
            match dataset.read_parts_within(&rows, most, READ_BYTES, &part) {
                Err(error) if error.is_read_too_large() && rows.len() > 1 => self.at_a_time = rows.len() as u64 / 2,
                read => {
                    (self.read, self.first) = (read?, self.next);
                    self.at_a_time = READ_ROWS.min(self.at_a_time * 2);
                    return Ok(());
                }
            }
        }
    }
}

impl Chat {
    /// The messages of the last row read.
    fn cell(&self) -> Result<Cell, RowFault> {
        let row = &self.row;
        if row.is_null() {
            return Ok(Cell::Null);
        }
        if row.elements() > MAX_TURNS as u64 {
            return Err(RowFault::Messages(self.column.clone(), too_many()));
        }
        if row.is_cut() {
            return Err(RowFault::TooLong);
        }
        let text = |column: usize, message: usize| {
            std::str::from_utf8(row.bytes(column, message).unwrap_or_default()).map_err(|_| RowFault::NotUtf8)
        };
        let turn = |message| Ok(Turn { role: role(text(0, message)?), content: text(1, message)?.to_owned() });
        let turns = (0..row.elements() as usize).map(turn).collect::<Result<Vec<_>, _>>()?;
        Ok(Cell::Turns(turns))
    }
}

/// A value of a flat column.
fn text(bytes: Option<&[u8]>) -> Result<Cell, RowFault> {
    match bytes {
        None => Ok(Cell::Null),
        Some(bytes) if bytes.len() > MAX_ROW_BYTES => Err(RowFault::TooLong),
        Some(bytes) => {
            std::str::from_utf8(bytes).map(|text| Cell::Text(text.to_owned())).map_err(|_| RowFault::NotUtf8)
        }
    }
}
