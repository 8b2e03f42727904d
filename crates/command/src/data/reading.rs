//! [`Reading`]: how the files of a run are read: their forms and splits, the columns of the source and the target, and what is left out.
//!
//! It is a pure function of the config and of the files' kinds. The loader is made from it, so it cannot differ from what is done. The first
//! screen says it in a few lines; the `start` event and `resolved.toml` have it whole.

use std::path::{Path, PathBuf};

use dataloader::{Objective, Side, Tokenizer};
use memory_policy::{counted, plural};
use row_files::{Cell, Chosen, Column, Conversion, Labels, Row, Rows, Trace, is_label_column};
use serde_json::{Map, Value, json};

use crate::config::task::{Response, Task};
use crate::config::{self, Columns, Config};
use crate::data::survival::Survival;
use crate::data::unpacked::Unpacked;
use crate::data::{labels, objective};
use crate::failure::{Failure, Outcome};

/// The most files of each kind in an event: it is held several times while it is written.
const MAX_SHOWN: usize = 100;

/// How the rows of a run are read.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The task, with the columns that the loader reads.
    pub objective: Objective,
    /// The training files.
    pub train: Part,
    /// The validation files; `None`: there are none, or rows are split off.
    pub validation: Option<Part>,
    /// Files of the same directories that the run leaves alone.
    pub left: Vec<PathBuf>,
    /// The text before every source, byte for byte.
    pub source_prefix: String,
    /// The side on which sources are cut.
    pub truncation_side: Side,
    /// The most tokens of a source and of a target.
    pub longest: [usize; 2],
    /// The ids that begin, end and pad a text, and the files that say so.
    pub ids: Ids,
    /// What the model makes of a source.
    pub task: Task,
    /// What the tokenizer does not hold, of a sample of the rows.
    pub survival: Option<(Survival, u64)>,
}

/// The ids around a text.
#[derive(Clone, Debug, Default)]
pub struct Ids {
    /// Before every text.
    pub starts: Vec<u32>,
    /// After every text.
    pub end: u32,
    /// The first id of an answer.
    pub answer_start: u32,
    /// Padding.
    pub padding: u32,
    /// The file of the model, or the tokenizer for a preset.
    pub said_by: String,
}

/// The rows of a run: how its files are read, and the parquet files to read.
pub struct RowData {
    /// How the files are read.
    pub reading: Reading,
    /// Parquet files with training rows.
    pub train: Vec<PathBuf>,
    /// Parquet files with validation rows; none: there are no such rows.
    pub validation: Vec<PathBuf>,
    /// Estimated training rows, if planning has sampled only some of them.
    pub estimated_rows: Option<u64>,
    /// The most bytes that converting rows was predicted to take; `None` where no rows were converted.
    pub bytes_to_convert: Option<u64>,
    /// An event for each set of converted files.
    pub events: Vec<Value>,
    /// The unpacked files, if rows are to be found in them again.
    pub unpacked: Option<Unpacked>,
    /// The rows of each task of a mixture, for training and for validation.
    pub rows_of_tasks: Option<[Vec<u64>; 2]>,
}

/// Files that are read together.
#[derive(Clone, Debug)]
pub struct Part {
    /// The key or flag that named them.
    pub key: &'static str,
    /// The files as they were named.
    pub originals: Vec<PathBuf>,
    /// The files that are read, with their kinds and columns: unpacked ones in place of compressed parquet.
    pub conversion: Conversion,
    /// Whether they are read where they lie. Otherwise they are converted first.
    pub is_in_place: bool,
    /// The rows of each file, in the order of the files; none: they are not known.
    pub rows: Vec<u64>,
}

impl Part {
    /// Files with their kinds and columns. It is still open whether they are converted.
    pub fn new(key: &'static str, originals: Vec<PathBuf>, conversion: Conversion) -> Self {
        let rows: Option<Vec<u64>> = conversion.sources.iter().map(|(_, kind, _)| kind.rows).collect();
        Self { key, originals, conversion, is_in_place: false, rows: rows.unwrap_or_default() }
    }

