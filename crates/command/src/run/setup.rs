//! From the command line to a config and opened files: the common steps of `train`, `plan` and `--dry-run`.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use dataloader::{BatchShare, DataLoader, LoaderLimits, LoaderOptions, Position};
use memory_policy::{Bytes, Probe, SystemProbe};

use crate::cli::TrainArgs;
use crate::config::{self, Config, Values, paths};
use crate::data::row_data::{self, Wanted};
use crate::failure::{Failure, Outcome};
use crate::files::assets;
use crate::files::run_dir::{self, MAX_CONFIG_BYTES, PAGE_MAP, RESOLVED, RunDir};
use crate::machine::stages;
use crate::run::open::{self, KeptPageMap, Opened};
use crate::run::run_data;
use crate::screen::report;

/// A larger page map is ignored and made again: it would have about forty million pages.
const MAX_PAGE_MAP_BYTES: u64 = 1 << 30;

/// Reads the defaults, then the config file, then the flags, and resolves them.
///
/// Without `--config`, `--keep-training` uses the config that the output directory's run was started with. A command with neither a model
/// nor data uses the embedded default.
pub fn read_config(flags: &TrainArgs) -> Outcome<Config> {
    let values = read_values(flags)?;
    let config = Config::resolve(values)?;
    warn_of_missing_memory(flags, &config);
    Ok(config)
}

/// As [`read_config`], but the data may be missing: a plan can be made without data.
pub fn read_config_to_plan(flags: &TrainArgs) -> Outcome<Config> {
    let values = read_values(flags)?;
    let config = Config::resolve_without_data(values)?;
    warn_of_missing_memory(flags, &config);
    Ok(config)
}

/// Warns if the budget is more than the memory of this machine, for which the plan is made unless `--machine` names another.
fn warn_of_missing_memory(flags: &TrainArgs, config: &Config) {
    let Ok(now) = SystemProbe::new().snapshot() else { return };
    if let Some(budget) =
        config.memory.budget.map(Bytes).filter(|budget| flags.machine.is_none() && *budget > now.total)
    {
        report::warn(&format!(
            "`memory.budget` ({}) is {budget}, and this machine has {} of memory in all",
            config.values.origin("memory.budget"),
            now.total
        ));
    }
}

fn read_values(flags: &TrainArgs) -> Outcome<Values> {
    let mut typed = Values::defaults();
    flags.apply(&mut typed)?;
    flags.lost()?.iter().for_each(|warning| report::warn(warning));
    let output = typed.text("run.output_dir").unwrap_or_default();
    let resumes = flags.keep_training == Some(true) && flags.names_output();
    let mut values = Values::defaults();
    match &flags.config {
        Some(path) => apply_file(&mut values, path)?,
        None if resumes && run_dir::apply_resolved(&mut values, &paths::from_text(&output))? => {
            // A change that was allowed once is not allowed for ever.
            values.reset("run.allow_changes")?;
        }
        None if assets::is_wanted(&typed) => assets::apply(&mut values)?,
        None => {}
    }
    flags.apply(&mut values)?;
    config::resolve_precedence(&mut values)?;
    Ok(values)
}

/// Sets the values of a config file.
pub fn apply_file(values: &mut Values, path: &Path) -> Outcome<()> {
    values.apply_file(&path.display().to_string(), &read_named_file(path, "config")?)
}

/// The text of a file that the user named. `what` describes the file in errors.
pub fn read_named_file(path: &Path, what: &str) -> Outcome<String> {
    regular_file::read_to_string(path, MAX_CONFIG_BYTES).map_err(|error| unread(path, what, &error))
}

/// The failure for a named file that cannot be read. A wrong name is the user's mistake; a failing disk is not.
fn unread(path: &Path, what: &str, error: &std::io::Error) -> Failure {
    use ErrorKind::{FileTooLarge, InvalidData, InvalidInput, NotADirectory, NotFound, PermissionDenied};
    if ![NotFound, PermissionDenied, NotADirectory, InvalidInput, InvalidData, FileTooLarge].contains(&error.kind()) {
        return Failure::io(&format!("read the {what}"), path, error);
    }
    Failure::usage(format!("{}: cannot read the {what}: {error}", path.display())).hint(match what {
        "list of runs" => "`train_low_mem jobs add FILE --output DIR` makes a list; docs/runs.md shows one",
        _ => "paths are relative to the current directory",
    })
}

