//! [`Rows`]: the rows of one file, one after the other, whatever its form.

use std::path::{Path, PathBuf};

use parquet_dataset::{Dataset, DatasetOptions};

use crate::MOST_ROW_BYTES;
use crate::columns::Column;
use crate::delimited::DelimitedRows;
use crate::error::{Error, RowError, RowFault};
use crate::input::{Compression, Digested, Input};
use crate::json::JsonRows;
use crate::kind::{Form, Kind};
use crate::row::{Cell, Row};

/// Rows of a parquet file that are read at a time.
const READ_ROWS: u64 = 1024;
/// Bytes of values that are read at a time.
const READ_BYTES: u64 = 1 << 20;

/// The rows of one file.
///
/// ```no_run
/// use row_files::{Chosen, Kind, Pairing, Row, Rows};
///
/// let path = "train.jsonl".as_ref();
/// let kind = Kind::of(path)?;
/// let pairing = Pairing::of(&kind.columns, &Chosen::default()).expect("known columns");
/// let mut rows = Rows::open(path, &kind, &pairing.columns(), false)?;
/// let mut row = Row::default();
/// while let Some(read) = rows.next(&mut row)? {
///     match read.and_then(|()| pairing.texts(&row).map_err(|fault| rows.error(&row, fault))) {
///         Ok([prompt, response]) => println!("{prompt} -> {response}"),
///         Err(error) => eprintln!("{error}"),
///     }
/// }
/// # Ok::<(), row_files::Error>(())
/// ```
pub struct Rows {
    path: PathBuf,
    reader: Reader,
}

enum Reader {
    Json(JsonRows),
    Delimited(DelimitedRows),
    Parquet(Box<ParquetRows>),
}

impl Rows {
    /// Opens a file to read the `wanted` columns of its rows. A column that it does not have is null in every row. With
    /// `digest` the bytes of a file that is no parquet are summed as they are read, for [`Rows::finish`].
    ///
    /// # Errors
    /// The file cannot be read, or is compressed parquet, which has to be unpacked.
    pub fn open(path: &Path, kind: &Kind, wanted: &[Column], digest: bool) -> Result<Self, Error> {
        let reader = match kind.form {
            Form::Json(layout) => Reader::Json(JsonRows::new(Input::open(path, digest)?, layout, wanted)),
            Form::Delimited(delimiter) => {
                Reader::Delimited(DelimitedRows::new(Input::open(path, digest)?, delimiter, wanted)?)
            }
            Form::Parquet if kind.compression == Compression::None => {
                Reader::Parquet(Box::new(ParquetRows::open(path, kind, wanted)?))
            }
            Form::Parquet => {
                return Err(Error::Format {
                    path: path.to_owned(),
                    what: "this is a compressed parquet file".to_owned(),
                    hint: "unpack it first: `gunzip FILE` or `zstd -d FILE`. Parquet is compressed inside",
                });
            }
        };
        Ok(Self { path: path.to_owned(), reader })
    }

    /// Reads the next row, or says why it is none; `None` at the end.
    ///
    /// # Errors
    /// Nothing more can be read.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowError>>, Error> {
        let read = match &mut self.reader {
            Reader::Json(rows) => rows.next(row)?,
            Reader::Delimited(rows) => rows.next(row)?,
            Reader::Parquet(rows) => rows.next(row)?,
        };
        Ok(read.map(|read| read.map_err(|fault| self.error(row, fault))))
    }

    /// A fault of a row, with its place.
    pub fn error(&self, row: &Row, fault: RowFault) -> RowError {
        RowError { path: self.path.clone(), line: row.line, is_row: matches!(self.reader, Reader::Parquet(_)), fault }
    }

    /// The share of the file that was read, between 0 and 1.
    #[expect(clippy::cast_precision_loss, reason = "a share of rows")]
    pub fn share_read(&self) -> f64 {
        match &self.reader {
            Reader::Json(rows) => rows.input().share_read(),
            Reader::Delimited(rows) => rows.input().share_read(),
            Reader::Parquet(rows) => {
                let all = rows.dataset.as_ref().map_or(0, Dataset::rows);
                rows.next as f64 / all.max(1) as f64
            }
        }
    }

    /// After the last row: the digest of the file, where it was asked for and the file is no parquet.
    ///
    /// # Errors
    /// The file changed while it was read, or cannot be read to its end.
    pub fn finish(self) -> Result<Option<Digested>, Error> {
        let input = match self.reader {
            Reader::Json(rows) => rows.into_input(),
            Reader::Delimited(rows) => rows.into_input(),
            Reader::Parquet(_) => return Ok(None),
        };
        input.finish().map(Some)
    }
}

/// Rows of a parquet file, in its order.
struct ParquetRows {
    dataset: Option<Dataset>,
    /// For each wanted column its place in the dataset.
    places: Vec<Option<usize>>,
    read: parquet_dataset::Rows,
    /// The first row of `read`.
    first: u64,
    /// The next row.
    next: u64,
    at_a_time: u64,
}

impl ParquetRows {
    fn open(path: &Path, kind: &Kind, wanted: &[Column]) -> Result<Self, Error> {
        let mut names: Vec<String> = Vec::new();
        let mut places = Vec::with_capacity(wanted.len());
        for Column { name, .. } in wanted {
            let is_there = kind.columns.contains(name);
            if is_there && !names.contains(name) {
                names.push(name.clone());
            }
            places.push(names.iter().position(|found| found == name).filter(|_| is_there));
        }
        let options = DatasetOptions { max_value_bytes: u64::MAX, ..DatasetOptions::new(names) };
        let dataset = match Dataset::open(&[path.to_owned()], &options) {
            Err(parquet_dataset::Error::NoRows { .. } | parquet_dataset::Error::NoColumns) => None,
            opened => Some(opened?),
        };
        let read = parquet_dataset::Rows::default();
        Ok(Self { dataset, places, read, first: 0, next: 0, at_a_time: READ_ROWS })
    }

    fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        let Some(dataset) = &self.dataset else { return Ok(None) };
        row.line = self.next;
        if self.next == self.first + self.read.len() as u64 {
            if self.next == dataset.rows() {
                return Ok(None);
            }
            self.read_more()?;
        }
        let index = (self.next - self.first) as usize;
        self.next += 1;
        row.cells.clear();
        for place in &self.places {
            let Some(bytes) = place.and_then(|place| self.read.bytes(place, index)) else {
                row.cells.push(Cell::Null);
                continue;
            };
            if bytes.len() > MOST_ROW_BYTES {
                return Ok(Some(Err(RowFault::TooLong)));
            }
            match std::str::from_utf8(bytes) {
                Ok(text) => row.cells.push(Cell::Text(text.to_owned())),
                Err(_) => return Ok(Some(Err(RowFault::NotUtf8))),
            }
        }
        Ok(Some(Ok(())))
    }

    /// Reads the next rows: as many as fit.
    fn read_more(&mut self) -> Result<(), Error> {
        let Some(dataset) = &self.dataset else { return Ok(()) };
        loop {
            let rows: Vec<u64> = (self.next..dataset.rows().min(self.next + self.at_a_time)).collect();
            let most = if rows.len() == 1 { u64::MAX } else { READ_BYTES };
            let part = |_, _, bytes: u64| 0..bytes.min(MOST_ROW_BYTES as u64 + 1);
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
