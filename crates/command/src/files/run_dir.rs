//! The output directory: its names, and the rule that no run is ever overwritten.
//!
//! ```text
//! OUTPUT/resolved.toml   the config as resolved
//! OUTPUT/data/           rows of other files, converted to parquet
//! OUTPUT/metrics.jsonl   one line per event
//! OUTPUT/report.html     the run as a page
//! OUTPUT/events.out.tfevents.0.train_low_mem   the same numbers for TensorBoard
//! OUTPUT/base-nf4/       the quantised base of an adapter
//! OUTPUT/teacher-logits  logits of a teacher that reads each row once
//! OUTPUT/checkpoints/    step-00000100, ...
//! OUTPUT/model/          the finished model
//! OUTPUT/adapter/        or the finished adapter, where one is trained
//! OUTPUT/finished.json   the step of the model, and its evaluations; written last
//! ```
//!
//! One process writes here: it holds [`durable_files::RunLock`]. `--dry-run` only reads the directory. A run that is refused, because of the
//! directory, its data or its budget, leaves the directory unchanged. Nothing is written before [`RunDir::own`], except the embedded data
//! and converted rows, which are removed again.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use durable_files::{Directory, LOCK_FILE, RunLock, Scratch, is_temporary_name};
use serde::Serialize;
use serde_json::{Value, json};
use trainer::checkpoint::{self, CHECKPOINTS_DIRECTORY, OWN_FILES};

use crate::config::Values;
use crate::failure::{Failure, Outcome};
use crate::files::assets;
use crate::screen::{report, shell_words};

/// The config as resolved.
pub const RESOLVED: &str = "resolved.toml";
/// A longer config is invalid.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The file of a teacher's largest logits.
pub const TEACHER_LOGITS: &str = "teacher-logits";
/// The map of the training files' pages.
pub const PAGE_MAP: &str = "page-map.bin";
/// The directory for rows of files that are not parquet.
pub const ROWS: &str = "data";
/// That directory, and the files in it.
const CONVERTED_ROWS: [&str; 5] =
    [ROWS, "train-rows.parquet", "validation-rows.parquet", "train-rows.json", "validation-rows.json"];
/// Names for compressed parquet files that are unpacked while they are read.
pub const UNPACKED: [&str; 8] = [
    "unpacked-1.parquet",
    "unpacked-2.parquet",
    "unpacked-3.parquet",
    "unpacked-4.parquet",
    "unpacked-5.parquet",
    "unpacked-6.parquet",
    "unpacked-7.parquet",
    "unpacked-8.parquet",
];
/// The quantised base of an adapter.
pub const BASES: [&str; 2] = ["base-int8", "base-nf4"];
const METRICS: &str = "metrics.jsonl";
/// The run as a page.
pub const PAGE: &str = "report.html";
/// TensorBoard's event file.
pub const EVENTS: &str = "events.out.tfevents.0.train_low_mem";
const FINISHED: &str = "finished.json";
const MODEL: &str = "model";
const ADAPTER: &str = "adapter";

/// A longer `finished.json` is invalid: it holds two evaluations.
const MAX_FINISHED_BYTES: u64 = 16 << 20;

/// Sets the values of the resolved config that a run wrote. Returns whether there is one.
pub fn apply_resolved(values: &mut Values, run: &Path) -> Outcome<bool> {
    let path = run.join(RESOLVED);
    let failed = |error| Failure::io("read the config of the run", &path, &error);
    let bytes = match read(run, RESOLVED, MAX_CONFIG_BYTES) {
        Err(error) if is_absence(&error) => return Ok(false),
        bytes => bytes.map_err(failed)?,
    };
    let invalid = |error: std::string::FromUtf8Error| failed(std::io::Error::new(ErrorKind::InvalidData, error));
    values.apply_file(&path.display().to_string(), &String::from_utf8(bytes).map_err(invalid)?)?;
    Ok(true)
}

