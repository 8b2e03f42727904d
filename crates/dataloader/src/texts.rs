//! The texts of files, one after the other, in little memory: what a tokenizer is trained on.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use parquet_dataset::{Dataset, DatasetOptions, Rows, inspect};

use crate::Error;

/// A longer line is taken in pieces of this many bytes.
const LINE_BYTES: u64 = 64 << 10;
/// Rows of a parquet file that are held at a time.
const READ_ROWS: u64 = 1024;

/// The texts of `inputs` in order: each line of a text file, each value of a parquet file's string columns.
///
/// A file is parquet if it begins like one. Of its columns, those in `columns` are taken, or all string columns
/// where `columns` is empty. Null and broken values are passed over, and broken bytes in lines are replaced: a
/// tokenizer's training needs no row in particular.
///
/// # Errors
/// [`Error::Text`] for a file that cannot be opened; reading errors come in place of texts.
pub fn texts_of_files(
    inputs: &[PathBuf],
    columns: &[String],
) -> Result<impl Iterator<Item = Result<String, Error>>, Error> {
    let files = inputs.iter().map(|path| open(path, columns)).collect::<Result<Vec<_>, _>>()?;
    Ok(files.into_iter().flatten())
}

fn open(path: &Path, columns: &[String]) -> Result<Box<dyn Iterator<Item = Result<String, Error>>>, Error> {
    let failed = |source| Error::Text { path: path.to_owned(), source };
    let mut reader = BufReader::new(File::open(path).map_err(failed)?);
    if !reader.fill_buf().map_err(failed)?.starts_with(b"PAR1") {
        return Ok(Box::new(Lines { path: path.to_owned(), reader, has_failed: false }));
    }
    let columns = match columns.is_empty() {
        false => columns.to_vec(),
        true => {
            let strings = inspect(path)?.columns.into_iter().filter(|column| column.is_string);
            strings.map(|column| column.name).collect()
        }
    };
    let dataset = Dataset::open(&[path.to_owned()], &DatasetOptions::new(columns))?;
    Ok(Box::new(Values::new(dataset)))
}

/// Lines of a text file, without their ends.
struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    has_failed: bool,
}

impl Iterator for Lines {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut line = Vec::new();
        if self.has_failed {
            return None;
        }
        match self.reader.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => None,
            Ok(_) => {
                let text = String::from_utf8_lossy(&line);
                Some(Ok(text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            Err(source) => {
                self.has_failed = true;
                Some(Err(Error::Text { path: self.path.clone(), source }))
            }
        }
    }
}

/// Values of a parquet file: row by row, in each row column by column.
struct Values {
    dataset: Dataset,
    rows: Rows,
    /// Values of `rows` that are still to come.
    left: Range<usize>,
    next_row: u64,
}

impl Values {
    fn new(dataset: Dataset) -> Self {
        Self { dataset, rows: Rows::default(), left: 0..0, next_row: 0 }
    }
}

impl Iterator for Values {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let columns = self.dataset.columns().len();
        loop {
            for value in self.left.by_ref() {
                if let Some(text) = self.rows.value(value % columns, value / columns).text() {
                    return Some(Ok(text.to_owned()));
                }
            }
            if self.next_row == self.dataset.rows() {
                return None;
            }
            let end = self.dataset.rows().min(self.next_row + READ_ROWS);
            match self.dataset.read(std::slice::from_ref(&(self.next_row..end))) {
                Ok(rows) => (self.left, self.rows, self.next_row) = (0..rows.len() * columns, rows, end),
                Err(error) => {
                    self.next_row = self.dataset.rows();
                    return Some(Err(error.into()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;
    use crate::{TokenizerTraining, train_tokenizer};

    fn texts(inputs: &[PathBuf], columns: &[&str]) -> Vec<String> {
        let columns: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
        texts_of_files(inputs, &columns).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn lines_and_values_come_in_order_and_bad_ones_are_passed_over() {
        let text = |text: &str| Some(text.as_bytes().to_vec());
        let rows = [(text("a"), text("b")), (None, text("d")), (Some(vec![0xff]), text("f"))];
        let files = Files::new().with(&rows, 2);
        let lines = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(lines.path(), b"one\r\n\ntwo \xff\nlast").unwrap();
        let inputs = [lines.path().to_owned(), files.paths()[0].clone()];
        assert_eq!(texts(&inputs, &[]), ["one", "", "two \u{fffd}", "last", "a", "b", "d", "f"]);
        assert_eq!(texts(&inputs[1..], &["response"]), ["b", "d", "f"]);
    }

    #[test]
    fn a_line_without_end_is_taken_in_pieces() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![b'a'; 200_000]).unwrap();
        let pieces = texts(&[file.path().to_owned()], &[]);
        assert_eq!(pieces.iter().map(String::len).collect::<Vec<_>>(), [65_536, 65_536, 65_536, 3392]);
    }

    #[test]
    fn long_files_are_read_to_their_last_row() {
        let files = Files::new().with_squares(2500, 700);
        let texts = texts(files.paths(), &["prompt"]);
        assert_eq!((texts.len(), texts[2499].as_str()), (2500, "2499 squared"));
    }

    #[test]
    fn missing_files_and_columns_are_typed_errors() {
        let missing = texts_of_files(&["no/such/file".into()], &[]).err().unwrap();
        assert!(missing.to_string().starts_with("no/such/file: "), "{missing}");
        let files = Files::new().with_squares(3, 10);
        let training = TokenizerTraining::default();
        let error = train_tokenizer(files.paths(), &["text".to_owned()], &training).unwrap_err();
        assert!(matches!(error, Error::Dataset(_)), "{error}");
    }

    #[test]
    fn a_tokenizer_is_trained_on_files() {
        let files = Files::new().with_squares(300, 100);
        let training = TokenizerTraining { vocab_size: 380, ..TokenizerTraining::default() };
        let trained = train_tokenizer(files.paths(), &[], &training).unwrap();
        assert_eq!(trained.texts, 600);
        let tokenizer = crate::Tokenizer::from_bytes(&trained.json, Path::new("t.json")).unwrap();
        assert_eq!(tokenizer.encode(" squared").unwrap().len(), 1);
    }
}
