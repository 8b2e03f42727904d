//! [`Pass`]: one reading of all rows, each through the steps of the conversion.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Conversion, Counts, Part, Settings, Sink};
use crate::clean::clean;
use crate::columns::{Chosen, Pairing};
use crate::delimited::Notes;
use crate::duplicates::{Duplicates, Full};
use crate::error::{Error, RowFault};
use crate::kind::{Kind, file_bytes};
use crate::lists::Lists;
use crate::row::Row;
use crate::rows::Rows;
use crate::split::Split;

/// Rows between two checks of whether to stop.
const POLL_INTERVAL: u64 = 1024;

/// A target without labels, where a target is any number of labels that commas part.
const NO_LABELS: &str = ",";

/// The prompt and the response of a row, and a third text.
type Texts<'a> = ([Cow<'a, str>; 2], Option<Cow<'a, str>>);

/// How far a file was read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// To its end.
    End,
    /// To [`Settings::max_rows`].
    Limit,
}

/// A reading of all rows.
pub(super) struct Pass<'a> {
    counts: Counts,
    settings: &'a Settings<'a>,
    chosen: &'a Chosen,
    split: Split,
    duplicates: Option<Duplicates>,
    lists: Lists,
    /// The rejected answer of a row comes behind the chosen answer of the next one: neighbours then have different prompts.
    undesirable: [Option<[String; 2]>; 2],
    /// Bytes of all files, and of those that were read to their end.
    bytes: [u64; 2],
}

impl<'a> Pass<'a> {
    pub(super) fn new(conversion: &'a Conversion, settings: &'a Settings<'a>, split: Split) -> Self {
        Self {
            counts: Counts::default(),
            settings,
            chosen: &conversion.chosen,
            split,
            duplicates: settings.duplicates.map(|make| make()),
            lists: Lists::default(),
            undesirable: Default::default(),
            bytes: [conversion.bytes(), 0],
        }
    }

    /// Reads a file.
    pub(super) fn file(
        &mut self,
        source: &(PathBuf, Arc<Kind>, Arc<Pairing>),
        sink: &mut Sink<'_>,
    ) -> Result<Reach, Error> {
        let (path, kind, pairing) = source;
        let mut wanted = pairing.columns();
        for column in &mut wanted {
            column.has_numbers |= self.chosen.is_of_sets && pairing.target() == Some(&column.name);
        }
        let mut rows = Rows::open(path, kind, &wanted, true)?;
        rows.notice_columns_beside(&kind.columns);
        let (mut row, mut columns, before) = (Row::default(), Vec::new(), self.counts.read);
        while let Some(read) = rows.next(&mut row)? {
            for column in rows.take_late_columns() {
                self.check_late_column(source, &mut columns, column, row.line)?;
            }
            if self.settings.max_rows == Some(self.counts.read) {
                self.count_share(&rows, path);
                return Ok(Reach::Limit);
            }
            self.count_read(&rows, path)?;
            let used = match (read, &**pairing) {
                (Err(error), _) => Err(error),
                (Ok(()), Pairing::Ranked(of)) => {
                    let limits = (of.most, kind.options.max_row_bytes);
                    match of.of_row(&row).and_then(|texts| self.lists.add(texts, limits)) {
                        Ok(lists) => {
                            lists.into_iter().try_for_each(|list| self.counts.place(list, self.split, sink))?;
                            Ok(())
                        }
                        Err(fault) => Err(rows.error(&row, fault)),
                    }
                }
                (Ok(()), pairing) => match self.pair(&mut row, pairing, sink)? {
                    Ok(()) => Ok(()),
                    Err(fault) => Err(rows.error(&row, fault)),
                },
            };
            if let Err(error) = used {
                self.counts.refuse(error, self.settings.bad_rows)?;
            }
        }
        self.lists.end().into_iter().try_for_each(|list| self.counts.place(list, self.split, sink))?;
        if let Some(notes) = rows.notes().filter(|notes| **notes != Notes::default()) {
            self.counts.notes.get_or_insert_with(|| (path.clone(), notes.clone()));
        }
        let counts = &mut self.counts;
        counts.of_files.push(counts.read - before);
        counts.kept_of_files.push(counts.train - counts.kept_of_files.iter().sum::<u64>());
        counts.digests.push(rows.finish()?);
        self.bytes[1] += file_bytes(path);
        Ok(Reach::End)
    }

    /// Notes that all files were read.
    pub(super) fn all_read(&mut self) {
        self.counts.share = 1.;
        self.counts.lists = std::mem::take(&mut self.lists.counts);
    }

    /// Hands over the last rejected answer of each part.
    pub(super) fn end(self, sink: &mut Sink<'_>) -> Result<Counts, Error> {
        for (part, texts) in [Part::Train, Part::Validation].into_iter().zip(self.undesirable) {
            texts.map_or(Ok(()), |texts| sink(part, texts, Some(false.to_string())))?;
        }
        Ok(self.counts)
    }