/// The values of the first run that made one of these models, adapters or checkpoints, with its directory. An error: its config has keys
/// that are no longer known.
pub fn values_of<'a>(trained: impl Iterator<Item = &'a Path>) -> Option<Outcome<(&'a Path, Values)>> {
    let mut roots = trained.flat_map(|path| [Some(path), path.parent()]).flatten();
    let mut values = Values::defaults();
    roots
        .find_map(|root| match apply_resolved(&mut values, root) {
            Ok(false) => None,
            Ok(true) => Some(Ok(root)),
            Err(failure) => Some(Err(failure)),
        })
        .map(|root| root.map(|root| (root, values)))
}

/// Reads a small file that a run wrote. A link is none of its files.
///
/// # Errors
/// Errors of the system, and of files that others planted.
pub fn read(run: &Path, name: &str, max_bytes: u64) -> std::io::Result<Vec<u8>> {
    Directory::open(run)?.read(name.as_ref(), max_bytes)
}

/// Reads the record of a finished run.
pub fn read_finished(run: &Path) -> Option<Value> {
    serde_json::from_slice(&read(run, FINISHED, MAX_FINISHED_BYTES).ok()?).ok()
}

/// Whether this is the name of a file or directory of a run, at any depth.
pub fn is_own_name(name: &OsStr) -> bool {
    let named = [
        LOCK_FILE,
        CHECKPOINTS_DIRECTORY,
        RESOLVED,
        PAGE_MAP,
        METRICS,
        PAGE,
        EVENTS,
        FINISHED,
        MODEL,
        ADAPTER,
        TEACHER_LOGITS,
    ];
    let others = BASES.into_iter().chain(assets::names()).chain(CONVERTED_ROWS).chain(UNPACKED);
    named.into_iter().chain(others).any(|own| name == own)
        || checkpoint::is_own_name(name)
        || checkpoint::step_of(name).is_some()
}

/// An output directory.
#[derive(Debug)]
pub struct RunDir {
    root: PathBuf,
    lock: Option<RunLock>,
}

impl RunDir {
    /// Creates the directory if necessary, and takes its lock. Existing files stay unchanged until the directory is owned.
    pub fn lock(root: &Path) -> Outcome<Self> {
        let lock = RunLock::acquire(root).map_err(|error| match Failure::from(error) {
            failure if failure.hints.is_empty() => {
                failure.hint("name a directory that can be made and written to: `--output DIR`")
            }
            failure => failure,
        })?;
        Ok(Self { root: root.to_path_buf(), lock: Some(lock) })
    }

    /// The directory for reading, whether or not it exists. Without its lock nothing may be written there.
    pub fn open_read_only(root: &Path) -> Self {
        Self { root: root.to_path_buf(), lock: None }
    }

    /// Whether this process may write here.
    pub fn is_locked(&self) -> bool {
        self.lock.is_some()
    }

    /// Marks the run as accepted: from here on it writes. Removes unfinished files of killed processes, and abandoned dry runs beside the
    /// directory.
    pub fn own(&mut self) -> Outcome<()> {
        let Some(lock) = &mut self.lock else { return Ok(()) };
        for name in [RESOLVED, PAGE_MAP, PAGE, EVENTS, FINISHED] {
            // Whatever else goes wrong with such a file, its reader or writer reports.
            let Ok(Some(found)) = lock.directory().entry(name.as_ref()) else { continue };
            if !found.is_ours() || matches!(found.kind, durable_files::Kind::Link | durable_files::Kind::Other) {
                let (path, found) = (self.root.join(name), found.in_words());
                report::warn(&format!("{}: this run replaces {found}", path.display()));
            }
        }
        lock.own(&[assets::DIRECTORY, ROWS, CHECKPOINTS_DIRECTORY], &OWN_FILES)?;
        let root = std::path::absolute(&self.root).unwrap_or_else(|_| self.root.clone());
        // A dry run lies in the nearest directory that existed when it began.
        root.ancestors().for_each(|directory| Scratch::remove_abandoned(directory, is_own_name));
        Ok(())
    }

    /// Remembers a file or directory that was made before the run owned its directory.
    pub fn note_made(&mut self, path: PathBuf) {
        if let Some(lock) = &mut self.lock {
            lock.note_made(path);
        }
    }

    /// Checks that no other run can have taken this directory, which is possible if it was moved or its lock was removed.
    pub fn check(&mut self) -> Outcome<()> {
        Ok(self.lock.as_mut().map_or(Ok(()), RunLock::check)?)
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `OUTPUT/checkpoints`
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join(CHECKPOINTS_DIRECTORY)
    }

