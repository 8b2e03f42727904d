//! [`Conversion`]: the rows of several files as pairs of texts, one after the other, for training or for validation.
//!
//! A row goes through these steps: its texts are taken from its columns, cleaned, compared with earlier rows, and assigned to
//! training or validation. Rows that a step leaves out are counted there. A split by a count or a share needs the number of
//! remaining rows, so the files are then read twice.

mod pass;

use std::path::PathBuf;
use std::sync::Arc;

use crate::chat::Fits;
use crate::columns::{Chosen, Pairing};
use crate::delimited::Notes;
use crate::duplicates::Duplicates;
use crate::error::{Error, RowError, RowFault};
use crate::input::Digested;
use crate::kind::{Kind, file_bytes};
use crate::labels::Labels;
use crate::lists::{ListCounts, Written};
use crate::options::ReadOptions;
use crate::split::{Share, Split};

use pass::{Pass, Reach};

/// Treatment of rows that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BadRows {
    /// A malformed row ends the conversion. A row without text in a column is left out and counted.
    #[default]
    Usual,
    /// Both kinds of rows end the conversion.
    Error,
    /// Both kinds of rows are left out and counted.
    Skip,
}

impl BadRows {
    fn is_error(self, fault: &RowFault) -> bool {
        match self {
            Self::Usual => fault.is_malformed(),
            Self::Error => true,
            Self::Skip => false,
        }
    }
}

/// The files of a conversion, with their kinds and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// Each file with its kind, and the columns of its texts. Files of one kind share it.
    pub sources: Vec<(PathBuf, Arc<Kind>, Arc<Pairing>)>,
    /// What the columns were chosen by.
    chosen: Chosen,
}

/// The steps that rows go through.
#[derive(Clone, Copy)]
pub struct Settings<'a> {
    /// Treatment of rows that cannot be used.
    pub bad_rows: BadRows,
    /// Whether texts are cleaned.
    pub clean: bool,
    /// Makes an empty table of duplicates; `None` keeps duplicates.
    pub duplicates: Option<&'a dyn Fn() -> Duplicates>,
    /// Whether a prompt is short enough; a chat that is not loses its oldest turns. `None`: all are.
    pub fits: Option<Fits<'a>>,
    /// Rows for validation, and the seed of their choice.
    pub validation: Option<(Share, u64)>,
    /// The most rows to read, if an estimate is enough.
    pub max_rows: Option<u64>,
    /// Called now and then; true stops the conversion.
    pub stop: &'a dyn Fn() -> bool,
    /// Called now and then with the progress.
    pub progress: &'a dyn Fn(&Counts),
}

impl Default for Settings<'_> {
    fn default() -> Self {
        let (stop, progress) = (&|| false, &|_: &Counts| ());
        Self {
            bad_rows: BadRows::default(),
            clean: false,
            duplicates: None,
            fits: None,
            validation: None,
            max_rows: None,
            stop,
            progress,
        }
    }
}

/// Rows of a conversion, counted by their outcome.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Rows of the files.
    pub read: u64,
    /// Rows of each file that was read to its end.
    pub of_files: Vec<u64>,
    /// Rows for training of each such file.
    pub kept_of_files: Vec<u64>,
    /// Rows left out because they are malformed.
    pub malformed: u64,
    /// Rows left out because a column is null or empty.
    pub empty: u64,
    /// Chats that lost their oldest turns, because they were too long.
    pub shortened_chats: u64,
    /// The turns that they lost.
    pub left_out_turns: u64,
    /// Chats with a message that has more than its text, which is left out.
    pub chats_with_more: u64,
    /// Rows that cleaning changed.
    pub cleaned: u64,
    /// Rows left out because they are duplicates.
    pub duplicates: u64,
    /// The targets of kept rows, if they are labels.
    pub labels: Labels,
    /// What was noticed about lists.
    pub lists: ListCounts,
    /// The most bytes of a row's texts.
    pub longest: u64,
    /// What was noticed about quotes, with the file, for the first file of which something was.
    pub notes: Option<(PathBuf, Notes)>,
    /// Rows of the files that were kept, for training and for validation. A row of two answers may give two rows.
    pub kept: u64,
    /// Rows for training.
    pub train: u64,
    /// Rows for validation.
    pub validation: u64,
    /// The first row that was left out as malformed or empty.
    pub first_bad: Option<RowError>,
    /// The digests of the files, in their order; `None` for parquet.
    pub digests: Vec<Option<Digested>>,
    /// The fraction of the files' bytes that was read: 1, unless [`Settings::max_rows`] ended the reading.
    pub share: f64,
}

impl Counts {
    /// The use of the next row, which is counted, perhaps as two.
    fn next_part(&mut self, split: Split, is_two: bool) -> Part {
        let (part, count) = match split.is_validation(self.kept) {
            true => (Part::Validation, &mut self.validation),
            false => (Part::Train, &mut self.train),
        };
        self.kept += 1;
        *count += if is_two { 2 } else { 1 };
        part
    }

