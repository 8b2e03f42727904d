//! Texts of files, read one after the other in little memory, to train a tokenizer on.
//!
//! A file is parquet if it begins like one, rows if its name or its beginning indicates JSON, CSV or TSV, and text
//! otherwise. In parquet with lists of messages, the messages are the texts. Text is checked as it is read. If most of it is
//! not text (zero bytes, control characters, bytes that are not UTF-8), reading fails: a tokenizer trained on it would be
//! useless without any sign of it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use parquet_dataset::{Dataset, DatasetOptions, Residency, Rows};
use row_files::{Chosen, Compression, Encoding, FILE_EXTENSIONS, Form, Kind, Pairing, ReadOptions, Row, Unpaired};

use crate::Error;
use crate::row_text::as_text;

/// A longer line is taken in pieces of this many bytes.
const LINE_BYTES: usize = 64 << 10;
/// The most rows of a parquet file that are read at a time.
const READ_ROWS: u64 = 1024;
/// Bytes of values that are read at a time, and the most of one value.
const READ_BYTES: u64 = 1 << 20;
/// Only this much of a longer value is read: otherwise a single row would outweigh a corpus.
const MAX_VALUE_BYTES: u64 = 16 << 20;
/// Bytes of a text file that are read and checked at a time.
const BLOCK_BYTES: usize = 64 << 10;

/// The files that a tokenizer is trained on.
pub struct TextFiles {
    inputs: Vec<Input>,
    reading_bytes: u64,
}

enum Input {
    Lines(PathBuf, Option<Encoding>),
    Values(PathBuf, Vec<String>),
    Rows(PathBuf, Kind, Pairing),
}

/// Copies of the largest row that reading holds: the line, its texts, and room.
const ROW_COPIES: u64 = 3;

/// Bytes that reading other parquet than strings holds: one page for each of two columns, as stored and decompressed.
const PAGES_BYTES: u64 = 4 * (4 << 20);

impl TextFiles {
    /// Opens each file and checks that a parquet file has these columns. If no column is named, all string columns are
    /// read.
    ///
    /// # Errors
    /// [`Error::Text`] for a file that cannot be opened, [`Error::NotText`] for one that ends like a parquet file but does not
    /// begin like one, [`Error::Dataset`] for a parquet file that cannot be read or lacks a column.
    pub fn open(inputs: &[PathBuf], columns: &[String], options: &ReadOptions) -> Result<Self, Error> {
        let mut files = Self { inputs: Vec::with_capacity(inputs.len()), reading_bytes: BLOCK_BYTES as u64 };
        for path in inputs {
            let input = look_at(path, columns, options)?;
            if let Input::Values(path, columns) = &input {
                let dataset = dataset(path, columns)?;
                dataset.find_pages()?;
                let decoding = dataset.costs(Residency::UltraLowMem, 1).iter().map(|row| row.bytes).sum::<u64>();
                let read =
                    dataset.most_read_bytes(READ_ROWS as usize, READ_BYTES).min(READ_BYTES * columns.len() as u64);
                files.reading_bytes = files.reading_bytes.max(decoding + read * 9 / 4);
            }
            if let Input::Rows(path, kind, _) = &input {
                let bytes = regular_file::metadata(path).map_or(0, |file| file.len());
                let largest = match (kind.form, kind.compression) {
                    // The file may hold a row of any size.
                    (Form::Parquet, _) | (_, Compression::Gzip | Compression::Zstd) => row_files::MAX_ROW_BYTES as u64,
                    (_, Compression::None) => bytes.min(row_files::MAX_ROW_BYTES as u64),
                };
                let pages = if kind.form == Form::Parquet { PAGES_BYTES } else { 4 * BLOCK_BYTES as u64 };
                files.reading_bytes = files.reading_bytes.max(ROW_COPIES * largest + pages);
            }
            files.inputs.push(input);
        }
        Ok(files)
    }

    /// The most bytes that reading holds, one file at a time.
    pub fn reading_bytes(&self) -> u64 {
        self.reading_bytes
    }

    /// Returns the texts in order: each line of a text file, each value of a parquet file's columns. Long lines and values
    /// come in pieces. Null and broken values are skipped, and broken bytes in lines are replaced: training a tokenizer
    /// needs no particular row. Only the first 16 MiB of a longer value are read, and `long_values` counts that value.
    pub fn texts<'a>(
        &'a self,
        long_values: &'a std::cell::Cell<u64>,
    ) -> impl Iterator<Item = Result<String, Error>> + 'a {
        self.inputs.iter().flat_map(move |input| -> Box<dyn Iterator<Item = Result<String, Error>> + 'a> {
            match open(input, long_values) {
                Ok(texts) => texts,
                Err(error) => Box::new(std::iter::once(Err(error))),
            }
        })
    }
}

