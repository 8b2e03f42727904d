//! A file of answers, one JSON object per line. It appears complete or not at all.

use std::io::Write;
use std::path::{Path, PathBuf};

use durable_files::{AtomicFile, Leftover};
use row_files::{Origin, Trace};
use run_report::visible;
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::scores::evaluation::AnsweredRow;

/// Bytes that are written together.
const PIECE_BYTES: usize = 1 << 16;

/// A file of answers that is being written. Dropping it before [`Predictions::finish`] leaves nothing.
pub struct Predictions {
    file: AtomicFile,
    path: PathBuf,
    waiting: Vec<u8>,
    trace: Trace,
}

impl Predictions {
    /// Begins a file that will become `path`. An existing file of that name is replaced at the end.
    /// By the trace each line has the row's file, its line there, and the columns that the task does not use.
    pub fn begin(path: &Path, trace: Trace) -> Outcome<Self> {
        let of_rows =
            row_files::extension(path).filter(|extension| ["csv", "tsv", "parquet"].contains(&extension.as_str()));
        if let Some(extension) = of_rows {
            return Err(Failure::usage(format!(
                "--predictions {}: these are JSON lines, not {extension}",
                path.display()
            ))
            .hint(format!("name it `{}`", path.with_extension("jsonl").display())));
        }
        outputs::remove_leftovers_beside(path);
        let file = AtomicFile::create(path)?;
        Ok(Self { file, path: path.to_owned(), waiting: Vec::with_capacity(PIECE_BYTES), trace })
    }

    /// The incomplete file, for a signal that ends the process.
    pub fn leftover(&self) -> Leftover {
        self.file.leftover()
    }

    /// Adds an answer: its row, prompt, reference and prediction, and the scores of a single answer.
    pub fn add(&mut self, row: &AnsweredRow) -> Outcome<()> {
        let answered = row.answered;
        let mut line = json!({ "row": row.row });
        if let Some(prompt) = row.prompt {
            line["prompt"] = json!(prompt);
        }
        line["reference"] = json!(answered.reference);
        line["prediction"] = json!(answered.hypothesis);
        if let Some(score) = answered.model_score {
            line["score"] = json!(score);
        }
        for (metric, value) in &answered.scores {
            line[metric.name()] = json!(value);
        }
        if let Some(Origin { file, line: at, columns }) = self.trace.origin(row.row)? {
            line["file"] = json!(file.display().to_string());
            line["line"] = json!(at);
            for (name, text) in columns {
                // The names of this file's own fields come first.
                let name = if line.get(&name).is_some() { format!("column.{name}") } else { name };
                line[name] = json!(text);
            }
        }
        self.waiting.extend_from_slice(visible::lines(&format!("{line}\n")).as_bytes());
        if self.waiting.len() >= PIECE_BYTES { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Outcome<()> {
        let written = self.file.file().write_all(&self.waiting);
        self.waiting.clear();
        written.map_err(|error| Failure::io("write the predictions", &self.path, &error))
    }

    /// Renames the file into place.
    pub fn finish(mut self) -> Outcome<()> {
        self.write()?;
        Ok(self.file.commit()?)
    }
}
