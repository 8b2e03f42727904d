//! Lists of texts for a query, each with a label: of one row, or of rows that follow each other.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::error::RowFault;
use crate::python_text;
use crate::row::{Cell, Row};
use crate::template::Template;

/// Queries that are remembered, to notice one that comes back.
const REMEMBERED: usize = 1 << 17;

/// The columns of ranked texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankedColumns {
    /// The source that is made of a query and a text.
    pub source: Template,
    /// Column of the label, a number, or of the list of labels.
    pub label: String,
    /// Column that says which rows have the same query, if a row has one text.
    pub query: String,
    /// The most texts of a list.
    pub most: usize,
}

/// What was noticed about lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListCounts {
    /// Lists of one text.
    pub lone_texts: u64,
    /// Texts left out of lists that are too long.
    pub cut_texts: u64,
    /// Lists of a query that had one before.
    pub queries_again: u64,
    /// The first such query.
    pub first_query_again: Option<String>,
}

/// The texts of a row.
pub(crate) struct OfRow {
    /// Each text with its label.
    texts: Vec<(String, f64)>,
    /// The query, if the row is one text of a list.
    query: Option<String>,
}

/// A list of JSON texts, and that of their labels.
pub(crate) type Written = [String; 2];

impl RankedColumns {
    /// The columns that are read.
    pub fn columns(&self) -> Vec<&str> {
        let mut columns: Vec<&str> = Vec::new();
        for name in self.source.columns().chain([self.label.as_str(), self.query.as_str()]) {
            if !columns.contains(&name) {
                columns.push(name);
            }
        }
        columns
    }

    /// The texts of a row of these columns.
    pub(crate) fn of_row(&self, row: &Row) -> Result<OfRow, RowFault> {
        let columns = self.columns();
        let value = |name: &str| -> Result<&str, RowFault> {
            let at = columns.iter().position(|column| *column == name).unwrap_or(columns.len());
            match row.cells.get(at).unwrap_or(&Cell::Null) {
                Cell::Null => Err(RowFault::Null(name.to_owned())),
                Cell::Text(text) if text.trim().is_empty() => Err(RowFault::Empty(name.to_owned())),
                Cell::Text(text) => Ok(text),
                Cell::Turns(_) => Err(RowFault::WrongType(name.to_owned(), "a list of messages")),
                Cell::Other(kind) => Err(RowFault::WrongType(name.to_owned(), kind)),
            }
        };
        let label = value(&self.label)?;
        let Some(labels) = elements(label) else {
            for name in self.source.columns() {
                value(name)?;
            }
            let source = self.source.fill(|name| value(name).unwrap_or_default());
            let texts = vec![(source, self.gain(label)?)];
            return Ok(OfRow { texts, query: Some(value(&self.query)?.to_owned()) });
        };
        if labels.is_empty() {
            return Err(RowFault::Empty(self.label.clone()));
        }
        // A column is a list, or one text for all elements.
        let mut lists: Vec<(&str, Vec<String>)> = Vec::new();
        for name in self.source.columns() {
            let list = elements(value(name)?);
            if let Some(list) = &list
                && list.len() != labels.len()
            {
                return Err(RowFault::UnequalLists(name.to_owned(), list.len(), self.label.clone(), labels.len()));
            }
            if let Some(blank) = list.iter().flatten().position(|text| text.trim().is_empty()) {
                return Err(RowFault::EmptyElement(name.to_owned(), blank + 1));
            }
            lists.extend(list.map(|list| (name, list)));
        }
        if lists.is_empty() {
            return Err(RowFault::UnequalLists(
                self.source.columns().last().unwrap_or_default().to_owned(),
                1,
                self.label.clone(),
                labels.len(),
            ));
        }
        let source = |at: usize| {
            self.source.fill(|name| match lists.iter().find(|(list, _)| *list == name) {
                Some((_, list)) => list[at].as_str(),
                None => value(name).unwrap_or_default(),
            })
        };
        let texts = labels.iter().enumerate().map(|(at, label)| Ok((source(at), self.gain(label)?)));
        Ok(OfRow { texts: texts.collect::<Result<_, RowFault>>()?, query: None })
    }