fn look_at(path: &Path, columns: &[String], options: &ReadOptions) -> Result<Input, Error> {
    let failed = |source| Error::Text { path: path.to_owned(), source };
    if let Some(input) = rows_of(path, columns, options)? {
        return Ok(input);
    }
    let mut file = regular_file::open(path).map_err(failed)?;
    let mut magic = [0; 4];
    let bytes = file.metadata().map_err(failed)?.len();
    let mut begins_and_ends = [false; 2];
    if bytes >= 8 {
        for (is_magic, place) in begins_and_ends.iter_mut().zip([SeekFrom::Start(0), SeekFrom::End(-4)]) {
            file.seek(place).and_then(|_| file.read_exact(&mut magic)).map_err(failed)?;
            *is_magic = magic == *b"PAR1";
        }
    }
    match begins_and_ends {
        [true, _] => {}
        [false, true] => {
            let reason = "it ends like a parquet file but does not begin like one: its beginning is damaged".to_owned();
            return Err(Error::NotText { path: path.to_owned(), reason });
        }
        [false, false] => return Ok(Input::Lines(path.to_owned(), options.encoding)),
    }
    let columns = match columns.is_empty() {
        false => columns.to_vec(),
        true => {
            let kind = Kind::detect(path, options)?;
            // Ids stored beside messages are not text to learn from.
            if let Ok(pairing @ Pairing::Chat { .. }) = Pairing::choose(&kind.columns, &Chosen::default()) {
                return Ok(Input::Rows(path.to_owned(), kind, pairing));
            }
            parquet_dataset::string_columns(path)?
        }
    };
    if !columns.is_empty() && !row_files::is_in_place(path, &columns) {
        let kind = Kind::detect(path, options)?;
        let is_there = columns.iter().all(|column| kind.columns.contains(column));
        if is_there {
            return Ok(Input::Rows(path.to_owned(), kind, Pairing::Each { columns }));
        }
    }
    Ok(Input::Values(path.to_owned(), columns))
}

/// Opens a file of rows (JSON, CSV or TSV by its name). If no column is named, reads its prompts and responses, or else all
/// columns.
fn rows_of(path: &Path, columns: &[String], options: &ReadOptions) -> Result<Option<Input>, Error> {
    let is_named = row_files::extension(path)
        .is_some_and(|extension| extension != "parquet" && FILE_EXTENSIONS.contains(&&*extension));
    if !is_named {
        return Ok(None);
    }
    let kind = Kind::detect(path, options)?;
    if kind.form == Form::Parquet {
        return Ok(None);
    }
    let pairing = match columns {
        [] => Pairing::choose(&kind.columns, &Chosen::default())
            .unwrap_or_else(|_| Pairing::Each { columns: kind.columns.clone() }),
        columns => Pairing::Each { columns: columns.to_vec() },
    };
    if let Some(missing) = pairing.columns().into_iter().find(|column| !kind.columns.contains(&column.name)) {
        let unpaired = Unpaired::Missing(missing.name);
        return Err(row_files::Error::unpaired(path, unpaired, kind.columns, None).into());
    }
    Ok(Some(Input::Rows(path.to_owned(), kind, pairing)))
}

fn dataset(path: &Path, columns: &[String]) -> Result<Dataset, Error> {
    Ok(Dataset::open(&[path.to_owned()], &DatasetOptions::new(columns.iter().cloned()))?)
}

fn open<'a>(
    input: &Input,
    long_values: &'a std::cell::Cell<u64>,
) -> Result<Box<dyn Iterator<Item = Result<String, Error>> + 'a>, Error> {
    Ok(match input {
        Input::Lines(path, encoding) => {
            let file = regular_file::open(path).map_err(|source| Error::Text { path: path.clone(), source })?;
            Box::new(Lines::new(path, file, *encoding))
        }
        Input::Values(path, columns) => Box::new(Values::new(dataset(path, columns)?, long_values)),
        Input::Rows(path, kind, pairing) => {
            let rows = row_files::Rows::open(path, kind, &pairing.columns(), false)?;
            Box::new(RowTexts { rows, pairing: pairing.clone(), row: Row::default(), left: Vec::new(), is_over: false })
        }
    })
}

/// A text file, checked block by block as it is read.
struct CheckedText {
    file: Box<dyn Read>,
}

