//! The files of a run, with their kinds and columns: those of `data.train` and `data.validation`, or of the tasks of a mixture.

use std::collections::HashSet;
use std::path::PathBuf;

use memory_policy::{Probe, SystemProbe};
use row_files::{Chosen, Conversion, Encoding, Quoting, ReadOptions};

use crate::config::Config;
use crate::config::task::Task;
use crate::data::data_files;
use crate::data::reading::{self, Part};
use crate::data::splits::{self, Purpose};
use crate::data::tasks::{self, FilesOfTasks};
use crate::data::unpacked::Unpacked;
use crate::failure::{Failure, Outcome};
use crate::job;
use crate::screen::report;

/// The files of a run, with their kinds and columns.
pub struct Files {
    /// The training files.
    pub train: Part,
    /// The validation files.
    pub validation: Option<Part>,
    /// Files of the same directories that the run leaves alone.
    pub left: Vec<PathBuf>,
    /// The files of each task of a mixture, for training and for validation.
    pub of_tasks: Option<[FilesOfTasks; 2]>,
    /// The files that were unpacked.
    pub unpacked: Unpacked,
}

/// The files that the config names.
pub fn files(config: &Config, task: Task, purpose: Purpose, say: fn(&str)) -> Outcome<Files> {
    let (label, mut unpacked) = (config.label_of_rows(), Unpacked::default());
    let mut convert = |originals: &[PathBuf], chosen: &Chosen, options: &ReadOptions| -> Outcome<Conversion> {
        let files = unpacked.files(originals, say)?;
        Conversion::new(&files, chosen, options).map_err(|error| unfit(error, config))
    };
    if !config.data.tasks.tasks.is_empty() {
        let [train, validation] = [tasks::files(config, purpose)?, tasks::files(config, Purpose::Validation)?];
        let options = read_options(config, &train.concat())?;
        let mut convert = |originals: &[PathBuf], chosen: &Chosen| convert(originals, chosen, &options);
        let (train, of_train) = tasks::part(config, train, &mut convert)?;
        let (validation, of_validation) = tasks::part(config, validation, &mut convert)?;
        let train = train.expect("every task names files");
        return Ok(Files { train, validation, left: Vec::new(), of_tasks: Some([of_train, of_validation]), unpacked });
    }
    let mut chosen = reading::chosen(&config.data.chosen, task);
    let groups = data_files::groups(label, &config.data.train)?;
    if let (Purpose::Training, Some(file)) = (purpose, splits::trains_on(&groups)) {
        report::warn(&format!(
            "{} was named, so its rows are trained on; a pattern in quotes or a directory tells splits apart",
            file.display()
        ));
    }
    let divided = splits::divide(groups, purpose, "--data ")?;
    let mut left = divided.left;
    let validation = match config.data.validation.as_slice() {
        [] if config.data.validation_split.is_none() => divided.validation,
        [] => {
            left.extend(divided.validation);
            Vec::new()
        }
        patterns => {
            left.extend(divided.validation);
            let groups = data_files::groups("data.validation", patterns)?;
            let of_validation = splits::divide(groups, Purpose::Validation, "--set data.validation=")?;
            left.extend(of_validation.left);
            of_validation.wanted
        }
    };
    if let Some(file) = validation.iter().find(|file| divided.wanted.contains(file)) {
        report::warn(&format!("{} is for training and for validation: its scores say little", file.display()));
    }
    if !left.is_empty() {
        let read: HashSet<&PathBuf> = divided.wanted.iter().chain(&validation).collect();
        left.retain(|file| !read.contains(file));
    }
    left.dedup();
    let options = read_options(config, &divided.wanted)?;
    let mut part = |key, originals: Vec<PathBuf>, chosen: &Chosen| -> Outcome<Part> {
        let conversion = convert(&originals, chosen, &options)?;
        Ok(Part::new(key, originals, conversion))
    };
    let train = part(label, divided.wanted, &chosen)?;
    chosen.is_text = train.conversion.is_text();
    let has_validation = !validation.is_empty();
    let validation = has_validation.then(|| part("data.validation", validation, &chosen)).transpose()?;
    Ok(Files { train, validation, left, of_tasks: None, unpacked })
}

/// An error in finding columns, with the key that sets them.
fn unfit(error: row_files::Error, config: &Config) -> Failure {
    let row_files::Error::Columns { columns, .. } = &error else { return error.into() };
    match columns.as_slice() {
        [] => error.into(),
        columns if config.data.chosen.is_text => {
            let listed = row_files::listed(columns);
            Failure::unusable(error.to_string()).hint(format!("set `data.text_column` to one of: {listed}"))
        }
        columns if config.preference.is_some() => {
            let keys = match config.preference.is_some_and(|of| of.loss.has_labels()) {
                true => "`data.prompt_column`, `data.response_column` and `data.label_column`",
                false => "`data.prompt_column`, `data.chosen_column` and `data.rejected_column`",
            };
            let hint = format!("the file has {}; set {keys}, see docs/preferences.md", row_files::listed(columns));
            Failure::unusable(error.to_string()).hint(hint)
        }
        columns => {
            let has_both = PREFERENCE.iter().all(|name| columns.iter().any(|column| column == name));
            let failure = Failure::from(error).hint(
                "recognised by name: prompt and response, messages, instruction and output, question and answer; see docs/data.md",
            );
            if !has_both {
                return failure;
            }
            failure.hint(
                "`chosen` is preferred to `rejected`: `--lora --set preference.loss=dpo`, or without an adapter \
                 `--set preference.loss=orpo`",
            )
        }
    }
}

/// The usual columns of rows with a chosen and a rejected answer.
const PREFERENCE: [&str; 3] = ["prompt", "chosen", "rejected"];

/// How the config says that files are read, within its memory budget.
fn read_options(config: &Config, files: &[PathBuf]) -> Outcome<ReadOptions> {
    let encoding = config.data.encoding.as_deref().map(|name| {
        Encoding::of_name(name).ok_or_else(|| {
            Failure::usage(format!("data.encoding: no encoding `{name}`"))
                .hint("expected one such as utf-8, windows-1252, gb18030, big5, shift_jis, euc-kr or utf-16le")
        })
    });
    let quoting = match config.data.has_quotes {
        None => Quoting::Auto,
        Some(true) => Quoting::Quoted,
        Some(false) => Quoting::Plain,
    };
    let options = ReadOptions { encoding: encoding.transpose()?, quoting, ..ReadOptions::default() };
    let now = SystemProbe::new().snapshot()?;
    let left = job::budgets(config).process.resolve(&now).0.saturating_sub(now.rss.0);
    let bytes = files.iter().map(|path| regular_file::metadata(path).map_or(0, |file| file.len())).sum();
    Ok(options.within(left, bytes, if config.data.validation_split.is_some() { 2 } else { 1 }))
}
