//! The texts of files with rows, as training would read them, for commands that look at texts alone.

use std::path::PathBuf;

use row_files::{Chosen, Kind, Pairing, ReadOptions, Row, Rows};

use crate::data::unpacked::Unpacked;
use crate::failure::Outcome;
use crate::screen::report;

/// Files whose texts can be read again and again.
pub struct FileTexts {
    files: Vec<(PathBuf, Kind, Pairing)>,
    /// It holds the files that were unpacked.
    _unpacked: Unpacked,
}

impl FileTexts {
    /// Opens files. If nothing says which columns are the texts of a pair, all of them are.
    ///
    /// # Errors
    /// A file that is no file of rows, or lacks a chosen column. `named` says this error in the caller's words.
    pub fn open(
        files: &[PathBuf],
        (chosen, options): (&Chosen, &ReadOptions),
        named: fn(row_files::Error) -> crate::failure::Failure,
    ) -> Outcome<Self> {
        let mut unpacked = Unpacked::default();
        let mut of = Vec::new();
        for path in unpacked.files(files, report::note)? {
            let kind = Kind::detect(&path, options)?;
            let delimiter = kind.dialect().map(|(delimiter, _)| delimiter);
            let pairing = match Pairing::choose(&kind.columns, chosen) {
                Ok(pairing) => pairing,
                Err(_) if *chosen == Chosen::default() && !kind.columns.is_empty() => {
                    Pairing::Each { columns: kind.columns.clone() }
                }
                Err(unpaired) => {
                    return Err(named(row_files::Error::unpaired(&path, unpaired, kind.columns.clone(), delimiter)));
                }
            };
            of.push((path, kind, pairing));
        }
        Ok(Self { files: of, _unpacked: unpacked })
    }

    /// Hands the texts of each row to `each`, the source first where there is one. Rows that cannot be read are skipped.
    ///
    /// # Errors
    /// Of reading, and of `each`; a row that only a larger budget would hold.
    pub fn each(&self, mut each: impl FnMut(&[&str]) -> Outcome<()>) -> Outcome<u64> {
        let (mut row, mut count) = (Row::default(), 0);
        for (path, kind, pairing) in &self.files {
            let mut rows = Rows::open(path, kind, &pairing.columns(), false)?;
            while let Some(read) = rows.next(&mut row)? {
                match read {
                    Err(error) if error.fault.is_over_budget() => return Err(row_files::Error::Row(error).into()),
                    Err(_) => continue,
                    Ok(()) => {}
                }
                count += 1;
                let rejected = pairing.third_text(&row).ok().flatten().map(std::borrow::Cow::into_owned);
                if !matches!(pairing, Pairing::Each { .. })
                    && let Ok([source, target]) = pairing.texts(&row)
                {
                    let texts = [Some(&*source), Some(&*target), rejected.as_deref()];
                    each(&texts.into_iter().flatten().collect::<Vec<_>>())?;
                    continue;
                }
                let texts = pairing.all_texts(&mut row);
                // The last one is first. None of them is known to be a source.
                let texts: Vec<&str> = std::iter::once("").chain(texts.iter().rev().map(String::as_str)).collect();
                each(&texts)?;
            }
        }
        Ok(count)
    }
}