impl Read for CheckedText {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.file.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match not_text(&buffer[..filled]) {
            Some(reason) => Err(io::Error::new(io::ErrorKind::InvalidData, reason)),
            None => Ok(filled),
        }
    }
}

/// Why a block of a file is not text; `None` for text of any language, even with a few broken bytes.
fn not_text(block: &[u8]) -> Option<String> {
    let share = |count: usize| 100.0 * count as f64 / block.len() as f64;
    let zeros = block.iter().filter(|&&byte| byte == 0).count();
    if zeros * 1000 > block.len() {
        return Some(format!("{:.1} % of its bytes are zero: binary data, or text in UTF-16", share(zeros)));
    }
    let is_control = |byte: &&u8| matches!(byte, 1..=8 | 14..=26 | 28..=31 | 127);
    let controls = block.iter().filter(is_control).count();
    let broken: usize = block.utf8_chunks().map(|chunk| chunk.invalid().len()).sum();
    if (controls + broken) * 10 > block.len() {
        let share = share(controls + broken);
        return Some(format!(
            "{share:.0} % of its bytes are control characters or not UTF-8: binary data, or another encoding"
        ));
    }
    None
}

/// Lines of a text file, without their ends.
struct Lines {
    path: PathBuf,
    reader: BufReader<CheckedText>,
    /// The beginning of a character whose end is in the next piece of its line.
    begun: Vec<u8>,
    is_over: bool,
}

impl Lines {
    fn new(path: &Path, file: File, encoding: Option<Encoding>) -> Self {
        let file: Box<dyn Read> = match encoding {
            Some(encoding) => encoding.decode(file),
            None => Box::new(file),
        };
        let reader = BufReader::with_capacity(BLOCK_BYTES, CheckedText { file });
        Self { path: path.to_owned(), reader, begun: Vec::new(), is_over: false }
    }

    fn failed(&mut self, source: io::Error) -> Error {
        self.is_over = true;
        let path = self.path.clone();
        match source.kind() {
            io::ErrorKind::InvalidData => Error::NotText { path, reason: source.to_string() },
            _ => Error::Text { path, source },
        }
    }
}

impl Iterator for Lines {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let mut line = std::mem::take(&mut self.begun);
        let room = LINE_BYTES - line.len();
        match self.reader.by_ref().take(room as u64).read_until(b'\n', &mut line) {
            Ok(0) if line.is_empty() => None,
            Ok(read) => {
                if read == room && !line.ends_with(b"\n") {
                    let whole = as_text(&line, false).map_or(line.len(), str::len);
                    self.begun = line.split_off(whole);
                }
                let text = String::from_utf8_lossy(&line);
                Some(Ok(text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            Err(source) => Some(Err(self.failed(source))),
        }
    }
}

/// Texts of rows. A broken row is an error; columns without text are skipped.
struct RowTexts {
    rows: row_files::Rows,
    pairing: Pairing,
    row: Row,
    /// Texts of the row that was read last, the last one first.
    left: Vec<String>,
    is_over: bool,
}

impl Iterator for RowTexts {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.left.is_empty() && !self.is_over {
            match self.rows.next(&mut self.row) {
                Ok(Some(Ok(()))) => self.left = self.pairing.all_texts(&mut self.row),
                Ok(Some(Err(error))) => {
                    self.is_over = true;
                    return Some(Err(row_files::Error::Row(error).into()));
                }
                Ok(None) => self.is_over = true,
                Err(error) => {
                    self.is_over = true;
                    return Some(Err(error.into()));
                }
            }
        }
        self.left.pop().map(Ok)
    }
}

/// Values of a parquet file: row by row, and within a row column by column.
struct Values<'a> {
    dataset: Dataset,
    long_values: &'a std::cell::Cell<u64>,
    rows: Rows,
    /// Values of `rows` that are still to come.
    left: Range<usize>,
    /// The rows that `rows` holds.
    read: Range<u64>,
    /// Rows to read next: fewer if rows are large.
    at_a_time: u64,
    /// The value that has more to read: its index in `rows`, and the bytes read so far.
    within: Option<(usize, u64)>,
}

impl<'a> Values<'a> {
    fn new(dataset: Dataset, long_values: &'a std::cell::Cell<u64>) -> Self {
        let (rows, left, read) = (Rows::default(), 0..0, 0..0);
        Self { dataset, long_values, rows, left, read, at_a_time: READ_ROWS, within: None }
    }

