//! Rows of FASTA: sequences of residues, each behind a line that names it.
//!
//! ```text
//! >P12345 TARGET=membrane SET=train
//! MKTAYIAK
//! QRQISFVK
//! ```
//!
//! A row has `id`, `sequence` (its lines joined, in capital letters), `text` (its letters apart, and X for the rare residues U, Z, O and B, as encoders of proteins
//! read it; Elnaggar et al., 2021, arXiv 2007.06225), and a column for each `KEY=VALUE` of the line that names it, in lower case. A file `NAME.labels.fasta`
//! beside `NAME.fasta` has the labels of residues, behind the same names in the same order: they are the column `labels`.

use std::path::Path;

use crate::column::Column;
use crate::error::{Error, RowFault, shortened};
use crate::fasta_files::labels_beside;
use crate::input::Input;
use crate::options::ReadOptions;
use crate::row::{Cell, Row};

/// Columns of every file.
const USUAL: [&str; 3] = ["id", "sequence", "text"];
const LABELS: &str = "labels";
/// Records whose attributes are columns.
const PROBE_RECORDS: usize = 100;
/// The most columns.
const MAX_COLUMNS: usize = 64;

/// A sequence, or the labels of one.
#[derive(Default)]
struct Record {
    /// The line that names it, without `>`.
    title: String,
    /// Its letters.
    letters: String,
    /// The line that names it, from 1.
    line: u64,
}

impl Record {
    fn id(&self) -> &str {
        self.title.split_whitespace().next().unwrap_or_default()
    }

    /// The name in messages.
    fn shown(&self) -> String {
        shortened(self.id())
    }

    /// The attributes of its title.
    fn attributes(&self) -> impl Iterator<Item = (String, &str)> {
        let words = self.title.split_whitespace().skip(1).filter_map(|word| word.split_once('='));
        words.filter(|(key, _)| !key.is_empty()).map(|(key, value)| (key.to_lowercase(), value))
    }
}

/// The records of a file.
struct Records {
    input: Input,
    /// The title of the next record, which is on the last line that was read.
    next: Option<String>,
    /// Lines that were read.
    line: u64,
}

impl Records {
    fn new(input: Input) -> Self {
        Self { input, next: None, line: 0 }
    }

    /// Reads the next record; `None` at the end.
    fn next(&mut self, record: &mut Record) -> Result<Option<Result<(), RowFault>>, Error> {
        (record.title, record.letters, record.line) = (self.next.take().unwrap_or_default(), String::new(), self.line);
        let mut is_begun = self.line > 0 && !record.title.is_empty();
        let mut fault = None;
        let mut line = Vec::new();
        loop {
            line.clear();
            let Some(is_whole) = self.input.read_line(&mut line)? else { break };
            self.line += 1;
            let Ok(text) = std::str::from_utf8(&line).map(str::trim) else {
                fault = fault.or(Some(RowFault::NotUtf8(None)));
                continue;
            };
            if let Some(title) = text.strip_prefix('>') {
                // A name may be empty, and then it is not the end of the file.
                let title = if title.trim().is_empty() { "?".to_owned() } else { title.trim().to_owned() };
                if is_begun {
                    self.next = Some(title);
                    break;
                }
                (record.title, record.line, is_begun) = (title, self.line, true);
            } else if !text.is_empty() {
                if !is_begun {
                    (record.line, is_begun) = (self.line, true);
                    fault = fault.or(Some(RowFault::NoSequence("a sequence without a name".to_owned())));
                }
                if !is_whole || record.letters.len() + text.len() > self.input.most_row_bytes() {
                    fault = fault.or(Some(RowFault::TooLong(self.input.most_row_bytes())));
                    continue;
                }
                record.letters.push_str(text);
            }
        }
        if !is_begun {
            return Ok(None);
        }
        if fault.is_none() && record.letters.is_empty() {
            fault = Some(RowFault::NoSequence(format!("`{}` has no sequence", record.shown())));
        }
        Ok(Some(fault.map_or(Ok(()), Err)))
    }
}

