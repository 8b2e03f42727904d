//! `generate --output FILE`: answers as rows of JSON, in a file that a killed command goes on with.
//!
//! A row is an answer, or of several answers the best one. The unfinished file is `FILE.KEY.partial`, and the key follows from everything
//! that answers depend on. Prompts are answered in the same batches as without an interruption, so the bytes are the same.

use std::io::{BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};

use durable_files::GrowingFile;
use run_report::visible;
use serde_json::{Value, json};
use t5::Answer;
use text_metrics::{Metric, Scores, Settings};

use crate::failure::{Failure, Outcome};
use crate::files::outputs;

/// What the best of several answers is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Best {
    /// That with the largest mean log-probability of its tokens.
    Likeliest,
    /// That with the best score beside the row's own response; of equal ones, and where a row has no response, the likeliest.
    By(Metric),
}

impl Best {
    /// What a name of [`crate::cli::answer_flags::BEST_OF`] stands for.
    pub fn of_name(name: &str) -> Self {
        let metric = Metric::ALL.into_iter().find(|metric| metric.name() == name.replace('-', "_"));
        metric.map_or(Self::Likeliest, Self::By)
    }

    /// The index of the best of some answers, and its score.
    fn choose(self, answers: &[(f64, &str)], reference: Option<&str>) -> (usize, Option<(Metric, f64)>) {
        let score = |text: &str| match (self, reference) {
            (Self::By(metric), Some(reference)) => {
                let settings = Settings { rouge_any_script: true, ..Settings::default() };
                Scores::new(&[metric], settings).add(text, reference).into_iter().next()
            }
            _ => None,
        };
        let mut best: Option<(usize, Option<(Metric, f64)>)> = None;
        for (index, (likelihood, text)) in answers.iter().enumerate() {
            let score = score(text);
            let of = |score: Option<(Metric, f64)>| score.map_or(0.0, |(_, score)| score);
            let is_better =
                best.is_none_or(|(other, others)| (of(score), likelihood) > (of(others), &answers[other].0));
            if is_better {
                best = Some((index, score));
            }
        }
        best.unwrap_or((0, None))
    }
}

/// A prompt with its answers.
pub struct Answered<'a> {
    /// The prompt.
    pub prompt: &'a str,
    /// The row's own response.
    pub reference: Option<&'a str>,
    /// The answers, and their texts.
    pub answers: &'a [Answer],
    pub responses: &'a [String],
}

/// The growing file.
pub struct AnswerFile {
    file: GrowingFile,
    best: Option<Best>,
    /// Rows of a prompt.
    rows_of_a_prompt: u64,
    /// Prompts whose rows an earlier command has written.
    done: u64,
}

impl AnswerFile {
    /// Opens the file of a command whose answers follow from `depends_on` and these files.
    ///
    /// # Errors
    /// The file cannot be written, or another command writes it.
    pub fn open(
        path: &Path,
        (depends_on, files): (&str, &[PathBuf]),
        (best, answers): (Option<Best>, usize),
    ) -> Outcome<Self> {
        outputs::make_directory_of(path)?;
        let file = GrowingFile::open(path, outputs::key((depends_on, best), files))?;
        let rows_of_a_prompt = if best.is_some() { 1 } else { answers as u64 };
        let mut this = Self { file, best, rows_of_a_prompt, done: 0 };
        let rows = this.lines()?.count() as u64;
        this.done = rows / rows_of_a_prompt;
        Ok(this)
    }

    /// Prompts that are answered already.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Where the rows are until all are there.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The bytes of each whole line.
    fn lines(&self) -> Outcome<impl Iterator<Item = u64>> {
        let failed = |error: std::io::Error| Failure::io("read", self.file.path(), &error);
        let mut file = self.file.file();
        file.rewind().map_err(failed)?;
        let mut reader = BufReader::new(file);
        Ok(std::iter::from_fn(move || {
            let mut bytes = 0;
            loop {
                let part = reader.fill_buf().ok().filter(|part| !part.is_empty())?;
                let end = part.iter().position(|byte| *byte == b'\n');
                let used = end.map_or(part.len(), |end| end + 1);
                bytes += used as u64;
                reader.consume(used);
                if end.is_some() {
                    return Some(bytes);
                }
            }
        }))
    }

    /// Removes the rows behind those of the first `prompts` prompts.
    pub fn keep(&mut self, prompts: u64) -> Outcome<()> {
        let rows = usize::try_from(prompts * self.rows_of_a_prompt).unwrap_or(usize::MAX);
        let bytes = self.lines()?.take(rows).sum();
        self.file.file().set_len(bytes).map_err(|error| Failure::io("shorten", self.file.path(), &error))
    }

    /// Adds the rows of some prompts.
    pub fn add<'a>(&mut self, answered: impl Iterator<Item = Answered<'a>>) -> Outcome<()> {
        let mut lines = String::new();
        for of in answered {
            let row = |index: usize, score: Option<(Metric, f64)>| {
                let Answer { score: likelihood, .. } = of.answers[index];
                let mut row = json!({ "prompt": of.prompt, "response": of.responses[index] });
                likelihood.into_iter().for_each(|score| row["score"] = json!(score));
                score.into_iter().for_each(|(metric, score)| row[metric.name()] = json!(score));
                row
            };
            let rows: Vec<Value> = match self.best {
                None => (0..of.answers.len()).map(|index| row(index, None)).collect(),
                Some(best) => {
                    let likelihood = |answer: &Answer| answer.score.unwrap_or(f64::NEG_INFINITY);
                    let scored: Vec<(f64, &str)> =
                        of.answers.iter().map(likelihood).zip(of.responses.iter().map(String::as_str)).collect();
                    let (index, score) = best.choose(&scored, of.reference);
                    vec![row(index, score)]
                }
            };
            rows.iter().for_each(|row| lines += &visible::lines(&format!("{row}\n")));
        }
        self.file.file().write_all(lines.as_bytes()).map_err(|error| Failure::io("write", self.file.path(), &error))
    }

    /// Gives the file its name.
    pub fn finish(self) -> Outcome<()> {
        Ok(self.file.commit()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_answer_has_the_best_score_and_of_equal_ones_it_is_the_likeliest() {
        let answers = [(-0.5, "the red house"), (-0.1, "a tree"), (-0.3, "the red house")];
        assert_eq!(Best::of_name("log-probability").choose(&answers, Some("the red house")), (1, None));
        let best = Best::of_name("exact-match").choose(&answers, Some("the red house"));
        assert_eq!(best, (2, Some((Metric::ExactMatch, 1.0))));
        assert_eq!(Best::of_name("rougeL").choose(&answers, None), (1, None), "no response to compare with");
        assert!(crate::cli::answer_flags::BEST_OF[1..].iter().all(|name| matches!(Best::of_name(name), Best::By(_))));
    }
}