    /// The columns that all files have as plain parquet; `None` if a file must be converted.
    fn common_columns(&self) -> Option<Vec<String>> {
        let mut columns: Option<Vec<String>> = None;
        for ((path, kind, pairing), original) in self.conversion.sources.iter().zip(&self.originals) {
            let is_flat = pairing.is_flat();
            let of_file: Vec<String> = pairing.columns().into_iter().map(|column| column.name).collect();
            let is_plain = path == original && kind.is_in_place(path, &of_file);
            if !is_plain || !is_flat || columns.as_ref().is_some_and(|columns| *columns != of_file) {
                return None;
            }
            columns = Some(of_file);
        }
        columns
    }

    /// The columns of the files that give no text, in the order of their first occurrence.
    pub fn unused(&self) -> Vec<String> {
        let mut unused = Vec::new();
        for (kind, pairing) in self.conversion.kinds() {
            for column in pairing.unused(&kind.columns) {
                if !unused.contains(&column) {
                    unused.push(column);
                }
            }
        }
        unused
    }

    /// The labels of at most `most` rows of each file, if the files have two columns and the second is one of labels.
    pub fn labels(&self, most: usize) -> Outcome<Labels> {
        let (mut labels, mut row) = (Labels::default(), Row::default());
        for (path, kind, pairing) in &self.conversion.sources {
            let Some((_, column)) = pairing.flat().filter(|(_, column)| is_label_column(column)) else { continue };
            let mut rows = Rows::open(path, kind, &[Column::text(column)], false)?;
            for _ in 0..most {
                let Some(read) = rows.next(&mut row)? else { break };
                let label = row.cells.first().and_then(Cell::text).filter(|_| read.is_ok());
                label.into_iter().for_each(|label| labels.add(label));
            }
        }
        Ok(labels)
    }

    /// The way from a row's number back to its file. Unpacked files have to be there still.
    pub fn trace(&self) -> Trace {
        Trace::new(self.conversion.clone(), self.originals.clone(), self.is_in_place)
    }

    /// One line for people: the files, the columns of their texts, and the columns that are not used. Files that are read alike are one item.
    pub fn in_words(&self) -> String {
        const SHOWN: usize = 4;
        let mut readings: Vec<(String, &Path, usize)> = Vec::new();
        for (path, (_, kind, pairing)) in self.originals.iter().zip(&self.conversion.sources) {
            let words = format!("{}, {}", kind.in_words(), pairing.of_classes(&kind.classes));
            match readings.iter_mut().find(|(known, ..)| *known == words) {
                Some((.., files)) => *files += 1,
                None => readings.push((words, path, 1)),
            }
        }
        let of_files = |(words, path, files): &(String, &Path, usize)| match files {
            1 => format!("{}: {words}", path.display()),
            files => format!("{files} files from {}: {words}", path.display()),
        };
        let shown = readings.iter().take(SHOWN).map(of_files).collect::<Vec<_>>().join("; ");
        let more = match readings.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!("; and {} more", plural(more as u64, "reading")),
        };
        format!("{}: {shown}{more}{}", self.key, unused_in_words(&self.unused()))
    }

    /// Whether its columns have the usual names, and nothing is left out.
    pub fn is_usual(&self) -> bool {
        let (_, _, pairing) = &self.conversion.sources[0];
        pairing.flat() == Some(("prompt", "response")) && self.unused().is_empty()
    }

    fn to_json(&self) -> Value {
        let files = self.conversion.sources.iter().zip(&self.originals).take(MAX_SHOWN).zip(0..);
        let files = files.map(|(((_, kind, pairing), original), number)| {
            let columns: Vec<String> = pairing.columns().into_iter().map(|column| column.name).collect();
            let classes: Map<String, Value> = columns
                .iter()
                .filter_map(|column| Some((column.clone(), json!(&kind.classes.names(column)?[..]))))
                .collect();
            let (delimiter, quotes) = kind.dialect().unzip();
            json!({
                "file": original.display().to_string(), "form": kind.form.name(), "rows": self.rows.get(number),
                "encoding": kind.encoding(), "delimiter": delimiter, "quotes": quotes, "classes": classes,
                // The debug form is the name in JSON.
                "compression": format!("{:?}", kind.compression).to_lowercase(), "texts": pairing.in_words(),
                "columns": columns,
                "not_used": pairing.unused(&kind.columns),
            })
        });
        let files = files.collect::<Vec<_>>();
        json!({"files": files, "more_files": self.originals.len() - files.len(), "is_converted": !self.is_in_place})
    }
}