    /// Reads the next rows, as many as fit, with the beginning of each value.
    fn read_more(&mut self) -> Result<(), Error> {
        let start = self.read.end;
        let columns = self.dataset.columns().len();
        loop {
            let end = self.dataset.rows().min(start + self.at_a_time);
            let rows: Vec<u64> = (start..end).collect();
            let most = if rows.len() == 1 { u64::MAX } else { READ_BYTES };
            let part = |_, _, bytes: u64| 0..bytes.min(READ_BYTES);
            match self.dataset.read_parts_within(&rows, most, READ_BYTES, &part) {
                Err(error) if error.is_read_too_large() && rows.len() > 1 => self.at_a_time = rows.len() as u64 / 2,
                read => {
                    self.rows = read?;
                    self.left = 0..self.rows.len() * columns;
                    self.read = start..end;
                    self.at_a_time = READ_ROWS.min(self.at_a_time * 2);
                    return Ok(());
                }
            }
        }
    }

    /// The next piece of a long value.
    fn piece(&self, value: usize, from: u64) -> Result<Option<String>, Error> {
        let columns = self.dataset.columns().len();
        let (row, column) = (self.read.start + (value / columns) as u64, value % columns);
        let part = |_, of_column, bytes: u64| {
            if of_column == column { from..bytes.min(from + READ_BYTES) } else { 0..0 }
        };
        let rows = self.dataset.read_parts(&[row], 0, &part)?;
        Ok(rows.bytes(column, 0).and_then(|bytes| as_text(bytes, false).ok()).map(str::to_owned))
    }

    /// A value of the rows in memory, or the part of it that was read.
    fn value(&mut self, value: usize) -> Option<String> {
        let columns = self.dataset.columns().len();
        let (column, row) = (value % columns, value / columns);
        let (bytes, whole) = (self.rows.bytes(column, row)?, self.rows.value_bytes(column, row)?);
        let is_whole = bytes.len() as u64 == whole;
        let text = as_text(bytes, is_whole).ok()?;
        if !is_whole {
            self.within = Some((value, text.len() as u64));
            if whole > MAX_VALUE_BYTES {
                self.long_values.set(self.long_values.get() + 1);
            }
        }
        Some(text.to_owned())
    }
}

