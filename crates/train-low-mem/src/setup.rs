//! From the command line to a config and opened files: the steps that `train`, `plan` and `--dry-run` share.

use std::path::Path;
use std::sync::Arc;

use dataloader::{DataLoader, LoaderLimits, Position};
use memory_policy::{MemorySnapshot, Probe, ScriptedProbe, SystemProbe};

use crate::assets;
use crate::cli::TrainArgs;
use crate::config::{Config, Values};
use crate::failure::{Failure, Outcome};
use crate::open::{self, KeptPageMap, Opened};
use crate::report;

/// What an earlier run learnt about where the pages of the training files lie.
const PAGE_MAP: &str = "page-map.bin";
/// A larger page map is made again: it would be that of some forty million pages.
const MAX_PAGE_MAP_BYTES: u64 = 1 << 30;
/// The config as resolved.
const RESOLVED: &str = "resolved.toml";

/// Defaults, then the config file, then the flags, resolved.
///
/// Without `--config`, `--keep-training` takes the config that the output directory's run was started
/// with, and anything else the embedded default.
pub fn read_config(flags: &TrainArgs) -> Outcome<Config> {
    Config::resolve(read_values(flags)?)
}

/// As [`read_config`], but the data may be missing: a plan can be made without.
pub fn read_config_to_plan(flags: &TrainArgs) -> Outcome<Config> {
    Config::resolve_without_data(read_values(flags)?)
}

fn read_values(flags: &TrainArgs) -> Outcome<Values> {
    let mut typed = Values::defaults();
    flags.apply(&mut typed)?;
    let output = typed.text("run.output_dir").unwrap_or_default();
    let resolved = Path::new(&output).join(RESOLVED);
    let mut values = Values::defaults();
    match &flags.config {
        Some(path) => apply_file(&mut values, path)?,
        None if flags.keep_training == Some(true) && flags.names_output() && resolved.is_file() => {
            apply_file(&mut values, &resolved)?;
        }
        None => assets::apply(&mut values)?,
    }
    flags.apply(&mut values)?;
    if flags.config.is_none() {
        assets::make_room(&mut values)?;
    }
    Ok(values)
}

/// Lays a config file over what is there.
pub fn apply_file(values: &mut Values, path: &Path) -> Outcome<()> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::usage(format!("{}: cannot read the config: {error}", path.display()))
            .hint("paths are relative to the directory where the command runs; `configs/` has examples")
    })?;
    values.apply_file(&path.display().to_string(), &text)
}

/// Puts the embedded files that the config asks for below `directory`.
pub fn place_embedded_files(config: Config, directory: &Path) -> Outcome<Config> {
    let mut values = config.values;
    assets::place(&mut values, directory)?;
    Config::resolve(values)
}

/// Opens what the config names, with the page map kept in `directory`, which is made where there is none.
///
/// A run that goes on (`resumes`) is held to the data that it read before, unless `--allow-changed data` says otherwise:
/// a page with other bytes is then an error when it is read, and a file that was only touched is a warning here.
pub fn open(config: &Config, directory: &Path, resumes: bool) -> Outcome<Opened> {
    let kept = regular_file::read(&directory.join(PAGE_MAP), MAX_PAGE_MAP_BYTES).ok();
    let checksum = kept.as_ref().and_then(|bytes| bytes.last_chunk::<32>().copied());
    let keeps_digests = resumes && !config.run.allow_changes.iter().any(|part| part == "data");
    let opened = Opened::new(config, kept.map(|bytes| KeptPageMap { bytes, keeps_digests }))?;
    let map = opened.train.page_map()?;
    if let [first, more @ ..] = opened.train.touched_files().as_slice() {
        let others = if more.is_empty() { String::new() } else { format!(" and {} more files", more.len()) };
        report::warn(&format!(
            "{}{others}: changed or replaced since this run read it; size and footer are the same. \
             Pages that were read before are compared when they are read again",
            first.display()
        ));
    }
    // Only for what reading them costs: an evaluation starts at the first row.
    opened.validation.as_ref().map(|validation| validation.find_pages()).transpose()?;
    if checksum.as_ref() != map.last_chunk::<32>() {
        trainer::write_atomic(&directory.join(PAGE_MAP), &map)?;
    }
    Ok(opened)
}

/// Writes the page map again, with the digests of the pages that were read meanwhile.
pub fn keep_page_map(opened: &Opened, directory: &Path) -> Outcome<()> {
    Ok(trainer::write_atomic(&directory.join(PAGE_MAP), &opened.train.page_map()?)?)
}

/// Writes `resolved.toml`.
pub fn write_resolved(config: &Config, directory: &Path) -> Outcome<()> {
    let heading = "The config of this run as resolved. `train_low_mem --config` this file repeats it.";
    Ok(trainer::write_atomic(&directory.join(RESOLVED), config.to_toml(heading).as_bytes())?)
}

/// The stream of batches from `position` on, and the step at which the run ends when `done` steps are made:
/// where the epochs end or `train.max_steps` says, whichever comes first.
pub fn steps(config: &Config, opened: &Opened, position: Position, done: u64) -> Outcome<(DataLoader, u64)> {
    let options = open::loader_options(config, &opened.model);
    let idle = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
    let loader = DataLoader::new(Arc::clone(&opened.train), Arc::clone(&opened.tokenizer), options, position, idle)?;
    let left = loader.batches_left().unwrap_or(u64::MAX);
    let total = config.train.max_steps.unwrap_or(u64::MAX).min(done.saturating_add(left));
    Ok((loader, total))
}

/// What plans are made from: this machine, or the one that `--machine` describes. Where a card is to compute and nothing
/// can be learnt about its memory, that is said, and the run goes on.
pub fn machine(flags: &TrainArgs, config: &Config) -> Outcome<Box<dyn Probe>> {
    let Some(path) = &flags.machine else {
        let probe = SystemProbe::new();
        let Some(index) = open::card(&config.run.device) else { return Ok(Box::new(probe)) };
        let probe = probe.with_card(index);
        if let Some(Err(why)) = probe.device_memory() {
            report::note(&format!(
                "{why}; what the device has free is not known, only --device-memory-budget bounds it"
            ));
        }
        return Ok(Box::new(probe));
    };
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{}: cannot read the machine: {error}", path.display())))?;
    let snapshots: Vec<MemorySnapshot> = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{}: {error}", path.display()))
            .hint("a JSON list of snapshots, one a plan, such as [{\"total\": 17179869184, \"available\": 1503238553}]")
    })?;
    if snapshots.is_empty() {
        return Err(Failure::usage(format!("{}: expected at least one snapshot, got none", path.display())));
    }
    Ok(Box::new(ScriptedProbe::around_this_process(snapshots)))
}

/// The one line that says what a run is about to do.
pub fn announce(config: &Config, opened: &Opened, total_steps: u64) {
    let parameters: u64 = t5::ParameterSpec::all(&opened.model).iter().map(t5::ParameterSpec::elements).sum();
    let start = match &config.model.init_from {
        Some(directory) => format!("from {}", directory.display()),
        None => "from scratch".to_string(),
    };
    #[expect(clippy::cast_precision_loss, reason = "for reading")]
    let millions = parameters as f64 / 1e6;
    report::print(&format!(
        "T5 with {millions:.1} M parameters, {start}; {} rows, {} samples a step, {total_steps} steps; output in {}\n",
        opened.train.rows(),
        config.train.batch_size,
        config.run.output_dir.display()
    ));
}