fn sampled(rows: u64) -> String {
    format!("in a sample of {}", plural(rows, "row"))
}

/// The name of a column for people. pandas writes its index as a column without a name.
pub fn shown_column(name: &str) -> &str {
    if name.is_empty() { "(no name)" } else { name }
}

/// The columns that are not used, as the end of a line.
pub fn unused_in_words(unused: &[String]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = unused.iter().take(SHOWN).map(|name| format!("`{}`", shown_column(name))).collect();
    let splits = if unused.iter().any(|name| name == "split") { "; rows of every `split` are used" } else { "" };
    match unused.len().checked_sub(SHOWN) {
        _ if unused.is_empty() => String::new(),
        Some(more) if more > 0 => format!("; not used: {} and {} more{splits}", names.join(", "), counted(more as u64)),
        _ => format!("; not used: {}{splits}", names.join(", ")),
    }
}

/// The task of a run: the one that is named, or the model's.
pub fn task(config: &Config, model: &t5::Config) -> Task {
    config.task.unwrap_or_else(|| Task::from_head(&model.head))
}

/// The labels of a run's rows, in the order of their indices; none: the task has none. A model's own labels stay, if the rows have no others.
fn labels_of(config: &Config, model: &t5::Config, train: &Part) -> Outcome<Vec<String>> {
    let task = task(config, model);
    if matches!(task.response(), Response::Text | Response::Number) {
        return Ok(Vec::new());
    }
    let own = model.head.labels().filter(|_| Task::from_head(&model.head) == task);
    let Some(own) = own else { return labels::read(&train.conversion, &train.originals[0], task) };
    if config.task.is_none() {
        return Ok(own.names.clone());
    }
    let found = labels::read(&train.conversion, &train.originals[0], task)?;
    Ok(if found.iter().all(|label| own.names.contains(label)) { own.names.clone() } else { found })
}

/// The columns that the config names for a task, as the reader's type.
pub fn chosen(columns: &Columns, task: Task) -> Chosen {
    let of = columns.clone();
    Chosen {
        prompt: of.prompt,
        response: of.response,
        text: of.text,
        source: of.source,
        target: of.target,
        source_lang: of.source_lang,
        target_lang: of.target_lang,
        is_text: of.is_text,
        preference: of.preference,
        has_labels: of.has_labels,
        label: of.label,
        is_of_words: task.response() == Response::LabelsOfWords,
        is_of_sets: task.response() == Response::LabelSet,
        is_of_vectors: task == Task::Embedding,
        ranked: of.ranked,
        query: of.query,
    }
}

impl Reading {
    /// The objective, by the config's name.
    pub fn config_objective(&self) -> config::Objective {
        if self.objective.has_targets() { config::Objective::TextToText } else { config::Objective::Denoising }
    }

