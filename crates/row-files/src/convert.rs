//! [`Conversion`]: the rows of several files as pairs of texts, one after the other, for training or for validation.
//!
//! A row goes through these steps: its texts are taken from its columns, cleaned, compared with earlier rows, and assigned to
//! training or validation. Rows that a step leaves out are counted there. A split by a count or a share needs the number of
//! remaining rows, so the files are then read twice.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use crate::chat::Fits;
use crate::clean::clean;
use crate::columns::{Chosen, Pairing};
use crate::delimited::Notes;
use crate::duplicates::Duplicates;
use crate::error::{Error, RowError, RowFault};
use crate::input::Digested;
use crate::kind::{Kind, file_bytes};
use crate::labels::Labels;
use crate::lists::{ListCounts, Lists, Written};
use crate::options::ReadOptions;
use crate::row::Row;
use crate::rows::Rows;
use crate::split::{Share, Split};

/// Rows between two checks of whether to stop.
const POLL_INTERVAL: u64 = 1024;

/// A target without labels, where a target is any number of labels that commas part.
const NO_LABELS: &str = ",";

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
    /// Whether texts are [cleaned](clean).
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
        let mut counts = Counts::default();
        let mut duplicates = settings.duplicates.map(|make| make());
        let (mut row, mut lists) = (Row::default(), Lists::default());
        let (all, mut done) = (self.bytes(), 0);
        // The rejected answer of a row comes behind the chosen answer of the next one: neighbours then have different prompts.
        let mut undesirable: [Option<[String; 2]>; 2] = Default::default();
        for (path, kind, pairing) in &self.sources {
            let mut rows = Rows::open(path, kind, &pairing.columns(), true)?;
            rows.notice_columns_beside(&kind.columns);
            let mut columns = Vec::new();
            let before = counts.read;
            while let Some(read) = rows.next(&mut row)? {
                for column in rows.take_late_columns() {
                    if columns.is_empty() {
                        columns.clone_from(&kind.columns);
                    }
                    columns.push(column.clone());
                    // What the first rows meant would leave out what this one says.
                    if Pairing::choose(&columns, &self.chosen).ok().as_ref() != Some(&**pairing) {
                        let meaning = pairing.in_words();
                        return Err(Error::LateColumn { path: path.clone(), line: row.line, column, meaning });
                    }
                }
                if settings.max_rows == Some(counts.read) {
                    counts.share = share(done, rows.share_read(), file_bytes(path), all);
                    return flush(undesirable, sink).map(|()| counts);
                }
                counts.read += 1;
                if counts.read.is_multiple_of(POLL_INTERVAL) {
                    counts.share = share(done, rows.share_read(), file_bytes(path), all);
                    (settings.progress)(&counts);
                    if (settings.stop)() {
                        return Err(Error::Stopped);
                    }
                }
                if let Pairing::Ranked(of) = &**pairing {
                    let limits = (of.most, kind.options.max_row_bytes);
                    let done = read.and_then(|()| {
                        let texts = of.of_row(&row).and_then(|texts| lists.add(texts, limits));
                        texts.map_err(|fault| rows.error(&row, fault))
                    });
                    match done {
                        Ok(done) => {
                            done.into_iter().try_for_each(|list| counts.place(list, split, sink))?;
                        }
                        Err(error) => counts.refuse(error, settings.bad_rows)?,
                    }
                    continue;
                }
                if self.chosen.is_of_sets
                    && let Some(target) = pairing.target()
                {
                    row.fill_empty(&pairing.columns(), target, NO_LABELS);
                }
                let texts = read
                    .and_then(|()| pairing.fitted_texts(&row, settings.fits).map_err(|fault| rows.error(&row, fault)));
                let texts = texts.map(|(texts, left_out)| {
                    counts.shortened_chats += u64::from(left_out.turns > 0);
                    counts.left_out_turns += left_out.turns as u64;
                    counts.chats_with_more += u64::from(left_out.has_more);
                    texts
                });
                let texts = texts.and_then(|texts| {
                    let rejected = pairing.third_text(&row).map_err(|fault| rows.error(&row, fault))?;
                    if !settings.clean {
                        return Ok((texts, rejected));
                    }
                    let texts = cleaned(texts, pairing, &mut counts).map_err(|fault| rows.error(&row, fault))?;
                    Ok((texts, rejected.map(|text| Cow::Owned(clean(&text).into_owned()))))
                });
                match texts {
                    Ok(([prompt, response], rejected)) => {
                        if let Some(duplicates) = &mut duplicates {
                            let found = duplicates.is_duplicate(&prompt, &response);
                            let full = |full: crate::duplicates::Full| Error::Duplicates {
                                rows: full.rows,
                                bytes: full.bytes,
                            };
                            if found.map_err(full)? {
                                counts.duplicates += 1;
                                continue;
                            }
                        }
                        let part = counts.next_part(split, pairing.is_split());
                        if !pairing.is_text() {
                            counts.labels.add(&response);
                        }
                        let of_rejected = rejected.as_ref().map_or(0, |text| text.len());
                        counts.longest = counts.longest.max((prompt.len() + response.len() + of_rejected) as u64);
                        let [prompt, response] = [prompt, response].map(|text| row.place_of(text));
                        let (pair, rejected) = match rejected.map(|text| row.place_of(text)) {
                            None => (row.take([prompt, response]), None),
                            Some(rejected) => {
                                let [prompt, response, rejected] = row.take([prompt, response, rejected]);
                                ([prompt, response], Some(rejected))
                            }
                        };
                        let rejected = match rejected {
                            Some(rejected) if pairing.is_split() => rejected,
                            third => {
                                sink(part, pair, third)?;
                                continue;
                            }
                        };
                        let later = [pair[0].clone(), rejected];
                        sink(part, pair, Some(true.to_string()))?;
                        if let Some(before) = undesirable[part as usize].replace(later) {
                            sink(part, before, Some(false.to_string()))?;
                        }
                    }
                    Err(error) => counts.refuse(error, settings.bad_rows)?,
                }
            }
            lists.end().into_iter().try_for_each(|list| counts.place(list, split, sink))?;
            if let Some(notes) = rows.notes().filter(|notes| **notes != Notes::default()) {
                counts.notes.get_or_insert_with(|| (path.clone(), notes.clone()));
            }
            counts.of_files.push(counts.read - before);
            counts.kept_of_files.push(counts.train - counts.kept_of_files.iter().sum::<u64>());
            counts.digests.push(rows.finish()?);
            done += file_bytes(path);
        }
        counts.share = 1.;
        counts.lists = lists.counts;
        flush(undesirable, sink).map(|()| counts)
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

