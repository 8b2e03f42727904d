//! The labels of rows: those that the files name as classes, or else every one that occurs.

use std::collections::BTreeSet;
use std::path::Path;

use dataloader::{Tokenizer, labels_of_set, words_and_labels};
use memory_policy::plural;
use row_files::{BadRows, Conversion, Settings};

use crate::config::task::{Response, Task};
use crate::failure::{Failure, Outcome};

/// More labels than any classifier has: such a column has texts.
const MAX_LABELS: usize = 10_000;

/// The labels of these files, in the order of their numbers, or else in their own order.
///
/// # Errors
/// A file cannot be read. The column has too many labels to be one of labels.
pub fn read(conversion: &Conversion, file: &Path, task: Task) -> Outcome<Vec<String>> {
    let named = conversion.sources.iter().find_map(|(_, kind, pairing)| kind.classes.names(pairing.flat()?.1));
    if let Some(names) = named {
        return Ok(names.to_vec());
    }
    let mut found = BTreeSet::new();
    let settings = Settings { bad_rows: BadRows::Skip, ..Settings::default() };
    let counted = conversion.run(&settings, &mut |_, [text, label], _| {
        let mut note = |label: &str| {
            if !label.is_empty() && !found.contains(label) {
                found.insert(label.to_owned());
            }
        };
        match task.response() {
            // The row that has other numbers of words and labels is refused when it is read.
            Response::LabelsOfWords => words_and_labels(&text, &label)
                .unwrap_or_default()
                .into_iter()
                .for_each(|(_, label)| note(label.trim())),
            Response::LabelSet => labels_of_set(&label).for_each(note),
            _ => note(label.trim()),
        }
        if found.len() > MAX_LABELS { Err(row_files::Error::Stopped) } else { Ok(()) }
    });
    let first_bad = match counted {
        Err(row_files::Error::Stopped) => {
            let file = file.display();
            return Err(Failure::unusable(format!("{file}: more than {MAX_LABELS} different labels, expected a few"))
                .hint("name the column of the labels: `--set data.response_column=NAME`"));
        }
        counted => counted?.first_bad,
    };
    let mut labels: Vec<String> = found.into_iter().collect();
    if labels.iter().all(|label| label.parse::<i64>().is_ok()) {
        labels.sort_by_key(|label| label.parse::<i64>().unwrap_or_default());
    }
    match labels.len() {
        0 => {
            let why = first_bad.map(|error| format!("; the first that was skipped: {error}")).unwrap_or_default();
            Err(Failure::unusable(format!("{}: no row has a label{why}", file.display())))
        }
        1 if task.response() != Response::LabelSet => {
            Err(Failure::unusable(format!("{}: every row has the label `{}`", file.display(), labels[0]))
                .hint("a classifier needs rows with two labels or more"))
        }
        _ => Ok(labels),
    }
}

/// The token of an answer.
pub fn token(tokenizer: &Tokenizer, word: &str, setting: &str) -> Outcome<u32> {
    match tokenizer.encode(word)?.as_slice() {
        [token] => Ok(*token),
        tokens => Err(Failure::usage(format!(
            "`{setting}`: `{word}` is {} for this model",
            plural(tokens.len() as u64, "token")
        ))
        .hint("name words that are one token each, as they were trained")),
    }
}