/// Writes the embedded files that the config needs below the directory of the run.
pub fn place_embedded_files(config: Config, run: &mut RunDir) -> Outcome<Config> {
    let mut values = config.values;
    let root = run.root().to_owned();
    assets::place(&mut values, &root, &mut |made| run.note_made(made))?;
    Config::resolve(values)
}

/// Opens the files that the config names, with the page map that an earlier run may have left in `directory`.
///
/// A resumed run ([`Wanted::resumes`]) must read the same data as before, unless `--allow-changed data` permits changes. A page with other
/// bytes is an error when it is read. A file of which only the time changed causes a warning here.
pub fn open(config: &Config, run: &mut RunDir, wanted: Wanted<'_>) -> Outcome<Opened> {
    let directory = run.root().to_owned();
    // A cache of facts about the data files: without it the files are read again.
    let kept = run_dir::read(&directory, PAGE_MAP, MAX_PAGE_MAP_BYTES).ok();
    let keeps_digests = wanted.resumes && !config.run.allow_changes.iter().any(|part| part == "data");
    let page_map = kept.map(|bytes| KeptPageMap { bytes, keeps_digests });
    let mut opened = Opened::new(config, |of| row_data::prepare(config, of, run, wanted), page_map)?;
    opened.train.find_pages()?;
    if let [first, more @ ..] = opened.train.touched_files().as_slice() {
        let others = if more.is_empty() { String::new() } else { format!(" and {} more files", more.len()) };
        report::warn(&format!(
            "{}{others}: changed or replaced since this run read it, with the same size and footer. \
             Pages that were read before are checked when they are read again",
            first.display()
        ));
    }
    // The pages are needed only for the memory of reading them: an evaluation starts at the first row.
    opened.validation.as_ref().map(|validation| validation.find_pages()).transpose()?;
    opened.reading.survival = run_data::survival(config, &opened);
    opened.stages.ends(stages::FOOTERS)?;
    Ok(opened)
}

/// Writes the page map again, with the digests of the pages that have been read.
pub fn keep_page_map(opened: &Opened, directory: &Path) -> Outcome<()> {
    Ok(durable_files::write_atomic(&directory.join(PAGE_MAP), &opened.train.page_map()?)?)
}

/// Takes the directory for an accepted run, and writes the run's config.
pub fn begin(config: &Config, opened: &Opened, run: &mut RunDir) -> Outcome<()> {
    run.own()?;
    if !run.is_locked() {
        return Ok(());
    }
    let map = opened.train.page_map()?;
    if opened.kept_page_map.as_ref() != map.last_chunk() {
        durable_files::write_atomic(&run.root().join(PAGE_MAP), &map)?;
    }
    drop(map);
    let heading = format!(
        "The resolved config of this run. `train_low_mem --config` with this file repeats the run.\nreading: {}",
        opened.reading.to_json()
    );
    Ok(durable_files::write_atomic(&run.root().join(RESOLVED), config.to_toml(&heading).as_bytes())?)
}

/// The stream of batches from `position` on, and the step at which the run ends after `done` steps so far: at the end of the epochs or at
/// `train.max_steps`, whichever is first.
pub fn steps(
    config: &Config,
    opened: &Opened,
    position: Position,
    done: u64,
    share: BatchShare,
) -> Outcome<(DataLoader, u64)> {
    let options = LoaderOptions { share, ..open::loader_options(config, opened) };
    let idle = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
    let loader = DataLoader::new(Arc::clone(&opened.train), Arc::clone(&opened.tokenizer), options, position, idle)?;
    let left = loader.batches_left().unwrap_or(u64::MAX);
    let total = config.train.max_steps.unwrap_or(u64::MAX).min(done.saturating_add(left));
    Ok((loader, total))
}
