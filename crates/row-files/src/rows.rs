//! [`Rows`]: the rows of one file in any form, one after the other.

use std::path::{Path, PathBuf};

use crate::arrow_rows::ArrowRows;
use crate::column::Column;
use crate::delimited::{DelimitedRows, Notes};
use crate::error::{Error, RowError, RowFault};
use crate::fasta::FastaRows;
use crate::input::{Compression, Digested, Input};
use crate::json::JsonRows;
use crate::kind::{Form, Kind, row_error};
use crate::options::ReadOptions;
use crate::parquet_rows::ParquetRows;
use crate::row::{Row, has_answers, written_answer};

/// The rows of one file.
///
/// ```no_run
/// use row_files::{Chosen, Kind, Pairing, ReadOptions, Row, Rows};
///
/// let path = "train.jsonl".as_ref();
/// let kind = Kind::detect(path, &ReadOptions::default())?;
/// let pairing = Pairing::choose(&kind.columns, &Chosen::default()).expect("known columns");
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
    options: ReadOptions,
    reader: Reader,
    /// The places of columns with the answers to questions.
    answers: Vec<usize>,
}

enum Reader {
    Json(JsonRows),
    Delimited(DelimitedRows),
    Fasta(Box<FastaRows>),
    Parquet(Box<ParquetRows>),
    Arrow(Box<ArrowRows>),
}

impl Rows {
    /// Opens a file to read the `wanted` columns of its rows. A column that the file lacks is null in every row. With
    /// `digest`, the bytes of a file other than parquet are hashed as they are read, for [`Rows::finish`].
    ///
    /// # Errors
    /// The file cannot be read, or is compressed parquet, which has to be unpacked.
    pub fn open(path: &Path, kind: &Kind, wanted: &[Column], digest: bool) -> Result<Self, Error> {
        let reader = match kind.form {
            Form::Json(layout) => {
                Reader::Json(JsonRows::new(Input::open(path, &kind.options, digest)?, layout, wanted))
            }
            Form::Delimited(delimiter) => {
                let input = Input::open(path, &kind.options, digest)?;
                Reader::Delimited(DelimitedRows::new(input, delimiter, kind.options.quoting, wanted)?)
            }
            Form::Fasta => Reader::Fasta(Box::new(FastaRows::open(path, &kind.options, digest, wanted)?)),
            Form::Parquet if kind.compression == Compression::None => match ParquetRows::open(path, kind, wanted)? {
                Some(rows) => Reader::Parquet(Box::new(rows)),
                None => Reader::Arrow(Box::new(ArrowRows::open(path, kind, wanted)?)),
            },
            Form::Parquet => {
                return Err(Error::Format {
                    path: path.to_owned(),
                    what: "this is a compressed parquet file".to_owned(),
                    hint: "unpack it first: `gunzip FILE` or `zstd -d FILE`. Parquet is compressed inside",
                });
            }
        };
        let answers = wanted.iter().enumerate().filter(|(_, column)| has_answers(&column.name)).map(|(place, _)| place);
        Ok(Self { path: path.to_owned(), options: kind.options, reader, answers: answers.collect() })
    }

    /// Reads the next row, or returns why it cannot be used; `None` at the end.
    ///
    /// # Errors
    /// The rest of the file cannot be read.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowError>>, Error> {
        let read = match &mut self.reader {
            Reader::Json(rows) => rows.next(row)?,
            Reader::Delimited(rows) => rows.next(row)?,
            Reader::Fasta(rows) => rows.next(row)?,
            Reader::Parquet(rows) => rows.next(row)?,
            Reader::Arrow(rows) => rows.next(row)?,
        };
        for place in &self.answers {
            if let Some(cell) = row.cells.get_mut(*place)
                && let Some(answer) = cell.text().and_then(written_answer)
            {
                *cell = answer;
            }
        }
        Ok(read.map(|read| read.map_err(|fault| self.error(row, fault))))
    }

    /// Adds the place to a row's fault.
    pub fn error(&self, row: &Row, fault: RowFault) -> RowError {
        let is_row = matches!(self.reader, Reader::Parquet(_) | Reader::Arrow(_));
        match is_row {
            true => RowError { path: self.path.clone(), line: row.line, is_row, fault },
            false => row_error(&self.path, row.line, fault, &self.options),
        }
    }

    /// From here on columns of JSON beside these are noticed.
    pub fn notice_columns_beside(&mut self, columns: &[String]) {
        if let Reader::Json(rows) = &mut self.reader {
            rows.notice_columns_beside(columns);
        }
    }

    /// The columns that the rows since the last call were the first to have, if they are noticed.
    pub fn take_late_columns(&mut self) -> Vec<String> {
        if let Reader::Json(rows) = &mut self.reader { rows.take_late_columns() } else { Vec::new() }
    }

    /// The fraction of the file that was read, between 0 and 1.
    #[expect(clippy::cast_precision_loss, reason = "a share of rows")]
    pub fn share_read(&self) -> f64 {
        match &self.reader {
            Reader::Json(rows) => rows.input().share_read(),
            Reader::Delimited(rows) => rows.input().share_read(),
            Reader::Fasta(rows) => rows.input().share_read(),
            Reader::Parquet(rows) => rows.next_row() as f64 / rows.rows().max(1) as f64,
            Reader::Arrow(rows) => rows.next_row() as f64 / rows.rows().max(1) as f64,
        }
    }

    /// What was noticed about the quotes of a CSV or TSV so far.
    pub fn notes(&self) -> Option<&Notes> {
        if let Reader::Delimited(rows) = &self.reader { Some(rows.notes()) } else { None }
    }

    /// Returns the file's digest after the last row, if it was requested and the file is not parquet.
    ///
    /// # Errors
    /// The file changed while it was read, or cannot be read to its end.
    pub fn finish(self) -> Result<Option<Digested>, Error> {
        let input = match self.reader {
            Reader::Json(rows) => rows.into_input(),
            Reader::Delimited(rows) => rows.into_input(),
            Reader::Fasta(rows) => {
                let (sequences, labels) = rows.into_inputs();
                let (sequences, labels) = (sequences.finish()?, labels.map(Input::finish).transpose()?);
                return Ok(Some(sequences.with_labels(labels)));
            }
            Reader::Parquet(_) | Reader::Arrow(_) => return Ok(None),
        };
        input.finish().map(Some)
    }
}