    /// Refuses a column that first occurs here, if the first rows would have been read otherwise beside it: what they meant would leave out
    /// what this row says.
    fn check_late_column(
        &self,
        (path, kind, pairing): &(PathBuf, Arc<Kind>, Arc<Pairing>),
        columns: &mut Vec<String>,
        column: String,
        line: u64,
    ) -> Result<(), Error> {
        if columns.is_empty() {
            columns.clone_from(&kind.columns);
        }
        columns.push(column.clone());
        if Pairing::choose(columns, self.chosen).ok().as_ref() == Some(&**pairing) {
            return Ok(());
        }
        Err(Error::LateColumn { path: path.clone(), line, column, meaning: pairing.in_words() })
    }

    /// Counts a row that was read, and stops where that is asked for.
    fn count_read(&mut self, rows: &Rows, path: &Path) -> Result<(), Error> {
        self.counts.read += 1;
        if self.counts.read.is_multiple_of(POLL_INTERVAL) {
            self.count_share(rows, path);
            (self.settings.progress)(&self.counts);
            if (self.settings.stop)() {
                return Err(Error::Stopped);
            }
        }
        Ok(())
    }

    /// Notes the fraction of the files' bytes that is read.
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    fn count_share(&mut self, rows: &Rows, path: &Path) {
        let ([all, done], of_file) = (self.bytes, rows.share_read() * file_bytes(path) as f64);
        self.counts.share = ((done as f64 + of_file) / all.max(1) as f64).clamp(f64::MIN_POSITIVE, 1.);
    }

    /// Passes the texts of a row on. A fault of the row passes nothing on.
    fn pair(&mut self, row: &mut Row, pairing: &Pairing, sink: &mut Sink<'_>) -> Result<Result<(), RowFault>, Error> {
        if self.chosen.is_of_sets
            && let Some(target) = pairing.target()
        {
            row.fill_empty(&pairing.columns(), target, NO_LABELS);
        }
        let texts = match self.texts(row, pairing) {
            Ok(texts) => texts,
            Err(fault) => return Ok(Err(fault)),
        };
        let Some(part) = self.count_kept(&texts, pairing)? else { return Ok(Ok(())) };
        let ([prompt, response], third) = texts;
        let [prompt, response] = [prompt, response].map(|text| row.place_of(text));
        let (pair, third) = match third.map(|text| row.place_of(text)) {
            None => (row.take([prompt, response]), None),
            Some(third) => {
                let [prompt, response, third] = row.take([prompt, response, third]);
                ([prompt, response], Some(third))
            }
        };
        match third {
            Some(rejected) if pairing.is_split() => {
                let later = [pair[0].clone(), rejected];
                sink(part, pair, Some(true.to_string()))?;
                if let Some(before) = self.undesirable[part as usize].replace(later) {
                    sink(part, before, Some(false.to_string()))?;
                }
            }
            third => sink(part, pair, third)?,
        }
        Ok(Ok(()))
    }

    /// The texts of a row, cleaned where that is asked for.
    fn texts<'r>(&mut self, row: &'r Row, pairing: &Pairing) -> Result<Texts<'r>, RowFault> {
        let (texts, left_out) = pairing.fitted_texts(row, self.settings.fits)?;
        self.counts.shortened_chats += u64::from(left_out.turns > 0);
        self.counts.left_out_turns += left_out.turns as u64;
        self.counts.chats_with_more += u64::from(left_out.has_more);
        let third = pairing.third_text(row)?;
        if !self.settings.clean {
            return Ok((texts, third));
        }
        let texts = cleaned(texts, pairing, &mut self.counts)?;
        Ok((texts, third.map(|text| Cow::Owned(clean(&text).into_owned()))))
    }

    /// Counts a row, and says what it is for; `None` for a duplicate.
    fn count_kept(&mut self, texts: &Texts<'_>, pairing: &Pairing) -> Result<Option<Part>, Error> {
        let ([prompt, response], third) = texts;
        if let Some(duplicates) = &mut self.duplicates {
            let full = |full: Full| Error::Duplicates { rows: full.rows, bytes: full.bytes };
            if duplicates.is_duplicate(prompt, response).map_err(full)? {
                self.counts.duplicates += 1;
                return Ok(None);
            }
        }
        let part = self.counts.next_part(self.split, pairing.is_split());
        if !pairing.is_text() {
            self.counts.labels.add(response);
        }
        let bytes = prompt.len() + response.len() + third.as_ref().map_or(0, |text| text.len());
        self.counts.longest = self.counts.longest.max(bytes as u64);
        Ok(Some(part))
    }
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