/// Hands over the last rejected answer of each part.
fn flush(undesirable: [Option<[String; 2]>; 2], sink: &mut Sink<'_>) -> Result<(), Error> {
    for (part, texts) in [Part::Train, Part::Validation].into_iter().zip(undesirable) {
        texts.map_or(Ok(()), |texts| sink(part, texts, Some(false.to_string())))?;
    }
    Ok(())
}

/// The fraction of `all` bytes that is read, with `done` bytes of earlier files and the fraction `of_file` of this one.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn share(done: u64, of_file: f64, file: u64, all: u64) -> f64 {
    ((done as f64 + of_file * file as f64) / all.max(1) as f64).clamp(f64::MIN_POSITIVE, 1.)
}

/// Cleans both texts; a text may become empty.
fn cleaned<'a>(
    [prompt, response]: [Cow<'a, str>; 2],
    pairing: &Pairing,
    counts: &mut Counts,
) -> Result<[Cow<'a, str>; 2], RowFault> {
    let columns = pairing.columns();
    let name = |number: usize| columns.get(number).or(columns.first()).map_or_else(String::new, |c| c.name.clone());
    let both = [(prompt, !pairing.is_text(), name(0)), (response, true, name(if pairing.is_text() { 0 } else { 1 }))];
    let mut is_changed = false;
    let mut one = |(text, is_wanted, column): (Cow<'a, str>, bool, String)| {
        let done = clean(&text).into_owned();
        is_changed |= *done != *text;
        if is_wanted && done.is_empty() { Err(RowFault::Empty(column)) } else { Ok(Cow::Owned(done)) }
    };
    let [first, second] = both;
    let texts = [one(first)?, one(second)?];
    counts.cleaned += u64::from(is_changed);
    Ok(texts)
}