impl Iterator for Values<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((value, from)) = self.within.take().filter(|(_, from)| *from < MAX_VALUE_BYTES) {
                match self.piece(value, from) {
                    Ok(Some(text)) if !text.is_empty() => {
                        self.within = Some((value, from + text.len() as u64));
                        return Some(Ok(text));
                    }
                    Ok(_) => {}
                    Err(error) => return Some(Err(error)),
                }
            }
            while let Some(value) = self.left.next() {
                if let Some(text) = self.value(value) {
                    return Some(Ok(text));
                }
            }
            if self.read.end == self.dataset.rows() {
                return None;
            }
            if let Err(error) = self.read_more() {
                self.read.end = self.dataset.rows();
                return Some(Err(error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::testing::Files;
    use crate::{TokenizerTraining, train_tokenizer};

    fn texts(inputs: &[PathBuf], columns: &[&str]) -> Vec<String> {
        let columns: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
        let files = TextFiles::open(inputs, &columns, &ReadOptions::default()).unwrap();
        files.texts(&Cell::new(0)).map(Result::unwrap).collect()
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
        let missing = TextFiles::open(&["no/such/file".into()], &[], &ReadOptions::default()).err().unwrap();
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

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    /// The texts of a file, or why the file is refused.
    fn read(bytes: &[u8]) -> Result<Vec<String>, String> {
        let file = file(bytes);
        let files = TextFiles::open(&[file.path().to_owned()], &[], &ReadOptions::default())
            .map_err(|error| error.to_string())?;
        files.texts(&Cell::new(0)).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_no_text_is_refused_and_says_why() {
        let check = |bytes: &[u8], expected: &str| {
            let error = read(bytes).unwrap_err();
            assert!(error.contains(": not a text file: ") && error.contains(expected), "{error}");
        };
        let parquet = std::fs::read(Files::new().with_squares(2500, 700).paths()[0].clone()).unwrap();
        check(&parquet[1..], "ends like a parquet file");
        check(&[b"XXXX", &parquet[4..]].concat(), "ends like a parquet file");
        check(&parquet[1..parquet.len() - 4], "binary data");
        check(&[0; 4096], "100.0 % of its bytes are zero");
        let utf16: Vec<u8> = "text in UTF-16".encode_utf16().flat_map(u16::to_le_bytes).collect();
        check(&utf16, "UTF-16");
        let noise: Vec<u8> = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        check(&noise, "control characters or not UTF-8");
        // Good text at the beginning does not make up for bad bytes later.
        check(&[&b"a line of text\n".repeat(20_000)[..], &[0x91; 200_000]].concat(), "another encoding");
    }

    #[test]
    fn text_in_a_named_encoding_is_read_in_lines_and_in_rows() {
        let options = ReadOptions { encoding: Encoding::of_name("windows-1252"), ..ReadOptions::default() };
        let read = |bytes: &[u8], ending: &str| {
            let file = tempfile::Builder::new().suffix(ending).tempfile().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            let files = TextFiles::open(&[file.path().to_owned()], &[], &options).unwrap();
            files.texts(&Cell::new(0)).collect::<Result<Vec<_>, _>>().unwrap()
        };
        assert_eq!(read(b"J\xfcrgen\nna\xefve", ".txt"), ["Jürgen", "naïve"]);
        assert_eq!(read(b"prompt,response\nJ\xfcrgen,caf\xe9\n", ".csv"), ["Jürgen", "café"]);
    }

    #[test]
    fn text_in_any_language_is_read_though_some_bytes_of_it_are_broken() {
        let lines = [
            "naïve café",
            "训练器会减小微批大小。",
            "ὕδωρ",
            "\u{1f469}\u{200d}\u{1f467}",
            "tab\there",
            "\u{1b}[1mbold\u{1b}[0m",
        ];
        let text = lines.join("\n").repeat(2000);
        let expected: Vec<String> = text.split('\n').map(str::to_owned).collect();
        assert_eq!(read(text.as_bytes()).unwrap(), expected);
        let mut broken = text.into_bytes();
        (0..broken.len()).step_by(500).for_each(|at| broken[at] = 0xff);
        assert!(read(&broken).is_ok());
        assert_eq!(read(b"").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_line_that_is_taken_in_pieces_loses_no_character() {
        let line = "天地人".repeat(30_000);
        assert_eq!(read(line.as_bytes()).unwrap().concat(), line);
    }

    #[test]
    fn a_long_value_comes_in_pieces_and_an_enormous_one_is_counted() {
        let long = "天地人 ".repeat(300_000);
        let text = |text: &str| Some(text.as_bytes().to_vec());
        let rows = [(text("a"), text(&long)), (text(&"b".repeat(17 << 20)), text("end"))];
        let written = Files::new().with(&rows, 2);
        let files = TextFiles::open(written.paths(), &[], &ReadOptions::default()).unwrap();
        let long_values = Cell::new(0);
        let texts: Vec<String> = files.texts(&long_values).map(Result::unwrap).collect();
        assert!(texts.iter().all(|text| text.len() <= READ_BYTES as usize));
        let all = texts.concat();
        assert_eq!(all.len(), 1 + long.len() + MAX_VALUE_BYTES as usize + 3);
        assert!(all.starts_with(&format!("a{long}b")) && all.ends_with("bend"));
        assert_eq!(long_values.get(), 1);
        assert!(files.reading_bytes() < 24 << 20, "{}", files.reading_bytes());
    }

    #[test]
    fn rows_of_other_forms_give_the_texts_of_their_columns() {
        let directory = tempfile::tempdir().unwrap();
        let with = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            vec![path]
        };
        let pairs = "{\"prompt\":\"a\",\"id\":\"x\",\"response\":\"b\"}\n{\"prompt\":null,\"response\":\"c\"}\n";
        assert_eq!(texts(&with("a.jsonl", pairs), &[]), ["a", "b", "c"]);
        assert_eq!(texts(&with("a.jsonl", pairs), &["id"]), ["x"]);
        assert_eq!(texts(&with("a.csv", "foo,bar\n1,\"2\n3\"\n"), &[]), ["1", "2\n3"]);
        assert_eq!(texts(&with("a.txt", "foo,bar\n1\n"), &[]), ["foo,bar", "1"]);
        let error =
            TextFiles::open(&with("a.jsonl", pairs), &["none".to_owned()], &ReadOptions::default()).err().unwrap();
        assert!(error.to_string().contains("no column `none`"), "{error}");
        let files =
            TextFiles::open(&with("a.jsonl", "{\"prompt\": 1}\n{\n"), &["prompt".to_owned()], &ReadOptions::default())
                .unwrap();
        let error = files.texts(&Cell::new(0)).find_map(Result::err).unwrap();
        assert!(error.to_string().contains("a.jsonl:2: not valid JSON"), "{error}");
    }
}