    /// The place of the finished model: `OUTPUT/model`, or `OUTPUT/adapter` if an adapter is trained.
    pub fn model(&self, config: &t5::Config) -> PathBuf {
        self.root.join(if config.lora.is_some() { ADAPTER } else { MODEL })
    }

    /// `OUTPUT/metrics.jsonl`
    pub fn metrics(&self) -> PathBuf {
        self.root.join(METRICS)
    }

    /// The step of `OUTPUT/model`, if the run is finished.
    pub fn finished_step(&self) -> Option<u64> {
        let finished = read_finished(&self.root)?;
        let weights = [(MODEL, "model.safetensors"), (ADAPTER, "adapter_model.safetensors")];
        let is_there = weights.into_iter().any(|(directory, file)| is_at(&self.root.join(directory), file));
        finished["step"].as_u64().filter(|_| is_there)
    }

    /// Records that `OUTPUT/model` is the model of this step. This is the last file that a run writes.
    pub fn finish(&self, step: u64, history: &impl Serialize) -> Outcome<()> {
        let text = json!({ "step": step, "history": history });
        Ok(durable_files::write_atomic(&self.root.join(FINISHED), format!("{text:#}\n").as_bytes())?)
    }

    /// Refuses to resume a run that is not there. A run that was stopped before its first checkpoint is there: its config is.
    pub fn refuse_to_resume_nothing(&self) -> Outcome<()> {
        if is_run(&self.root) {
            return Ok(());
        }
        let root = self.root.display();
        let failure =
            Failure::usage(format!("{root}: there is no run to resume: expected its {RESOLVED} or checkpoints"));
        let failure = match similar_run(&self.root) {
            Some(similar) => failure.hint(format!("did you mean `--output {}`?", shell_words::quoted(&similar))),
            None => failure.hint("name the directory of the run: `--output DIR`"),
        };
        Err(failure.hint("to start a new run, leave out `--keep-training`"))
    }

    /// Refuses to start a new run in a directory with saved files.
    pub fn refuse_to_overwrite(&self) -> Outcome<()> {
        let has_checkpoints = self.has_checkpoints()?;
        let mut what = if has_checkpoints { Some("checkpoints") } else { None };
        for (directory, named) in [(MODEL, "a model"), (ADAPTER, "an adapter")] {
            let failed = |error| Failure::io("look for it", &self.root.join(directory), &error);
            let is_there = find(&self.root, directory).map_err(failed)?;
            what = what.or(is_there.then_some(named));
        }
        let Some(what) = what else { return self.refuse_to_replace() };
        Err(Failure::usage(format!(
            "{}: this directory already has {what} of a run; runs are never overwritten",
            self.root.display()
        ))
        .hint("resume that run with `--keep-training`")
        .hint("or start a new run elsewhere with `--output DIR`"))
    }

    /// Refuses to start a new run in a directory that has a file of somebody else with a name of the run's: a page called `report.html` is a
    /// likely one.
    fn refuse_to_replace(&self) -> Outcome<()> {
        let is_there = |name: &&str| is_at(&self.root, name);
        let Some(name) = [PAGE, EVENTS, FINISHED].into_iter().find(is_there).filter(|_| !is_run(&self.root)) else {
            return Ok(());
        };
        let path = self.root.join(name);
        Err(Failure::usage(format!("{}: no run wrote this file, and a run here would replace it", path.display()))
            .hint("name another directory for the run: `--output DIR`")
            .hint(format!("or move the file: `mv {0} {0}.old`", shell_words::quoted(&path))))
    }

    /// Whether the directory of checkpoints has anything except unfinished files of a killed process.
    fn has_checkpoints(&self) -> Outcome<bool> {
        let path = self.checkpoints();
        let failed = |error| Failure::io("list it", &path, &error);
        let names = match Directory::open(&path).and_then(|opened| opened.names()) {
            Err(error) if is_absence(&error) => return Ok(false),
            names => names.map_err(failed)?,
        };
        Ok(!names.iter().all(|name| is_temporary_name(name)))
    }
}