    /// The reading of these files.
    ///
    /// # Errors
    /// The objective needs pairs, and the files have texts; or some files have pairs and others texts.
    pub fn resolve(
        config: &Config,
        (model, tokenizer): (&t5::Config, &Tokenizer),
        mut train: Part,
        mut validation: Option<Part>,
        left: Vec<PathBuf>,
    ) -> Outcome<Self> {
        let is_text = train.conversion.is_text();
        if is_text && config.data.objective == Some(config::Objective::TextToText) {
            return Err(Failure::unusable(
                "the training files have a column `text` alone, and `data.objective` is \"text-to-text\"",
            )
            .hint("name two columns with `data.prompt_column` and `data.response_column`")
            .hint("or pretrain on the text: `--set data.objective=span-corruption`"));
        }
        if let Some(validation) = validation.as_ref().filter(|part| part.conversion.is_text() != is_text) {
            let (text, pairs) = (validation.originals[0].clone(), train.originals[0].clone());
            return Err(row_files::Error::Mixed { text, pairs }.into());
        }
        let data = &config.data;
        let task = task(config, model);
        if task == Task::Embedding && (is_text || config.embedding.is_none()) {
            return Err(Failure::unusable("an encoder is trained on texts that belong together: a query and a positive text in each row")
                .hint("`--set task.name=embedding`, with `data.prompt_column` and `data.response_column` if they have other names"));
        }
        let has_other_rows = is_text || data.chosen.preference.is_some() || data.chosen.has_labels;
        if task.response() != Response::Text && has_other_rows {
            return Err(Failure::unusable("the training files have no labels, which `task.name` asks for")
                .hint("name the columns with `data.prompt_column` and `data.response_column`"));
        }
        let labels = labels_of(config, model, &train)?;
        // Files that are read in place keep their own columns; converted files have this program's columns.
        let in_place = train.common_columns().filter(|_| config.data.validation_split.is_none());
        train.is_in_place = in_place.is_some();
        let objective = objective::resolve(config, (task, is_text), labels, in_place, tokenizer)?;
        if let Some(validation) = &mut validation {
            validation.is_in_place = validation.common_columns().is_some_and(|of| of == objective.columns());
        }
        let said_by = match &config.model.init_from {
            Some(directory) => directory.join("config.json").display().to_string(),
            None => config.model.config.clone().unwrap_or_default(),
        };
        let ids = Ids {
            starts: tokenizer.start_ids().to_vec(),
            end: model.eos_token_ids.first().copied().unwrap_or(1),
            answer_start: model.decoder_start_token_id,
            padding: model.pad_token_id,
            said_by,
        };
        Ok(Self {
            objective,
            train,
            validation,
            left,
            source_prefix: model.prefix().to_owned(),
            truncation_side: tokenizer.truncation_side().unwrap_or_default(),
            longest: [data.max_source_tokens, data.max_target_tokens],
            ids,
            task,
            survival: None,
        })
    }

    /// The head of a model that is trained on these rows, or evaluated.
    pub fn head(&self) -> t5::Head {
        let labels = match &self.objective {
            Objective::Labels { labels, .. } | Objective::LabelsOfWords { labels, .. } => labels.clone(),
            _ => Vec::new(),
        };
        self.task.head(labels)
    }

    /// What the tokenizer does not hold, and what is put before and cut from sources, in a few words for the first screen.
    pub fn texts_in_words(&self) -> Option<String> {
        let mut words = Vec::new();
        if !self.source_prefix.is_empty() {
            words.push(format!("`{}` before every source", self.source_prefix.escape_debug()));
        }
        if self.truncation_side == Side::Left {
            words.push("longer sources lose their beginning".to_owned());
        }
        let survival = self.survival.as_ref();
        words.extend(survival.and_then(|(survival, rows)| survival.in_words(&sampled(*rows))));
        (!words.is_empty()).then(|| words.join("; "))
    }

    /// The whole reading, for the `start` event.
    pub fn to_json(&self) -> Value {
        json!({
            "objective": self.objective,
            "train": self.train.to_json(),
            "validation": self.validation.as_ref().map(Part::to_json),
            "source_prefix": self.source_prefix,
            "truncation_side": self.truncation_side.name(),
            "max_source_tokens": self.longest[0],
            "max_target_tokens": self.longest[1],
            "ids": {"starts": self.ids.starts, "end": self.ids.end, "answer_start": self.ids.answer_start,
                "padding": self.ids.padding, "said_by": self.ids.said_by},
            "tokenizer": self.survival.as_ref().map(|(survival, rows)| survival.to_json(&sampled(*rows))),
            "left_alone": self.left.iter().take(MAX_SHOWN).map(|path| path.display().to_string()).collect::<Vec<_>>(),
        })
    }
}