    /// Passes a list on.
    fn place(&mut self, list: Written, split: Split, sink: &mut Sink<'_>) -> Result<(), Error> {
        self.longest = self.longest.max(list.iter().map(|text| text.len() as u64).sum());
        sink(self.next_part(split, false), list, None)
    }

    /// Counts a row that cannot be used.
    fn refuse(&mut self, error: RowError, bad_rows: BadRows) -> Result<(), Error> {
        if bad_rows.is_error(&error.fault) {
            return Err(Error::Row(error));
        }
        *(if error.fault.is_malformed() { &mut self.malformed } else { &mut self.empty }) += 1;
        self.first_bad.get_or_insert(error);
        Ok(())
    }
}

/// Takes the texts of a row: see [`Conversion::run`].
pub type Sink<'a> = dyn FnMut(Part, [String; 2], Option<String>) -> Result<(), Error> + 'a;

/// The use of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Training.
    Train,
    /// Validation.
    Validation,
}

impl Conversion {
    /// Reads the kinds and columns of files.
    ///
    /// # Errors
    /// A file cannot be read, has no known kind, or lacks the columns; or some files hold pairs and others texts.
    pub fn new(paths: &[PathBuf], chosen: &Chosen, options: &ReadOptions) -> Result<Self, Error> {
        let mut sources: Vec<(PathBuf, Arc<Kind>, Arc<Pairing>)> = Vec::with_capacity(paths.len());
        for path in paths {
            let kind = Kind::detect(path, options)?;
            if let Some((_, shared, pairing)) = sources.last().filter(|(_, last, _)| **last == kind) {
                let (kind, pairing) = (Arc::clone(shared), Arc::clone(pairing));
                sources.push((path.clone(), kind, pairing));
                continue;
            }
            let pairing = match Pairing::choose(&kind.columns, chosen) {
                Ok(pairing) => pairing,
                Err(unpaired) => {
                    let delimiter = kind.dialect().map(|(delimiter, _)| delimiter);
                    return Err(Error::unpaired(path, unpaired, kind.columns, delimiter));
                }
            };
            sources.push((path.clone(), Arc::new(kind), Arc::new(pairing)));
        }
        let find = |is_text| sources.iter().find(|(.., pairing)| pairing.is_text() == is_text);
        match (find(true), find(false)) {
            (Some((text, ..)), Some((pairs, ..))) => Err(Error::Mixed { text: text.clone(), pairs: pairs.clone() }),
            _ => Ok(Self { sources, chosen: chosen.clone() }),
        }
    }

    /// The kinds of the files, each once where files of one kind follow each other.
    pub fn kinds(&self) -> impl Iterator<Item = (&Kind, &Pairing)> {
        let is_new = |at: usize| at == 0 || !Arc::ptr_eq(&self.sources[at - 1].1, &self.sources[at].1);
        let sources = self.sources.iter().enumerate().filter(move |(at, _)| is_new(*at));
        sources.map(|(_, (_, kind, pairing))| (&**kind, &**pairing))
    }

    /// Whether a row is one text instead of a pair.
    pub fn is_text(&self) -> bool {
        self.sources.first().is_some_and(|(.., pairing)| pairing.is_text())
    }

    /// Reads all rows and passes them to `sink`: the part, the prompt and the response, and the rejected answer or the label of a preference. For a
    /// text, the prompt is empty.
    ///
    /// # Errors
    /// Errors of reading and of `sink`, and [`Error::Row`] for a row that cannot be used, depending on
    /// [`Settings::bad_rows`].
    pub fn run(&self, settings: &Settings<'_>, sink: &mut Sink<'_>) -> Result<Counts, Error> {
        let split = match settings.validation {
            None => Split::new(0, 0, 0),
            Some((share, seed)) => {
                let counts = self.each(settings, Split::new(0, 0, 0), &mut |_, _, _| Ok(()))?;
                Split::new(seed, counts.kept, share.rows(counts.kept))
            }
        };
        self.each(settings, split, sink)
    }

    fn each(&self, settings: &Settings<'_>, split: Split, sink: &mut Sink<'_>) -> Result<Counts, Error> {
        let mut pass = Pass::new(self, settings, split);
        for source in &self.sources {
            if pass.file(source, sink)? == Reach::Limit {
                return pass.end(sink);
            }
        }
        pass.all_read();
        pass.end(sink)
    }

    /// The most bytes that a row can have: those of the largest file, or [`MAX_ROW_BYTES`](crate::MAX_ROW_BYTES)
    pub fn longest_possible_row(&self) -> u64 {
        let of = |(path, kind, _): &(PathBuf, Arc<Kind>, _)| kind.longest_possible_row(path);
        self.sources.iter().map(of).max().unwrap_or(0)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|(path, ..)| file_bytes(path)).sum()
    }
}