/// Whether a run has begun in this directory. What cannot be examined may be one.
pub fn is_run(directory: &Path) -> bool {
    let may_be_there = |name: &str| find(directory, name).unwrap_or(true);
    may_be_there(RESOLVED) || may_be_there(CHECKPOINTS_DIRECTORY)
}

/// Whether the directory has an entry with this name, of any kind.
///
/// # Errors
/// That cannot be examined.
fn find(directory: &Path, name: &str) -> std::io::Result<bool> {
    match Directory::open(directory).and_then(|opened| opened.entry(name.as_ref())) {
        Err(error) if is_absence(&error) => Ok(false),
        found => Ok(found?.is_some()),
    }
}

/// Whether the directory is known to have an entry with this name.
fn is_at(directory: &Path, name: &str) -> bool {
    find(directory, name).unwrap_or(false)
}

/// The run beside this directory whose name is most similar to it.
fn similar_run(directory: &Path) -> Option<PathBuf> {
    let name = directory.file_name()?.to_string_lossy().into_owned();
    let parent = directory.parent()?;
    let listed = Directory::open(parent).and_then(|opened| opened.names()).ok()?;
    let similar = listed.into_iter().filter_map(|other| {
        let (likeness, path) = (strsim::jaro_winkler(&other.to_string_lossy(), &name), parent.join(other));
        (likeness > 0.8 && is_run(&path)).then_some((likeness, path))
    });
    similar.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, path)| path)
}

/// Whether the error says that the file does not exist. Any other error leaves that open.
fn is_absence(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_saved_something_is_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::lock(directory.path()).unwrap();
        std::fs::create_dir(run.checkpoints()).unwrap();
        let half = ".train_low_mem-tmp-0123456789abcdef-part-step-00000001";
        std::fs::create_dir(run.checkpoints().join(half)).unwrap();
        run.refuse_to_overwrite().expect("nothing saved yet");
        std::fs::create_dir(run.checkpoints().join("step-00000001")).unwrap();
        let refused = run.refuse_to_overwrite().expect_err("a checkpoint");
        assert!(refused.hints[0].contains("--keep-training"), "{refused}");
    }

    #[test]
    fn a_file_that_no_run_wrote_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::lock(directory.path()).unwrap();
        for name in [PAGE, EVENTS, FINISHED] {
            let path = directory.path().join(name);
            std::fs::write(&path, "my only copy").unwrap();
            let refused = run.refuse_to_overwrite().expect_err(name);
            assert!(refused.message.contains(name) && refused.hints[1].contains(name), "{refused}");
            std::fs::remove_file(&path).unwrap();
        }
        // A run that was stopped before its first checkpoint wrote its page itself.
        std::fs::write(directory.path().join(PAGE), "<html>").unwrap();
        std::fs::write(directory.path().join(RESOLVED), "").unwrap();
        run.refuse_to_overwrite().expect("a run");
    }

    #[test]
    fn only_a_run_that_has_begun_is_resumed_and_a_similar_one_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let run = |name: &str| RunDir::open_read_only(&directory.path().join(name));
        let refused = run("smal").refuse_to_resume_nothing().expect_err("no run");
        assert_eq!(refused.exit, crate::failure::Exit::Usage, "{refused}");
        assert!(!refused.hints.iter().any(|hint| hint.contains("did you mean")), "{refused}");
        std::fs::create_dir_all(run("small").root()).unwrap();
        run("small").refuse_to_resume_nothing().expect_err("an empty directory");
        std::fs::write(run("small").root().join(RESOLVED), "").unwrap();
        run("small").refuse_to_resume_nothing().expect("a run without a checkpoint");
        let refused = run("smal").refuse_to_resume_nothing().expect_err("no run");
        assert!(refused.hints[0].contains("small"), "{refused}");
        std::fs::create_dir_all(run("other").checkpoints()).unwrap();
        run("other").refuse_to_resume_nothing().expect("a run whose config was removed");
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_cannot_be_looked_at_is_not_taken_for_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::open_read_only(directory.path());
        std::os::unix::fs::symlink(run.checkpoints(), run.checkpoints()).unwrap();
        let failure = run.refuse_to_overwrite().expect_err("a loop of links");
        assert_eq!(failure.exit, crate::failure::Exit::Internal, "{failure}");
    }
}
