//! [`RowCursor`]: rows of string columns of one file, in order, each byte of the file read once.
//!
//! A [`Dataset`](crate::Dataset) finds any row, and opens a page again for each read. A cursor goes from the first row of
//! a file to the last, and keeps one page of each column open. Pages above their usual size are streamed, so memory does
//! not depend on the length of the file, its pages or its dictionaries.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Fault, Location};
use crate::footer::Footer;
use crate::io::{Files, IoLog};
use crate::limits::{Limits, Parts};
use crate::pages::chunk_cursor::ChunkCursor;
use crate::rows::Rows;

/// Rows of one file, in order.
pub struct RowCursor {
    files: Files,
    footer: Footer,
    names: Vec<String>,
    /// The number of row groups that were begun.
    groups: usize,
    columns: Vec<ChunkCursor>,
    /// Rows of the current group that are still to be read.
    left: u64,
    next: u64,
    rows: u64,
}

impl RowCursor {
    /// Opens a file to read these string columns, by dotted path. Without columns its rows are empty.
    ///
    /// # Errors
    /// The file cannot be read, or a column does not exist or is not a string column.
    pub fn open(path: &Path, columns: &[String], log: Option<Arc<IoLog>>) -> Result<Self, Error> {
        let mut files = Files::new(log);
        let (handle, identity) = files.add(path)?;
        let footer = Footer::read(path, &handle, identity.bytes, columns);
        let footer = footer.map_err(|error| files.changed_or(0, error))?;
        let rows = footer.row_groups.iter().map(|group| group.rows).sum();
        Ok(Self { files, footer, names: columns.to_vec(), groups: 0, columns: Vec::new(), left: 0, next: 0, rows })
    }

    /// Rows of the file.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The number of the next row.
    pub fn next_row(&self) -> u64 {
        self.next
    }

    /// Reads the next row into `row`, which then has this row alone; false after the last row. Of each value at most
    /// `most_of_a_value` bytes are read.
    ///
    /// # Errors
    /// Errors of reading. After an error no more rows can be read.
    pub fn next(&mut self, most_of_a_value: u64, row: &mut Rows) -> Result<bool, Error> {
        while self.left == 0 {
            if !self.next_group()? {
                return Ok(false);
            }
        }
        row.restart(self.names.len());
        let part = |_: u64, _: usize, bytes: u64| -> Range<u64> { 0..bytes.min(most_of_a_value) };
        let parts = Some(Parts { whole: most_of_a_value, part: &part });
        let most = u64::from(u32::MAX);
        let mut limits = Limits { value_bytes: most, read_bytes: most, left: most, more: None, parts, column: 0 };
        for column in 0..self.columns.len() {
            limits.column = column;
            let (cursor, to) = (&mut self.columns[column], row.column_mut(column));
            // Decompressors are third-party code, and the bytes may be anything.
            let read = AssertUnwindSafe(|| cursor.row(self.next, to, &mut limits));
            let read = catch_unwind(read).unwrap_or_else(|_| Fault::corrupt("its bytes made a decoder panic"));
            read.map_err(|fault| self.error(column, fault))?;
        }
        row.complete(1);
        (self.left, self.next) = (self.left - 1, self.next + 1);
        Ok(true)
    }

    /// Advances to the next row group; false after the last.
    fn next_group(&mut self) -> Result<bool, Error> {
        let Some(group) = self.footer.row_groups.get(self.groups) else { return Ok(false) };
        self.groups += 1;
        self.left = group.rows;
        // Once for each row group, the file is compared with the file that was opened.
        let handle = self.files.handle(0)?;
        self.columns = group.chunks.iter().map(|chunk| ChunkCursor::new(handle.clone(), chunk.clone())).collect();
        Ok(true)
    }

    fn error(&self, column: usize, fault: Fault) -> Error {
        let place = Location {
            path: self.files.path(0).to_owned(),
            row_group: self.groups.checked_sub(1),
            column: Some(self.names[column].clone()),
            rows: Some(self.next..self.next + 1),
        };
        self.files.changed_or(0, fault.at(place))
    }
}
