//! [`ParquetRows`]: columns of text of a parquet file, in file order.

use std::path::Path;

use parquet_dataset::RowCursor;

use crate::column::Column;
use crate::error::{Error, RowFault};
use crate::kind::Kind;
use crate::row::{Cell, Row};

/// Rows of a parquet file, in file order.
pub(crate) struct ParquetRows {
    cursor: RowCursor,
    /// For each wanted column its place among those that are read; `None` if the file does not have it.
    places: Vec<Option<usize>>,
    read: parquet_dataset::Rows,
    most_row_bytes: usize,
}

impl ParquetRows {
    /// Opens a file whose wanted columns are each a string a row; `None` if they are something else.
    pub fn open(path: &Path, kind: &Kind, wanted: &[Column]) -> Result<Option<Self>, Error> {
        let mut names: Vec<String> = Vec::new();
        let places = wanted.iter().map(|column| {
            kind.columns.contains(&column.name).then(|| {
                names.iter().position(|name| *name == column.name).unwrap_or_else(|| {
                    names.push(column.name.clone());
                    names.len() - 1
                })
            })
        });
        let places = places.collect();
        use parquet_dataset::Error as E;
        let cursor = match RowCursor::open(path, &names, None) {
            Err(E::WrongType { .. } | E::Unsupported { .. } | E::MissingColumn { .. }) => return Ok(None),
            opened => opened?,
        };
        let (read, most_row_bytes) = (parquet_dataset::Rows::default(), kind.options.max_row_bytes);
        Ok(Some(Self { cursor, places, read, most_row_bytes }))
    }

    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.cursor.rows()
    }

    /// The next row's number.
    pub fn next_row(&self) -> u64 {
        self.cursor.next_row()
    }

    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        row.line = self.cursor.next_row();
        // The memory of an earlier row is not needed beside this one.
        row.cells.clear();
        if !self.cursor.next(self.most_row_bytes as u64 + 1, &mut self.read)? {
            return Ok(None);
        }
        for (number, place) in self.places.iter().enumerate() {
            let is_last = !self.places[number + 1..].contains(place);
            let bytes = match place {
                None => None,
                Some(column) if is_last => self.read.take_bytes(*column),
                Some(column) => self.read.bytes(*column, 0).map(<[u8]>::to_vec),
            };
            match bytes.map(String::from_utf8) {
                None => row.cells.push(Cell::Null),
                Some(Ok(text)) if text.len() > self.most_row_bytes => {
                    return Ok(Some(Err(RowFault::TooLong(self.most_row_bytes))));
                }
                Some(Ok(text)) => row.cells.push(Cell::Text(text)),
                Some(Err(error)) if error.as_bytes().len() > self.most_row_bytes => {
                    return Ok(Some(Err(RowFault::TooLong(self.most_row_bytes))));
                }
                Some(Err(_)) => return Ok(Some(Err(RowFault::NotUtf8(None)))),
            }
        }
        Ok(Some(Ok(())))
    }
}