    fn gain(&self, label: &str) -> Result<f64, RowFault> {
        let number = match label.trim() {
            "true" | "True" => 1.0,
            "false" | "False" => 0.0,
            text => text.parse().unwrap_or(f64::NAN),
        };
        let problem = || RowFault::NotANumber(self.label.clone(), label.to_owned());
        if number.is_finite() { Ok(number) } else { Err(problem()) }
    }
}

/// The elements of a text that is a list in JSON, or as Python writes one.
fn elements(text: &str) -> Option<Vec<String>> {
    if !text.trim_start().starts_with('[') {
        return None;
    }
    let parsed = serde_json::from_str::<Vec<Value>>(text).ok();
    let list = parsed.or_else(|| serde_json::from_str(&python_text::json(text)?).ok())?;
    let of = |element: Value| match element {
        Value::String(text) => text,
        Value::Null => String::new(),
        element => element.to_string(),
    };
    Some(list.into_iter().map(of).collect())
}

impl OfRow {
    /// The row's own texts as a list.
    pub fn written(self) -> Written {
        written(self.texts)
    }
}

fn written(texts: Vec<(String, f64)>) -> Written {
    let (sources, gains): (Vec<String>, Vec<f64>) = texts.into_iter().unzip();
    [serde_json::to_string(&sources), serde_json::to_string(&gains)].map(Result::unwrap_or_default)
}

/// The lists of a file, as its rows are read.
#[derive(Default)]
pub(crate) struct Lists {
    /// The query of the rows before, and their texts.
    open: Option<(String, Vec<(String, f64)>)>,
    bytes: usize,
    seen: HashSet<u64>,
    /// What was noticed.
    pub counts: ListCounts,
}

impl Lists {
    /// Adds the texts of a row. Returns lists that are complete: at most that of the rows before, and that of this row.
    ///
    /// # Errors
    /// The rows of a query are longer together than one row may be.
    pub fn add(&mut self, row: OfRow, (most, most_bytes): (usize, usize)) -> Result<Vec<Written>, RowFault> {
        let Some(query) = row.query else {
            let mut texts = row.texts;
            let mut done: Vec<Written> = self.end().into_iter().collect();
            while texts.len() > most {
                remove_least(&mut texts);
                self.counts.cut_texts += 1;
            }
            self.counts.lone_texts += u64::from(texts.len() == 1);
            done.push(written(texts));
            return Ok(done);
        };
        let mut done = Vec::new();
        if self.open.as_ref().is_none_or(|(open, _)| *open != query) {
            done.extend(self.end());
            let mut hasher = DefaultHasher::new();
            query.hash(&mut hasher);
            let hash = hasher.finish();
            if self.seen.contains(&hash) {
                self.counts.queries_again += 1;
                self.counts.first_query_again.get_or_insert_with(|| query.clone());
            } else if self.seen.len() < REMEMBERED {
                self.seen.insert(hash);
            }
            self.open = Some((query, Vec::new()));
        }
        let (_, texts) = self.open.get_or_insert_with(Default::default);
        self.bytes += row.texts.iter().map(|(text, _)| text.len()).sum::<usize>();
        if self.bytes > most_bytes {
            return Err(RowFault::TooLong(most_bytes));
        }
        let is_over = texts.len() == most;
        texts.extend(row.texts);
        if is_over {
            self.bytes -= remove_least(texts);
            self.counts.cut_texts += 1;
        }
        Ok(done)
    }

    /// Ends the list of the rows before, if there is one.
    pub fn end(&mut self) -> Option<Written> {
        let (_, texts) = self.open.take().filter(|(_, texts)| !texts.is_empty())?;
        self.bytes = 0;
        self.counts.lone_texts += u64::from(texts.len() == 1);
        Some(written(texts))
    }
}

/// Removes the last of the least relevant texts. Returns its bytes.
fn remove_least(texts: &mut Vec<(String, f64)>) -> usize {
    let least = texts.iter().map(|(_, gain)| *gain).fold(f64::INFINITY, f64::min);
    let last = texts.iter().rposition(|(_, gain)| *gain == least);
    last.map_or(0, |at| texts.remove(at).0.len())
}