/// Rows of a FASTA file.
pub(crate) struct FastaRows {
    records: Records,
    labels: Option<Records>,
    record: Record,
    label: Record,
    wanted: Vec<String>,
}

impl FastaRows {
    /// Opens the file, and that of its labels.
    pub fn open(path: &Path, options: &ReadOptions, digest: bool, wanted: &[Column]) -> Result<Self, Error> {
        let open = |path: &Path| Input::open(path, options, digest).map(Records::new);
        let labels = labels_beside(path).map(|labels| open(&labels)).transpose()?;
        Ok(Self {
            records: open(path)?,
            labels,
            record: Record::default(),
            label: Record::default(),
            wanted: wanted.iter().map(|column| column.name.clone()).collect(),
        })
    }

    /// The columns of the file.
    pub fn columns(path: &Path, options: &ReadOptions) -> Result<Vec<String>, Error> {
        let mut rows = Self::open(path, options, false, &[])?;
        let mut columns: Vec<String> = USUAL.map(str::to_owned).to_vec();
        columns.extend(rows.labels.as_ref().map(|_| LABELS.to_owned()));
        for _ in 0..PROBE_RECORDS {
            if rows.records.next(&mut rows.record)?.is_none() {
                break;
            }
            for (name, _) in rows.record.attributes() {
                if !columns.contains(&name) && columns.len() < MAX_COLUMNS {
                    columns.push(name);
                }
            }
        }
        Ok(columns)
    }

    pub fn input(&self) -> &Input {
        &self.records.input
    }

    /// The inputs of the sequences and of their labels.
    pub fn into_inputs(self) -> (Input, Option<Input>) {
        (self.records.input, self.labels.map(|labels| labels.input))
    }

    /// Reads the next row; `None` at the end.
    pub fn next(&mut self, row: &mut Row) -> Result<Option<Result<(), RowFault>>, Error> {
        row.cells.clear();
        let read = self.records.next(&mut self.record)?;
        let labels = self.labels.as_mut().map(|labels| labels.next(&mut self.label)).transpose()?;
        row.line = self.record.line;
        let Some(read) = read else {
            return Ok(labels.flatten().map(|_| {
                row.line = self.records.line;
                Err(RowFault::NoSequence(format!("the labels of `{}` have no sequence", self.label.shown())))
            }));
        };
        Ok(Some(read.and_then(|()| self.fill(row, labels))))
    }

    fn fill(&self, row: &mut Row, labels: Option<Option<Result<(), RowFault>>>) -> Result<(), RowFault> {
        let id = self.record.id();
        match labels {
            None => {}
            Some(Some(Ok(()))) if self.label.id() == id => {}
            Some(Some(Err(fault))) => return Err(fault),
            Some(found) => {
                let got = found.map_or("the end of the file".to_owned(), |_| format!("`{}`", self.label.shown()));
                let problem = format!(
                    "expected the labels of `{}` in its file of labels, NAME.labels.fasta, got {got}",
                    self.record.shown()
                );
                return Err(RowFault::NoSequence(problem));
            }
        }
        // An asterisk ends a translation.
        let sequence = self.record.letters.trim_end_matches('*').to_ascii_uppercase();
        if let Some(other) = sequence.chars().find(|letter| !letter.is_ascii_alphabetic()) {
            return Err(RowFault::NoSequence(format!("`{}` is no residue", other.escape_debug())));
        }
        let cell = |name: &String| -> Cell {
            match name.as_str() {
                "id" => Cell::Text(id.to_owned()),
                "sequence" => Cell::Text(sequence.clone()),
                "text" => Cell::Text(apart(&sequence)),
                LABELS if self.labels.is_some() => Cell::Text(self.label.letters.clone()),
                name => {
                    let value = self.record.attributes().find(|(key, _)| key == name);
                    value.map_or(Cell::Null, |(_, value)| Cell::Text(value.to_owned()))
                }
            }
        };
        row.cells.extend(self.wanted.iter().map(cell));
        Ok(())
    }
}

