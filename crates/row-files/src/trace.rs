//! [`Trace`]: from the number of a row back to its file, its line and the columns that are not used.

use std::path::PathBuf;

use crate::column::Column;
use crate::convert::Conversion;
use crate::error::Error;
use crate::row::Row;
use crate::rows::Rows;

/// Rows of a [`Conversion`], found again by their numbers. The files are read once more, from their beginning.
pub struct Trace {
    conversion: Conversion,
    /// The names of the files, where others stand in for them.
    names: Vec<PathBuf>,
    /// Whether every row of the files has a number, as in files that are read in place. Otherwise only usable rows have one.
    counts_all: bool,
    /// The file that is being read.
    source: usize,
    rows: Option<Rows>,
    row: Row,
    /// The number of the next row.
    next: u64,
}

/// Where a row lies, and its columns that are not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub file: PathBuf,
    /// The line on which the row begins, from 1; for parquet the row, from 0.
    pub line: u64,
    /// The columns that are not used and have text.
    pub columns: Vec<(String, String)>,
}

impl Trace {
    /// Begins before the first row.
    pub fn new(conversion: Conversion, names: Vec<PathBuf>, counts_all: bool) -> Self {
        Self { conversion, names, counts_all, source: 0, rows: None, row: Row::default(), next: 0 }
    }

    /// Returns the origin of a row; `None` after the last one. Numbers rise from call to call.
    ///
    /// # Errors
    /// A file cannot be read again.
    pub fn origin(&mut self, number: u64) -> Result<Option<Origin>, Error> {
        while let Some((path, kind, pairing)) = self.conversion.sources.get(self.source) {
            let unused = pairing.unused(&kind.columns);
            let rows = match &mut self.rows {
                Some(rows) => rows,
                rows => {
                    let wanted = pairing.columns().into_iter().chain(unused.iter().map(Column::text));
                    rows.insert(Rows::open(path, kind, &wanted.collect::<Vec<_>>(), false)?)
                }
            };
            let Some(read) = rows.next(&mut self.row)? else {
                (self.rows, self.source) = (None, self.source + 1);
                continue;
            };
            if !self.counts_all && (read.is_err() || pairing.texts(&self.row).is_err()) {
                continue;
            }
            self.next += 1;
            if self.next <= number {
                continue;
            }
            let cells = self.row.cells.iter().skip(pairing.columns().len());
            let columns = unused.into_iter().zip(cells);
            let columns = columns.filter_map(|(name, cell)| Some((name, cell.text()?.to_owned()))).collect();
            let file = self.names.get(self.source).unwrap_or(path).clone();
            return Ok(Some(Origin { file, line: self.row.line, columns }));
        }
        Ok(None)
    }
}
