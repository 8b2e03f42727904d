//! The rows of the tasks of a mixture: their files in one list, and the rows of each task in what is read.

use std::path::PathBuf;
use std::sync::Arc;

use dataloader::{MixedTask, Mixture, samples_of};
use memory_policy::plural;
use row_files::{Chosen, Conversion};
use run_report::visible;

use crate::config::task::Task;
use crate::config::{Config, DataTask, Mixing};
use crate::data::data_files;
use crate::data::reading::{self, Part};
use crate::data::splits::{self, Purpose};
use crate::failure::{Failure, Outcome};

/// The key of the tasks.
const KEY: &str = "data.tasks";

/// The number of files of each task; a task without such files has none.
pub type FilesOfTasks = Vec<usize>;

/// The files of each task, for training or for validation. For scores, a task's only files are those that a run validates on.
pub fn files(config: &Config, purpose: Purpose) -> Outcome<Vec<Vec<PathBuf>>> {
    let of_task = |task: &DataTask| -> Outcome<Vec<PathBuf>> {
        let patterns = if purpose == Purpose::Validation { &task.validation } else { &task.train };
        let purpose = if purpose == Purpose::Scores { Purpose::Validation } else { purpose };
        Ok(splits::divide(data_files::groups(KEY, patterns)?, purpose, "--set data.tasks=")?.wanted)
    };
    let tasks = config.data.tasks.tasks.iter();
    tasks.map(|task| of_task(task).map_err(|failure| named(&task.name, failure))).collect()
}

/// All tasks' files as one part, each with its task's columns, and the number of each task's files. `None`: there are no files.
pub fn part(
    config: &Config,
    files: Vec<Vec<PathBuf>>,
    convert: &mut dyn FnMut(&[PathBuf], &Chosen) -> Outcome<Conversion>,
) -> Outcome<(Option<Part>, FilesOfTasks)> {
    let of_tasks = files.iter().map(Vec::len).collect();
    let (mut originals, mut conversion) = (Vec::new(), None::<Conversion>);
    for (task, files) in config.data.tasks.tasks.iter().zip(files).filter(|(_, files)| !files.is_empty()) {
        let of_task = convert(&files, &reading::chosen(&task.columns, Task::TextToText))
            .map_err(|failure| named(&task.name, failure))?;
        if of_task.is_text() {
            return Err(Failure::unusable(format!(
                "`{KEY}`: task `{}`: {} has a column of texts alone; tasks have pairs of a source and a target",
                task.name,
                files[0].display()
            ))
            .hint("name two columns of the task: `prompt_column` and `response_column`"));
        }
        originals.extend(files);
        match &mut conversion {
            None => conversion = Some(of_task),
            Some(conversion) => conversion.sources.extend(of_task.sources),
        }
    }
    Ok((conversion.map(|conversion| Part::new(KEY, originals, conversion)), of_tasks))
}

fn named(task: &str, failure: Failure) -> Failure {
    Failure { message: format!("task `{task}`: {}", failure.message), ..failure }
}

/// The rows of each task, from the rows of each file.
pub fn rows_of(of_tasks: &FilesOfTasks, of_files: &[u64]) -> Vec<u64> {
    let mut files = of_files.iter();
    of_tasks.iter().map(|count| files.by_ref().take(*count).sum()).collect()
}

/// The mixture of tasks with these rows.
///
/// # Errors
/// A task has no rows, or all rates are 0.
pub fn mixture(config: &Config, model: &t5::Config, rows: &[u64]) -> Outcome<Arc<Mixture>> {
    let of = &config.data.tasks;
    if let Some((task, _)) = of.tasks.iter().zip(rows).find(|(_, rows)| **rows == 0) {
        let files = task.train.join(", ");
        return Err(Failure::unusable(format!("`{KEY}`: task `{}` has no rows: {files}", task.name))
            .hint("leave the task out, or name files with rows"));
    }
    let weights: Vec<f64> = of.tasks.iter().map(|task| task.weight).collect();
    let mixing = match of.mixing {
        Some(Mixing::Equal) => dataloader::Mixing::Equal,
        Some(Mixing::Temperature(temperature)) => dataloader::Mixing::Temperature(temperature),
        Some(Mixing::Proportional) | None => dataloader::Mixing::Proportional,
    };
    let Some(samples) = samples_of(rows, mixing, of.limit, &weights) else {
        return Err(Failure::usage(format!("`{KEY}`: the weights of the tasks sum to nothing"))
            .hint("give a task with rows a `weight` above 0"));
    };
    let tasks = of.tasks.iter().zip(rows).zip(samples);
    let tasks = tasks.map(|((task, rows), samples)| MixedTask {
        name: task.name.clone(),
        rows: *rows,
        samples,
        source_prefix: task.source_prefix.clone().unwrap_or_else(|| model.prefix().to_owned()),
    });
    Ok(Arc::new(Mixture::new(tasks.collect())?))
}

/// The tasks for people, a line each.
pub fn in_words(mixture: &Mixture) -> String {
    const SHOWN: usize = 12;
    let line = |task: &MixedTask| {
        let prefix = match task.source_prefix.as_str() {
            "" => String::new(),
            prefix => format!(", `{}` before every source", prefix.escape_debug()),
        };
        let (rows, samples) = (plural(task.rows, "row"), plural(task.samples, "sample"));
        format!("  task {}: {rows}, {samples} an epoch{prefix}", visible::line(&task.name))
    };
    let mut lines: Vec<String> = mixture.tasks().iter().take(SHOWN).map(line).collect();
    if let Some(more) = mixture.tasks().len().checked_sub(SHOWN).filter(|more| *more > 0) {
        lines.push(format!("  and {}", plural(more as u64, "more task")));
    }
    lines.join("\n")
}