/// The letters of a sequence with blanks between them, and X for rare residues.
fn apart(sequence: &str) -> String {
    let mut text = String::with_capacity(2 * sequence.len());
    for letter in sequence.chars() {
        text.extend((!text.is_empty()).then_some(' '));
        text.push(if "UZOB".contains(letter) { 'X' } else { letter });
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::{Column, Kind, ReadOptions, Row, Rows};

    fn read(files: &[(&str, &str)], columns: &[&str]) -> (Vec<String>, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        let path = directory.path().join(files[0].0);
        let kind = Kind::detect(&path, &ReadOptions::default()).unwrap();
        let wanted: Vec<Column> = columns.iter().map(|name| Column::text(*name)).collect();
        let mut rows = Rows::open(&path, &kind, &wanted, true).unwrap();
        let (mut row, mut found) = (Row::default(), Vec::new());
        while let Some(read) = rows.next(&mut row).unwrap() {
            found.push(match read {
                Ok(()) => row.cells.iter().map(|cell| cell.text().unwrap_or("-")).collect::<Vec<_>>().join("|"),
                Err(error) => error.to_string().rsplit('/').next().unwrap().to_owned(),
            });
        }
        assert_eq!(rows.finish().unwrap().unwrap(), crate::digest(&path).unwrap());
        (kind.columns, found)
    }

    #[test]
    fn sequences_have_their_letters_apart_and_the_attributes_of_their_names() {
        let text = "\n>P1 TARGET=membrane SET=train\nMKu\nZv*\n\n>P2 an enzyme, target=other\nOB\r\n>\nA\n";
        let (columns, rows) = read(&[("a.fasta", text)], &["id", "sequence", "text", "target"]);
        assert_eq!(columns, ["id", "sequence", "text", "target", "set"]);
        assert_eq!(rows, ["P1|MKUZV|M K X X V|membrane", "P2|OB|X X|other", "?|A|A|-"]);
    }

    #[test]
    fn labels_of_residues_are_in_a_file_beside_with_the_same_names() {
        let sequences = ">P1\nMKV\nA\n>P2\nGG\n";
        let labels = ("a.labels.fasta", ">P1 of a structure\nHHE\nC\n>P2\nCC\n");
        let (columns, rows) = read(&[("a.fasta", sequences), labels], &["sequence", "labels"]);
        assert_eq!(columns, ["id", "sequence", "text", "labels"]);
        assert_eq!(rows, ["MKVA|HHEC", "GG|CC"]);
        let (_, rows) = read(&[("a.fasta", sequences), ("a.labels.fasta", ">P1\nHHEC\n>P3\nCC\n")], &["labels"]);
        assert!(rows[1].contains("expected the labels of `P2`") && rows[1].contains("got `P3`"), "{rows:?}");
        let (_, rows) = read(&[("a.fasta", sequences), ("a.labels.fasta", ">P1\nHHEC\n")], &["labels"]);
        assert!(rows[1].contains("got the end of the file"), "{rows:?}");
        let (_, rows) = read(&[("a.fasta", ">P1\nMK\n"), ("a.labels.fasta", ">P1\nHH\n>P2\nC\n")], &["labels"]);
        assert!(rows[1].contains("the labels of `P2` have no sequence"), "{rows:?}");
    }

    #[test]
    fn lines_that_are_no_sequences_are_named() {
        for (text, at, words) in [
            ("MKV\n>b\nA\n", 0, "a.fasta:1: a sequence without a name"),
            (">a\n>b\nMK\n", 0, "a.fasta:1: `a` has no sequence"),
            (">b\nMK\n>a\n", 1, "a.fasta:3: `a` has no sequence"),
            (">a\nMK-V\n", 0, "a.fasta:1: `-` is no residue"),
        ] {
            let (_, rows) = read(&[("a.fasta", text)], &["sequence"]);
            assert!(rows[at].contains(words), "{text}: {rows:?}");
        }
    }
}
